"""Launches that are remembered, on a driver that only reads what it is given."""

import ctypes
import struct
import types
from collections.abc import Callable

import pytest

from cupy_gmm import _launch

KERNEL = _launch.Kernel(0xF00, (2, 3, 4), 384, 1 << 16)
BASE = (0x50, 0x1000, 0x2000, 0x3000)  # stream and three addresses


class Given:
    """A kernel that takes three addresses: what the driver read, and how often addresses were packed."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, ...]] = []
        self.packed = 0
        self.refuses = False
        self.launch = _launch.Launcher(KERNEL, self.pack)

    def pack(self, *addresses: int) -> bytes:
        self.packed += 1
        return struct.pack("<3Q", *addresses)

    def launch_kernel(self, *given: int) -> None:
        if self.refuses:
            raise RuntimeError("no")
        assert (*given[:8], given[10]) == (0xF00, 2, 3, 4, 384, 1, 1, 1 << 16, 0)
        block = ctypes.c_uint64.from_address(given[9]).value
        self.seen.append((given[8], *struct.unpack("<3Q", ctypes.string_at(block, 24))))

    def run(self, *sets: tuple[int, ...]) -> None:
        """Launches; each must arrive."""
        self.seen.clear()
        for each in sets:
            self.launch(*each)
        assert self.seen == list(sets)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> Given:
    made = Given()
    cuda = types.SimpleNamespace(driver=types.SimpleNamespace(launchKernel=made.launch_kernel))
    monkeypatch.setattr(_launch, "_cuda", lambda: cuda)
    monkeypatch.setattr(_launch, "_spare", [])
    return made


def test_the_third_launch_alike_packs_nothing(given: Given) -> None:
    for packed in (1, 2, 2, 2):
        given.run(BASE)
        assert given.packed == packed


@pytest.mark.parametrize("part", range(4))
def test_stream_and_every_address_count(part: int, given: Given) -> None:
    other = tuple(value + 0x100 * (index == part) for index, value in enumerate(BASE))
    given.run(BASE, BASE, BASE)
    given.run(other, BASE, other, other, BASE)


def test_what_is_launched_otherwise_changes_nothing(given: Given) -> None:
    """The block of a remembered launch is its own."""
    given.run(BASE, BASE)
    others = [(0x60 + number, number, number, number) for number in range(40)]
    given.run(*others, BASE, *others, BASE, *others, BASE)


def test_what_all_launchers_remember_is_bounded(given: Given, remember_only: Callable[[int], None]) -> None:
    """The oldest goes, whoever has it; what comes again and again comes back."""
    remember_only(6)
    other = _launch.Launcher(KERNEL, given.pack)
    sets = [(0x50, number, 0, 0) for number in range(9)]
    given.run(*sets[:3] * 3)
    assert given.packed == 2 * 3
    for each in sets:
        other(*each)
        given.run(each)
        assert len(given.launch._known) + len(other._known) <= 6
    assert given.launch._known.keys() == other._known.keys() == set(sets[-3:])
    given.run(*sets[:3] * 3)
    assert len(other._known) == 0


@pytest.mark.parametrize("before", range(4))
def test_a_launch_that_failed_is_tried_again(before: int, given: Given) -> None:
    """What the driver refuses is not taken for launched, whether it was known or not."""
    given.run(*[BASE] * before)
    given.refuses = True
    for _ in range(3):
        with pytest.raises(RuntimeError, match="no"):
            given.run(BASE)
    given.refuses = False
    given.run(BASE, BASE)

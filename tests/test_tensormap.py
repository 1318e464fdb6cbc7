"""Tensor maps by address: when the driver is asked, and when a known map gets another address."""

from collections.abc import Callable

import pytest

from cupy_gmm import _problem, _tensormap
from cupy_gmm._arrays.site import View
from cupy_gmm._config import CONFIGS, WGRAD, PingpongConfig
from cupy_gmm._tensormap import MAP_BYTES, MapShape, Side
from tests.backends import Backend

PINGPONG = next(each for each in CONFIGS.values() if each.op == WGRAD and isinstance(each, PingpongConfig))
SHAPES = tuple(MapShape("bfloat16", (64, 96), (128,), (64, rows)) for rows in (16, 32))


def asked(monkeypatch: pytest.MonkeyPatch, encode: Callable[[MapShape, int], bytes]) -> list[tuple[MapShape, int]]:
    """What the driver in its stead is asked for from now on."""
    log: list[tuple[MapShape, int]] = []

    def noted(shape: MapShape, address: int) -> bytes:
        log.append((shape, address))
        return encode(shape, address)

    monkeypatch.setattr(MapShape, "encode", noted)
    return log


def address_first(shape: MapShape, address: int) -> bytes:
    return address.to_bytes(8, "little") + bytes([shape.box[1]]) * (MAP_BYTES - 8)


def address_twice(shape: MapShape, address: int) -> bytes:
    return address_first(shape, address)[:-8] + address.to_bytes(8, "little")


def test_two_answers_of_the_driver_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    log = asked(monkeypatch, address_first)
    side = Side(SHAPES)
    for address in (0x1000, 0x2000, 0x7FFF12345670, 0x2000, 0x40):
        assert side.encoded(address) == b"".join(address_first(shape, address) for shape in SHAPES)
    assert log == [(shape, address) for address in (0x1000, 0x2000) for shape in SHAPES]


def test_maps_that_differ_elsewhere_are_always_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    log = asked(monkeypatch, address_twice)
    side = Side(SHAPES)
    for address in (0x1000, 0x2000, 0x3000, 0x3000):
        assert side.encoded(address) == b"".join(address_twice(shape, address) for shape in SHAPES)
    assert [address for _, address in log[:: len(SHAPES)]] == [0x1000, 0x2000, 0x3000]


def test_addresses_are_not_kept_for_ever(remember_only: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    asked(monkeypatch, address_first)
    remember_only(3)
    side = Side(SHAPES)
    for address in range(0, 0x200, 16):
        assert side.encoded(address)[:8] == address.to_bytes(8, "little")
        assert len(side._known) <= 3


@pytest.mark.parametrize("extents", [(64, 128), (72, 136)], ids=["whole blocks", "cut blocks"])
def test_steps_that_a_map_cannot_take_are_stored_otherwise(extents: tuple[int, int]) -> None:
    """Of a weight gradient, whose boxes count sixteens of rows: such a step, and one of groups, is below 2^40 bytes."""
    k, n = extents
    x, dy = (View(0, (100, width), (width, 1), "bfloat16", -1, False, None) for width in (k, n))
    limit = (1 << 40) // 2  # elements
    row_limit = limit // 16
    for groups, group, row, stored in (
        (1, k * n, n, True),
        (1, k * row_limit, row_limit - 8, True),
        (1, k * row_limit, row_limit, False),
        (3, limit - 8, n, True),
        (3, limit, n, False),
    ):
        out = View(0, (groups, k, n), (group, row, 1), "bfloat16", -1, False, None)
        problem = _problem.weight_gradient(x, dy, out, None, groups, False)
        assert problem.vector_store
        assert _tensormap.can_store(problem) == stored, (group, row)
        shapes = _tensormap.maps(problem, PINGPONG)._c._shapes
        assert (len(shapes) > 0) == stored
        assert all(step < 1 << 40 for shape in shapes for step in shape.strides)


@pytest.mark.gpu
def test_the_driver_puts_the_address_in_front(gpu: Backend) -> None:
    ragged = _tensormap._ragged("float16", 1000, 136, 144)
    for shape in (*SHAPES, ragged):
        side = Side((shape,))
        for address in (0x7F0000000000, 0x7F1234567890, 0x10, 0x7FFFFFFFFF00):
            assert side.encoded(address) == shape.encode(address)
        assert side._patches

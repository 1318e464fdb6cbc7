"""Wrong calls: which exception, and a sentence that names the argument, what it is and what helps.

Nothing is launched or written by a call that raises.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm.errors import ArgumentError, DtypeError, GmmError
from tests import layouts
from tests.backends import DTYPES, Backend, is_poison

BF16 = DTYPES["bfloat16"]
ROWS, K, N, GROUPS = 12, 8, 6, 3


class Given:
    """Arguments that would be right, and makers of wrong ones."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.x = self.array(ROWS, K)
        self.w = self.array(GROUPS, K, N)
        self.dy = self.array(ROWS, N)
        self.offs = self.ints([4, 4, 12])
        self.schedule = cupy_gmm.make_schedule(self.offs, ROWS)

    def array(self, *shape: int, dtype: Any = BF16) -> Any:
        return self.backend.place(np.ones(shape, dtype)).array

    def ints(self, values: Any, dtype: Any = np.int32) -> Any:
        return self.backend.place(np.array(values, dtype)).array

    def tall(self) -> Any:
        """More rows than the library takes, in the memory of one."""
        one = np.ones((1, K), BF16)
        flat = layouts.Placement((0, 1), 0, K)
        del one
        return self._window((0x7FFF0001, K), flat)

    def overlapping(self, *strides: int) -> Any:
        return self._window((ROWS, N), layouts.Placement(strides, 0, 4 * ROWS * N))

    def _window(self, shape: tuple[int, ...], where: layouts.Placement) -> Any:
        host = np.zeros(where.span, np.uint16)
        strides = tuple(2 * s for s in where.strides)
        return self.backend.upload(host, shape, BF16, 0, strides)[1]

    def mm(self, **wrong: Any) -> Any:
        arguments = {"x": self.x, "w": self.w, "offs": self.offs} | wrong
        return cupy_gmm.grouped_mm(arguments.pop("x"), arguments.pop("w"), arguments.pop("offs"), **arguments)

    def wgrad(self, **wrong: Any) -> Any:
        arguments = {"x": self.x, "dy": self.dy, "offs": self.offs} | wrong
        call = cupy_gmm.grouped_mm_wgrad
        return call(arguments.pop("x"), arguments.pop("dy"), arguments.pop("offs"), **arguments)


@dataclasses.dataclass(frozen=True)
class Wrong:
    name: str
    call: Callable[[Given], Any]
    error: type[GmmError]
    text: str  # regular expression, searched in the message


def mm(name: str, wrong: Callable[[Given], dict[str, Any]], error: type[GmmError], text: str) -> Wrong:
    return Wrong(f"mm-{name}", lambda given: given.mm(**wrong(given)), error, text)


def wgrad(name: str, wrong: Callable[[Given], dict[str, Any]], error: type[GmmError], text: str) -> Wrong:
    return Wrong(f"wgrad-{name}", lambda given: given.wgrad(**wrong(given)), error, text)


def other(name: str, call: Callable[[Given], Any], error: type[GmmError], text: str) -> Wrong:
    return Wrong(name, call, error, text)


def one_group_in_place(given: Given) -> dict[str, Any]:
    """x (K, K) and w (1, K, K), whose matrix is also `out`."""
    w = given.array(1, K, K)
    return {"x": given.array(K, K), "w": w, "offs": given.ints([K]), "out": w[0]}


OPERANDS = [
    mm(
        "x-float32",
        lambda g: {"x": g.array(ROWS, K, dtype=np.float32)},
        DtypeError,
        r"`x`.*float32.*bfloat16",
    ),
    mm("x-int8", lambda g: {"x": g.array(ROWS, K, dtype=np.int16)}, DtypeError, r"`x`.*int16.*float16"),
    mm(
        "w-other-dtype",
        lambda g: {"w": g.array(3, K, N, dtype=np.float16)},
        DtypeError,
        r"`w`.*float16.*bfloat16",
    ),
    mm(
        "w-float64",
        lambda g: {"w": g.array(3, K, N, dtype=np.float64)},
        DtypeError,
        r"`w`.*float64.*bfloat16",
    ),
    mm("x-rank-1", lambda g: {"x": g.array(ROWS)}, ArgumentError, r"`x` has shape \(12,\).*\(rows, k\)"),
    mm(
        "x-rank-3", lambda g: {"x": g.array(2, ROWS, K)}, ArgumentError, r"`x` has shape \(2, 12, 8\).*reshape\(-1, 8\)"
    ),
    mm(
        "w-rank-2",
        lambda g: {"w": g.array(K, N)},
        ArgumentError,
        r"`w` has shape \(8, 6\).*\(groups, k, n\).*`w\[None\]",
    ),
    mm(
        "w-k",
        lambda g: {"w": g.array(3, 7, N)},
        ArgumentError,
        r"`w` has shape \(3, 7, 6\).*k = 8.*\(12, 8\)",
    ),
    mm(
        "w-transposed",
        lambda g: {"w": g.array(3, N, K)},
        ArgumentError,
        r"`w` has shape \(3, 6, 8\).*`w\.mT`",
    ),
    mm("x-list", lambda g: {"x": [[1.0, 2.0]]}, ArgumentError, r"`x`.*list"),
    mm("w-none", lambda g: {"w": None}, ArgumentError, r"`w`.*None"),
    mm("x-string", lambda g: {"x": "x"}, ArgumentError, r"`x`.*str"),
    mm("rows-too-many", lambda g: {"x": g.tall()}, ArgumentError, r"`?rows`?.*2147418113.*2147418112.*split"),
    wgrad("x-float32", lambda g: {"x": g.array(ROWS, K, dtype=np.float32)}, DtypeError, r"`x`.*float32"),
    wgrad(
        "dy-dtype",
        lambda g: {"dy": g.array(ROWS, N, dtype=np.float16)},
        DtypeError,
        r"`dy`.*float16.*bfloat16",
    ),
    wgrad("dy-rows", lambda g: {"dy": g.array(11, N)}, ArgumentError, r"`dy` has shape \(11, 6\).*rows = 12"),
    wgrad("dy-rank", lambda g: {"dy": g.array(ROWS, N, 1)}, ArgumentError, r"`dy` has shape \(12, 6, 1\)"),
    wgrad("x-rank", lambda g: {"x": g.array(ROWS)}, ArgumentError, r"`x` has shape \(12,\)"),
    wgrad("dy-list", lambda g: {"dy": [1]}, ArgumentError, r"`dy`.*list"),
    wgrad("rows-too-many", lambda g: {"x": g.tall(), "dy": g.tall()}, ArgumentError, r"rows.*2147418113"),
]

OFFSETS = [
    maker(f"offs-{name}", wrong, error, text)
    for maker in (mm, wgrad)
    for name, wrong, error, text in (
        ("float", lambda g: {"offs": g.ints([4, 4, 12], np.float32)}, DtypeError, r"`offs`.*float32.*int32"),
        ("int16", lambda g: {"offs": g.ints([4, 4, 12], np.int16)}, DtypeError, r"`offs`.*int16.*int32"),
        ("uint32", lambda g: {"offs": g.ints([4, 4, 12], np.uint32)}, DtypeError, r"`offs`.*uint32.*int32"),
        (
            "rank-2",
            lambda g: {"offs": g.ints([[4, 4, 12]])},
            ArgumentError,
            r"`offs` has shape \(1, 3\).*\(groups,\)",
        ),
        ("rank-0", lambda g: {"offs": g.ints(12)}, ArgumentError, r"`offs` has shape \(\).*\(groups,\)"),
        ("list", lambda g: {"offs": [4, 4, 12]}, ArgumentError, r"`offs`.*list"),
        ("none", lambda g: {"offs": None}, ArgumentError, r"`offs`.*None"),
    )
] + [
    mm("offs-too-short", lambda g: {"offs": g.ints([4, 12])}, ArgumentError, r"`offs`.*\b2\b.*\b3\b"),
    mm("offs-window", lambda g: {"group_offset": 1}, ArgumentError, r"`offs`.*\b3\b.*\b4\b.*`group_offset`"),
]

OUTPUTS = [
    mm("out-is-x", lambda g: {"w": g.array(GROUPS, K, K), "out": g.x}, ArgumentError, r"`out`.*input"),
    mm("out-is-w", lambda g: one_group_in_place(g), ArgumentError, r"`out`.*input"),
    mm(
        "out-shape",
        lambda g: {"out": g.array(ROWS, N + 1)},
        ArgumentError,
        r"`out` has shape \(12, 7\).*\(12, 6\)",
    ),
    mm("out-rank", lambda g: {"out": g.array(ROWS * N)}, ArgumentError, r"`out` has shape \(72,\).*\(12, 6\)"),
    mm(
        "out-float64",
        lambda g: {"out": g.array(ROWS, N, dtype=np.float64)},
        DtypeError,
        r"`out`.*float64.*float32",
    ),
    mm("out-int", lambda g: {"out": g.array(ROWS, N, dtype=np.int16)}, DtypeError, r"`out`.*int16"),
    mm("out-list", lambda g: {"out": [1, 2]}, ArgumentError, r"`out`.*list"),
    mm(
        "out-and-out_dtype",
        lambda g: {"out": g.array(ROWS, N), "out_dtype": np.float32},
        DtypeError,
        r"`out`.*bfloat16.*`out_dtype`.*float32",
    ),
    mm("out-stride-0", lambda g: {"out": g.overlapping(0, 1)}, ArgumentError, r"`out`.*\(0, 1\).*overlap"),
    mm("out-columns-0", lambda g: {"out": g.overlapping(6, 0)}, ArgumentError, r"`out`.*\(6, 0\).*overlap"),
    mm("out-rows-overlap", lambda g: {"out": g.overlapping(5, 1)}, ArgumentError, r"`out`.*\(5, 1\).*overlap"),
    mm("out-backwards", lambda g: {"out": g.overlapping(1, 1)}, ArgumentError, r"`out`.*\(1, 1\).*overlap"),
    mm("out_dtype-float64", lambda g: {"out_dtype": np.float64}, DtypeError, r"`out_dtype`.*float64.*float32"),
    mm("out_dtype-word", lambda g: {"out_dtype": "half"}, DtypeError, r"`out_dtype`.*half.*float16"),
    mm("out_dtype-int", lambda g: {"out_dtype": np.int32}, DtypeError, r"`out_dtype`.*int32"),
    wgrad(
        "out-shape",
        lambda g: {"out": g.array(3, N, K)},
        ArgumentError,
        r"`out` has shape \(3, 6, 8\).*\(3, 8, 6\).*`out\.mT`",
    ),
    wgrad("out-groups", lambda g: {"out": g.array(4, K, N)}, ArgumentError, r"\b3\b.*\b4\b|\b4\b.*\b3\b"),
    wgrad("accumulate", lambda g: {"accumulate": True}, ArgumentError, r"`accumulate`.*`out"),
    wgrad("out_dtype", lambda g: {"out_dtype": np.int8}, DtypeError, r"`out_dtype`.*int8"),
]

OPTIONS = [
    maker(name, wrong, error, text)
    for maker in (mm, wgrad)
    for name, wrong, error, text in (
        ("group_offset-negative", lambda g: {"group_offset": -1}, ArgumentError, r"`group_offset` is -1"),
        ("group_offset-float", lambda g: {"group_offset": 1.5}, ArgumentError, r"`group_offset`.*1\.5.*int"),
        ("group_offset-word", lambda g: {"group_offset": "1"}, ArgumentError, r"`group_offset`.*'1'.*int"),
        ("group_offset-none", lambda g: {"group_offset": None}, ArgumentError, r"`group_offset`.*None.*int"),
        ("group_offset-shape", lambda g: {"group_offset": g.ints([0, 1])}, ArgumentError, r"`group_offset`"),
        ("check", lambda g: {"check": "always"}, ArgumentError, r"`check` is 'always'.*\"sync\".*\"async\""),
        ("check-true", lambda g: {"check": True}, ArgumentError, r"`check` is True"),
        ("config", lambda g: {"config": "fastest"}, ArgumentError, r"`config`.*fastest.*128"),
        ("config-type", lambda g: {"config": 3}, ArgumentError, r"`config`.*3"),
    )
] + [
    mm(
        "config-of-wgrad",
        lambda g: {"config": "wgrad-64x64"},
        ArgumentError,
        r"`config`.*wgrad-64x64.*grouped_mm",
    ),
    wgrad("config-of-mm", lambda g: {"config": "128x128"}, ArgumentError, r"`config`.*128x128.*grouped_mm_wgrad"),
    wgrad("num_groups-negative", lambda g: {"num_groups": -1}, ArgumentError, r"`num_groups` is -1"),
    wgrad("num_groups-float", lambda g: {"num_groups": 2.0}, ArgumentError, r"`num_groups`.*2\.0.*int"),
    wgrad("num_groups-too-many", lambda g: {"num_groups": 4}, ArgumentError, r"\b3\b.*\b4\b|\b4\b.*\b3\b"),
    wgrad("group_offset-past", lambda g: {"group_offset": 4}, ArgumentError, r"`group_offset` is 4.*`offs`.*\b3\b"),
    wgrad("num_groups-array", lambda g: {"num_groups": g.ints([2])}, ArgumentError, r"`num_groups` is a ndarray.*int"),
    wgrad(
        "num_groups-and-out",
        lambda g: {"num_groups": 2, "out": g.array(3, K, N)},
        ArgumentError,
        r"`out` has shape \(3, 8, 6\).*\(2, 8, 6\)",
    ),
]

SCHEDULES = [
    mm("schedule-rows", lambda g: {"x": g.array(13, K), "offs": g.schedule}, ArgumentError, r"`offs`.*12.*13"),
    mm(
        "schedule-groups",
        lambda g: {"w": g.array(4, K, N), "offs": g.schedule},
        ArgumentError,
        r"\b3\b.*\b4\b",
    ),
    mm("schedule-window", lambda g: {"offs": g.schedule, "group_offset": 1}, ArgumentError, r"`group_offset`"),
    wgrad(
        "schedule-rows",
        lambda g: {"x": g.array(7, K), "dy": g.array(7, N), "offs": g.schedule},
        ArgumentError,
        r"`offs`.*12.*7",
    ),
    other(
        "make-float",
        lambda g: cupy_gmm.make_schedule(g.ints([1], np.float32), 4),
        DtypeError,
        r"`offs`.*float32",
    ),
    other("make-rank", lambda g: cupy_gmm.make_schedule(g.ints([[1]]), 4), ArgumentError, r"`offs`.*\(1, 1\)"),
    other("make-list", lambda g: cupy_gmm.make_schedule([1, 2], 4), ArgumentError, r"`offs`.*list"),
    other("make-rows", lambda g: cupy_gmm.make_schedule(g.offs, -1), ArgumentError, r"`rows` is -1"),
    other(
        "make-rows-float",
        lambda g: cupy_gmm.make_schedule(g.offs, 4.0),
        ArgumentError,
        r"`rows` is 4\.0.*int",
    ),
    other("make-rows-array", lambda g: cupy_gmm.make_schedule(g.offs, g.x), ArgumentError, r"`rows` is a ndarray"),
    other("make-none", lambda g: cupy_gmm.make_schedule(None, 4), ArgumentError, r"`offs` is None"),
    other("make-twice", lambda g: cupy_gmm.make_schedule(g.schedule, ROWS), ArgumentError, r"`offs` is a Schedule"),
    other("status-device", lambda g: cupy_gmm.async_status("cuda:0"), ArgumentError, r"`device` is 'cuda:0'.*int"),
    other("sizes-none", lambda g: cupy_gmm.offs_from_sizes(None), ArgumentError, r"`group_sizes` is None"),
    other(
        "make-rows-large",
        lambda g: cupy_gmm.make_schedule(g.offs, 2**31),
        ArgumentError,
        r"`rows`.*2147483648",
    ),
    other(
        "make-offset",
        lambda g: cupy_gmm.make_schedule(g.offs, ROWS, group_offset=-2),
        ArgumentError,
        r"`group_offset` is -2",
    ),
    other(
        "make-out-rows",
        lambda g: cupy_gmm.make_schedule(g.offs, ROWS + 1, out=g.schedule),
        ArgumentError,
        r"`out`.*12.*13",
    ),
    other(
        "make-out-groups",
        lambda g: cupy_gmm.make_schedule(g.ints([1, 2]), ROWS, out=g.schedule),
        ArgumentError,
        r"`out`.*\b3\b.*\b2\b",
    ),
    other(
        "make-out-array",
        lambda g: cupy_gmm.make_schedule(g.offs, ROWS, out=g.offs),
        ArgumentError,
        r"`out`.*Schedule",
    ),
    other(
        "sizes-float",
        lambda g: cupy_gmm.offs_from_sizes(g.ints([1], np.float32)),
        DtypeError,
        r"`group_sizes`",
    ),
    other(
        "sizes-rank",
        lambda g: cupy_gmm.offs_from_sizes(g.ints([[1]])),
        ArgumentError,
        r"`group_sizes`.*\(1, 1\)",
    ),
    other("sizes-list", lambda g: cupy_gmm.offs_from_sizes([1, 2]), ArgumentError, r"`group_sizes`.*list"),
]

TABLE = [*OPERANDS, *OFFSETS, *OUTPUTS, *OPTIONS, *SCHEDULES]


@pytest.fixture(scope="module")
def given(backend: Backend) -> Given:
    return Given(backend)


@pytest.mark.parametrize("wrong", TABLE, ids=lambda wrong: wrong.name)
def test_wrong_call(wrong: Wrong, given: Given) -> None:
    with pytest.raises(wrong.error) as caught:
        wrong.call(given)
    message = str(caught.value)
    assert re.search(wrong.text, message, re.DOTALL), message
    assert re.fullmatch(r".*`.*\.", message, re.DOTALL), f"not a sentence: {message}"
    builtin = TypeError if wrong.error is DtypeError else ValueError
    assert isinstance(caught.value, builtin)


def test_the_right_call_is_right(given: Given) -> None:
    """Otherwise the table would prove nothing."""
    assert given.mm().shape == (ROWS, N)
    assert given.wgrad().shape == (GROUPS, K, N)
    assert given.mm(offs=given.schedule).shape == (ROWS, N)


@pytest.mark.parametrize("spelling", ["float32", np.float32, np.dtype(np.float32), "bfloat16", BF16, BF16.type])
def test_ways_to_say_a_dtype(spelling: Any, given: Given) -> None:
    name = spelling if isinstance(spelling, str) else np.dtype(spelling).name
    assert np.dtype(given.mm(out_dtype=spelling).dtype) == DTYPES[name]
    assert np.dtype(given.wgrad(out_dtype=spelling).dtype) == DTYPES[name]
    assert np.dtype(given.mm(out=given.array(ROWS, N, dtype=DTYPES[name])).dtype) == DTYPES[name]


def test_nothing_is_written_by_a_call_that_raises(given: Given) -> None:
    for wrong in ({"check": "never"}, {"config": "none"}, {"group_offset": -1}, {"offs": given.ints([[1]])}):
        out = given.backend.output((ROWS, N), "bfloat16")
        with pytest.raises(GmmError):
            given.mm(out=out.array, **wrong)
        assert is_poison(out.read()).all()


@pytest.mark.gpu
def test_mixed_devices(gpu: Backend) -> None:
    """Both arguments and both places are named."""
    given = Given(gpu)
    host = np.array([4, 4, 12], np.int32)
    for wrong, names in (
        ({"offs": host}, ("`offs`", "`x`")),
        ({"w": np.ones((GROUPS, K, N), BF16)}, ("`w`", "`x`")),
        ({"x": np.ones((ROWS, K), BF16)}, ("`x`", "`w`")),
        ({"out": np.ones((ROWS, N), BF16)}, ("`out`", "`x`")),
    ):
        with pytest.raises(ArgumentError) as caught:
            given.mm(**wrong)
        message = str(caught.value)
        assert all(word in message for word in (*names, "CPU", "cuda:0")), message

"""Wrong calls of `permute`, `combine` and their gradients: which exception, and a sentence that helps."""

import dataclasses
from typing import Any

import numpy as np
import pytest

import cupy_gmm
from cupy_gmm.errors import ArgumentError, DtypeError
from tests import backends, layouts
from tests.backends import DTYPES, Backend

TOKENS, SLOTS, H = 6, 2, 8


class Given:
    """Arguments that are right, and makers of others."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.routing = cupy_gmm.route(backend.ints(np.arange(12).reshape(TOKENS, SLOTS) % 4), 3)
        self.x = self.dy = self.array(TOKENS, H)
        self.y = self.array(TOKENS * SLOTS, H)
        self.weights = self.array(TOKENS, SLOTS, dtype="float32")

    def array(self, *shape: int, dtype: str = "bfloat16", layout: layouts.Layout = layouts.contiguous) -> Any:
        return self.backend.place(np.ones(shape, DTYPES[dtype]), layout).array

    def ints(self, count: int, dtype: str = "int32", layout: layouts.Layout = layouts.contiguous) -> Any:
        return self.array(count, dtype=dtype, layout=layout)

    def with_routing(self, **wrong: Any) -> cupy_gmm.Routing:
        return dataclasses.replace(self.routing, **wrong)

    def call(self, name: str, **wrong: Any) -> Any:
        names = {
            "permute": ("x", "routing"),
            "permute_backward": ("dy", "routing"),
            "combine": ("y", "routing", "weights"),
            "combine_backward": ("dy", "y", "routing", "weights"),
        }[name]
        right = {n: getattr(self, n) for n in names}
        if name == "permute_backward":
            right["dy"] = self.y
        unused = wrong.keys() - {*names, "out"}
        assert not unused
        options = {"out": wrong.pop("out")} if "out" in wrong else {}
        return getattr(cupy_gmm, name)(*(right | wrong).values(), **options)

    def raises(self, kind: type[Exception], name: str, text: str, **wrong: Any) -> None:
        with pytest.raises(kind) as caught:
            self.call(name, **wrong)
        assert text in str(caught.value)


@pytest.fixture
def given(backend: Backend) -> Given:
    return Given(backend)


NAMES = ("permute", "permute_backward", "combine", "combine_backward")


@pytest.mark.parametrize("name", NAMES)
def test_the_right_call_is_right(name: str, given: Given) -> None:
    assert given.call(name) is not None


@pytest.mark.parametrize("name", NAMES)
def test_routing(name: str, given: Given) -> None:
    given.raises(
        ArgumentError, name, "`routing` is a tuple: expected the Routing that `route` returned; pass that.",
        routing=(1, 2, 3, 4),
    )  # fmt: skip
    wrong = given.with_routing(order=given.ints(12, "int64"))
    given.raises(
        DtypeError, name, '`routing.order` has dtype int64: expected int32; cast it, for example `routing.order.astype',
        routing=wrong,
    )  # fmt: skip
    wrong = given.with_routing(inverse=given.ints(11))
    given.raises(
        ArgumentError, name, "`routing.inverse` has shape (11,): expected (12,), as `routing.order` has",
        routing=wrong,
    )  # fmt: skip
    wrong = given.with_routing(offs=given.array(3, 1, dtype="int32"))
    given.raises(ArgumentError, name, "`routing.offs` has shape (3, 1): expected one axis", routing=wrong)
    wrong = given.with_routing(order=given.ints(12, layout=layouts.step_two))
    given.raises(
        ArgumentError, name, "`routing.order` has strides (2,) for shape (12,): expected contiguous elements",
        routing=wrong,
    )  # fmt: skip
    for order, text in (([1, 2], "`routing.order` is a list"), (None, "`routing.order` is None: expected an array.")):
        given.raises(ArgumentError, name, text, routing=given.with_routing(order=order))


@pytest.mark.parametrize(
    "name, argument", [("permute", "x"), ("permute_backward", "dy"), ("combine", "weights"), ("combine_backward", "y")]
)
def test_an_array_that_is_none(name: str, argument: str, given: Given) -> None:
    given.raises(ArgumentError, name, f"`{argument}` is None: expected an array.", **{argument: None})


def test_number_of_tokens(given: Given) -> None:
    given.raises(
        ArgumentError,
        "permute",
        "`x` has 5 tokens: expected 6, as `routing` was made for",
        x=given.array(5, H),
    )
    unknown = given.with_routing(tokens=None)
    for name in ("permute", "combine", "combine_backward"):
        given.call(name, routing=unknown)
    given.raises(
        ArgumentError, "permute_backward",
        "`routing` has tokens None: expected the number of tokens; build it as `Routing(..., tokens=T)`.",
        routing=unknown,
    )  # fmt: skip
    given.raises(
        ArgumentError, "permute", "`x` has 5 tokens: expected a divisor of 12, the length of `routing.order`",
        x=given.array(5, H), routing=unknown,
    )  # fmt: skip
    given.raises(
        ArgumentError, "permute", "`x` has 0 tokens: expected a divisor of 12",
        x=given.array(0, H), routing=unknown,
    )  # fmt: skip
    given.raises(
        ArgumentError, "permute_backward", "`routing` has -3 tokens: expected a divisor of 12",
        routing=given.with_routing(tokens=-3),
    )  # fmt: skip
    assert given.call("permute", x=given.array(12, H), routing=unknown).shape == (12, H)


def test_rows(given: Given) -> None:
    given.raises(ArgumentError, "permute", "`x` has shape (6,): expected (tokens, h)", x=given.array(6))
    given.raises(
        DtypeError, "permute", "`x` has dtype int32: expected bfloat16, float16 or float32; cast it",
        x=given.array(6, H, dtype="int32"),
    )  # fmt: skip
    for name, argument in (("permute_backward", "dy"), ("combine", "y"), ("combine_backward", "y")):
        given.raises(
            ArgumentError, name, f"`{argument}` has shape (12,): expected (tokens * slots, h)",
            **{argument: given.array(12)},
        )  # fmt: skip
        given.raises(
            ArgumentError, name,
            f"`{argument}` has shape (6, 8): expected (12, h), a row for each element of `routing.order`",
            **{argument: given.array(6, H)},
        )  # fmt: skip
        given.raises(DtypeError, name, f"`{argument}` has dtype int64", **{argument: given.array(12, H, dtype="int64")})
    given.raises(
        DtypeError, "combine_backward", "`dy` has dtype float16: expected bfloat16, as `y` has; cast it",
        dy=given.array(6, H, dtype="float16"),
    )  # fmt: skip
    given.raises(
        ArgumentError, "combine_backward",
        "`dy` has shape (6, 7): expected (6, 8), as `y` has shape (12, 8) and `weights` has shape (6, 2).",
        dy=given.array(6, 7),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["combine", "combine_backward"])
def test_weights(name: str, given: Given) -> None:
    def weights(*shape: int, dtype: str = "float32") -> Any:
        return given.array(*shape, dtype=dtype)

    given.raises(ArgumentError, name, "`weights` has shape (12,): expected (tokens, slots)", weights=weights(12))
    given.raises(
        ArgumentError, name, "`weights` has shape (6, 1): expected (6, 2), as `routing` has 12 assignments",
        weights=weights(6, 1),
    )  # fmt: skip
    given.raises(
        ArgumentError, name, "`weights` has 4 tokens: expected 6, as `routing` was made for",
        weights=weights(4, 3),
    )  # fmt: skip
    given.raises(
        DtypeError, name, "`weights` has dtype int32: expected float32, bfloat16 or float16; cast it",
        weights=weights(6, 2, dtype="int32"),
    )  # fmt: skip


@pytest.mark.parametrize("name", ["permute", "permute_backward", "combine"])
def test_out(name: str, given: Given) -> None:
    rows = 12 if name == "permute" else 6
    given.raises(
        ArgumentError, name, f"`out` has shape (5, 8): expected ({rows}, 8), the shape of the result of",
        out=given.array(5, H),
    )  # fmt: skip
    given.raises(
        DtypeError, name, f"`out` has dtype float32: expected bfloat16, that of the result of `{name}`",
        out=given.array(rows, H, dtype="float32"),
    )  # fmt: skip
    given.raises(
        ArgumentError, name, "elements overlap in memory; pass an array of its own",
        out=given.array(rows, H, layout=layouts.broadcast),
    )  # fmt: skip
    both = given.array(12, H)
    argument = {"permute": "x", "permute_backward": "dy", "combine": "y"}[name]
    inputs = both[:6] if name == "permute" else both
    given.raises(
        ArgumentError, name, f"`out` begins where an input of `{name}` does: pass an array of its own.",
        **{argument: inputs}, out=both if name == "permute" else both[:6],
    )  # fmt: skip


def test_out_of_combine_backward(given: Given) -> None:
    right = given.array(12, H), given.array(6, 2, dtype="float32")
    given.raises(
        ArgumentError, "combine_backward", "`out[0]` has shape (12, 7): expected (12, 8)",
        out=(given.array(12, 7), right[1]),
    )  # fmt: skip
    given.raises(
        DtypeError, "combine_backward", "`out[1]` has dtype bfloat16: expected float32",
        out=(right[0], given.array(6, 2)),
    )  # fmt: skip
    given.raises(
        ArgumentError, "combine_backward", "`out[1]` has strides (1, 6) for shape (6, 2): expected",
        out=(right[0], given.array(6, 2, dtype="float32", layout=layouts.transposed)),
    )  # fmt: skip


def test_read_only_out() -> None:
    """CuPy has no such arrays."""
    given = Given(backends.make("cpu"))
    out = np.zeros((6, H), DTYPES["bfloat16"])
    out.flags.writeable = False
    given.raises(ArgumentError, "combine", "`out` is read-only memory", out=out)

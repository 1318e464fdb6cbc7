"""What routing must give, one plain step at a time, and the calls that compare with it.

Written apart from `cupy_gmm._routing_host` on purpose: that twin is itself under test.
"""

import dataclasses

import numpy as np

import cupy_gmm
from tests import backends, layouts, oracle
from tests.backends import DTYPES, Backend, Placed


@dataclasses.dataclass(frozen=True)
class Plain:
    """A Routing on the host, and where each assignment lives (-1: dropped)."""

    order: np.ndarray
    inverse: np.ndarray
    offs: np.ndarray
    counts: np.ndarray
    tokens: int

    @property
    def live(self) -> np.ndarray:
        """Position of each assignment by the rule for any contents; the plain one for those of `route`."""
        length = len(self.order)
        used = min(max(int(self.offs[-1]), 0), length) if len(self.offs) else 0
        found = np.full(length, -1)
        for assignment, row in enumerate(self.inverse.tolist()):
            if 0 <= row < used and self.order[row] == assignment:
                found[assignment] = row
        return found

    def on(self, backend: Backend, tokens: int | None = -1) -> cupy_gmm.Routing:
        arrays = (backend.ints(a) for a in (self.order, self.inverse, self.offs, self.counts))
        return cupy_gmm.Routing(*arrays, tokens=self.tokens if tokens == -1 else tokens)


def route(ids: np.ndarray, experts: int) -> Plain:
    """Python's own stable sort."""
    flat = [int(i) if 0 <= i < experts else experts for i in ids.reshape(-1).tolist()]
    order = sorted(range(len(flat)), key=flat.__getitem__)
    inverse = np.full(len(flat), -1)
    for position, assignment in enumerate(order):
        if flat[assignment] < experts:
            inverse[assignment] = position
    counts = np.zeros(experts + 1, np.int64)
    for expert in flat:
        counts[expert] += 1
    offs = np.cumsum(counts[:experts])
    return Plain(*(np.array(a, np.int32) for a in (order, inverse, offs, counts[:experts])), tokens=len(ids))


def permute(x: np.ndarray, plain: Plain) -> np.ndarray:
    y = np.zeros((len(plain.order), x.shape[1]), x.dtype)
    for assignment, row in enumerate(plain.live):
        if row >= 0:
            y[row] = x[assignment // (len(plain.order) // plain.tokens)]
    return y


def combine(y: np.ndarray, plain: Plain, weights: np.ndarray | None) -> np.ndarray:
    """float32, product and sum rounded one by one, slot after slot; one rounding at the end."""
    total = np.zeros((plain.tokens, y.shape[1]), np.float32)
    slots = len(plain.order) // max(plain.tokens, 1)
    for assignment, row in enumerate(plain.live):
        if row >= 0:
            token, slot = divmod(assignment, slots)
            weight = np.float32(1 if weights is None else weights[token, slot])
            total[token] += weight * y[row].astype(np.float32)
    return oracle.rounded(total, y.dtype.name)


def combine_backward(
    dy: np.ndarray, y: np.ndarray, plain: Plain, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """d_y, and value and magnitude of d_weights in float64."""
    d_y = np.zeros(y.shape, y.dtype)
    value, magnitude = (np.zeros(weights.shape, np.float64) for _ in range(2))
    for assignment, row in enumerate(plain.live):
        if row >= 0:
            at = divmod(assignment, weights.shape[1])
            grad = dy[at[0]].astype(np.float32)
            d_y[row] = oracle.rounded(np.float32(weights[at]) * grad, y.dtype.name)
            terms = grad.astype(np.float64) * y[row].astype(np.float64)
            value[at], magnitude[at] = terms.sum(), np.abs(terms).sum()
    return d_y, value, magnitude


def check_route(backend: Backend, ids: np.ndarray, experts: int, layout: layouts.Layout = layouts.contiguous) -> None:
    """Both ways to call it, every word and every guard byte."""
    placed = backend.place(ids, layout)
    plain = route(placed.values, experts)
    what = f"route of {ids.dtype} {ids.shape} to {experts} experts"
    same_routing(backend, cupy_gmm.route(placed.array, experts), plain, what)
    outs = [backend.output((n,), "int32") for n in (ids.size, ids.size, experts, experts)]
    given = cupy_gmm.Routing(*(out.array for out in outs), tokens=len(ids))
    assert cupy_gmm.route(placed.array, experts, out=given) is given
    same_routing(backend, given, plain, f"{what}, out=")
    for out in outs:
        out.check_guards()
    placed.check_untouched()


def same_routing(backend: Backend, routing: cupy_gmm.Routing, plain: Plain, what: str) -> None:
    assert routing.tokens == plain.tokens
    for name in ("order", "inverse", "offs", "counts"):
        oracle.assert_same_bits(backend.get(getattr(routing, name)), getattr(plain, name), f"{what}: {name}")


def ids_of(rng: np.random.Generator, tokens: int, slots: int, experts: int, dtype: str = "int32") -> np.ndarray:
    """Ids of which some are out of range on either side."""
    return rng.integers(-max(experts // 8, 1), experts + max(experts // 8, 1), (tokens, slots)).astype(dtype)


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape).astype(DTYPES[dtype])


def rows_of(
    rng: np.random.Generator, backend: Backend, plain: Plain, width: int, dtype: str, layout: layouts.Layout
) -> Placed:
    """(assignments, width), NaN in every row where no assignment lives and that is not every row's memory."""
    shape = (len(plain.order), width)
    values = normal(rng, shape, dtype)
    dead = np.ones(shape[0], bool)
    dead[plain.live[plain.live >= 0]] = False
    if layout is not layouts.broadcast:
        values[dead] = np.nan
    return backend.place(values, layout)


def weights_of(rng: np.random.Generator, backend: Backend, plain: Plain, dtype: str, layout: layouts.Layout) -> Placed:
    """(tokens, slots), NaN for dropped assignments."""
    values = normal(rng, (plain.tokens, len(plain.order) // max(plain.tokens, 1)), dtype)
    values[(plain.live < 0).reshape(values.shape)] = np.nan
    return backend.place(values, layout)


def finite(array: np.ndarray) -> bool:
    return bool(np.isfinite(array.astype(np.float32)).all()) and not backends.is_poison(array).any()

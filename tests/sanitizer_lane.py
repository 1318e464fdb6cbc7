"""A compact part of the matrix for a memory checker; no test of pytest.

    compute-sanitizer --tool memcheck python -m tests.sanitizer_lane
    compute-sanitizer --tool initcheck python -m tests.sanitizer_lane

Pools are off and every array is one allocation of its exact size, so a byte too far is a byte outside: guard bands
would hide it from the checker. Results are compared with the oracle as well. Prints how many calls were made.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cupy_gmm
from cupy_gmm import _config
from tests import layouts, offsets, oracle

# (K, N): aligned, ragged in both, one element, no reduction.
KN = ((64, 64), (67, 37), (72, 40), (1, 1), (0, 16))
GROUPS = ("no-rows", "all-zero", "three-empty-inside", "around-two-tiles", "tail-of-tiles", "primes")
# Base address past the start of the allocation, in elements; and the bytes of a row beyond its elements.
PLACES = ((0, 0), (1, 0), (8, 0), (0, 3), (0, 8))


@dataclasses.dataclass
class Lane:
    cupy: Any
    rng: np.random.Generator
    calls: int = 0

    def array(self, values: np.ndarray, place: tuple[int, int] = (0, 0)) -> Any:
        """One allocation that ends with the last element of the array."""
        shift, pad = place
        item = values.dtype.itemsize
        strides = [item * s for s in layouts.dense(values.shape, pad=pad)]
        reach = sum((n - 1) * s for n, s in zip(values.shape, strides, strict=True)) if values.size else -item
        memory = self.cupy.cuda.alloc(shift * item + reach + item)
        view = self.cupy.ndarray(values.shape, values.dtype, memory + shift * item, strides)
        word = f"u{item}"
        bits = self.cupy.asarray(np.ascontiguousarray(values).view(word))
        self.cupy.ndarray(values.shape, word, memory + shift * item, strides)[...] = bits
        return view

    def whole(self, *shape: int, dtype: str = "bfloat16") -> np.ndarray:
        return oracle.integers(self.rng, shape, dtype)

    def check(self, result: Any, expected: np.ndarray, what: object) -> None:
        self.calls += 1
        word = self.cupy.ndarray(result.shape, f"u{expected.dtype.itemsize}", result.data, result.strides)
        actual = np.ascontiguousarray(self.cupy.asnumpy(word)).view(expected.dtype)
        oracle.assert_same_bits(actual, expected, what)

    def forward(self, case: "Case", place: tuple[int, int] = (0, 0), **options: Any) -> None:
        groups, (k, n), ends = case.groups, case.kn, case.ends
        x, w = self.whole(groups.rows, k), self.whole(len(ends), k, n)
        expected = oracle.expected_mm(x, w, oracle.bounds_of(ends, groups.rows), "bfloat16")
        xp, wp, offs = self.array(x, place), self.array(w, place), self.array(ends)
        out = self.array(np.zeros(expected.shape, expected.dtype), place)
        self.check(cupy_gmm.grouped_mm(xp, wp, offs, out=out, **options), expected, (case, options))
        floats = cupy_gmm.grouped_mm(xp, wp, offs, out_dtype="float32", **options)  # the store path of every other type
        self.check(floats, oracle.expected_mm(x, w, oracle.bounds_of(ends, groups.rows), "float32"), (case, options))
        stored = self.array(np.ascontiguousarray(w.swapaxes(1, 2)), place).swapaxes(1, 2)
        self.check(cupy_gmm.grouped_mm(xp, stored, offs, **options), expected, (case, options))

    def gradient(self, case: "Case", place: tuple[int, int] = (0, 0), **options: Any) -> None:
        groups, (k, n), ends = case.groups, case.kn, case.ends
        x, dy = self.whole(groups.rows, k), self.whole(groups.rows, n)
        spans = oracle.bounds_of(ends, groups.rows)
        xp, dyp, offs = self.array(x, place), self.array(dy, place), self.array(ends)
        for dtype in ("bfloat16", "float32"):
            before = self.whole(len(ends), k, n, dtype=dtype)
            out = self.array(before, place if dtype == "bfloat16" else (place[0], 2 * place[1]))
            for accumulate, held in ((True, before), (False, None)):
                dw = cupy_gmm.grouped_mm_wgrad(xp, dyp, offs, out=out, accumulate=accumulate, **options)
                expected = oracle.expected_wgrad(x, dy, spans, dtype, len(ends), before=held)
                self.check(dw, expected, (case, options))


@dataclasses.dataclass(frozen=True)
class Case:
    groups: layouts.Groups
    kn: tuple[int, int]
    ends: np.ndarray


def cases() -> Iterator[Case]:
    for index, name in enumerate(GROUPS):
        groups = layouts.GROUPS[name](layouts.HEIGHTS[index % 3])
        for kn in KN:
            yield Case(groups, kn, groups.offs)
    for given in offsets.ALL:
        yield Case(layouts.Groups((), given.rows), (40, 24), np.array(given.offs, np.int32))


def every_config(op: str, run: Callable[..., None]) -> None:
    """Each config where it can run: 16-byte loads want such pitches, the copy engine wants something to copy."""
    for config in _config.configs_of(op):
        for case in cases():
            aligned = case.kn[0] % 8 == 0 and case.kn[1] % 8 == 0
            empty = isinstance(config, _config.WgmmaConfig) and 0 in (case.groups.rows, *case.kn)
            if (aligned or not config.vectorised) and not empty:
                run(case, config=config.name)


def places(lane: Lane) -> None:
    """Misaligned bases and padded rows, the config chosen by the library."""
    for kn in ((64, 64), (67, 37), (72, 40)):
        for place in PLACES:
            groups = layouts.GROUPS["three-empty-inside"](64)
            lane.forward(Case(groups, kn, groups.offs), place)
            lane.gradient(Case(groups, kn, groups.offs), place)


def schedules(lane: Lane) -> None:
    """Few and many groups, noise as offsets, a refill; and rows of the products that use them."""
    for count in (1, 33, 1025, 5000):
        for rows in (0, 1, 300):
            ends = lane.rng.integers(-10, rows + 10, count).astype(np.int32)
            schedule = cupy_gmm.make_schedule(lane.array(ends), rows)
            cupy_gmm.make_schedule(lane.array(np.sort(ends)), rows, out=schedule)
            x, w = lane.whole(rows, 8), lane.whole(count, 8, 16)
            spans = oracle.bounds_of(np.sort(ends), rows)
            y = cupy_gmm.grouped_mm(lane.array(x), lane.array(w), schedule)
            lane.check(y, oracle.expected_mm(x, w, spans, "bfloat16"), (count, rows))
            dw = cupy_gmm.grouped_mm_wgrad(lane.array(x), lane.array(x), schedule, check="async")
            lane.check(dw, oracle.expected_wgrad(x, x, spans, "bfloat16", count), (count, rows))
    sizes = lane.rng.integers(0, 9, 777).astype(np.int32)
    ends = cupy_gmm.offs_from_sizes(lane.array(sizes))
    lane.check(ends, np.cumsum(sizes).astype(np.int32), "offs_from_sizes")


def long_groups(lane: Lane) -> None:
    """Reductions long enough to be cut into pieces."""
    ends = np.array([3, 3, 4000, 4001, 5000], np.int32)
    for kn in ((64, 72), (37, 29)):
        lane.gradient(Case(layouts.Groups((), 5003), kn, ends))


def routing(lane: Lane) -> None:
    """Every kernel of the layer around the products: ids out of range, an expert twice, odd widths, no tokens."""
    for tokens, slots, experts, width in ((0, 2, 3, 8), (37, 3, 5, 67), (700, 8, 33, 64), (3, 1, 8192, 1)):
        ids = lane.rng.integers(-2, experts + 2, (tokens, slots)).astype(np.int32)
        weights = lane.whole(tokens, slots, dtype="float32")
        x, dy = lane.whole(tokens, width), lane.whole(tokens, width)
        results = []
        for array in (lambda values: values, lane.array):
            found = cupy_gmm.route(array(ids), experts)
            rows = cupy_gmm.permute(array(x), found)
            d_rows, d_weights = cupy_gmm.combine_backward(array(dy), rows, found, array(weights))
            gate_up = array(np.tile(x, (1, 2)))
            h = cupy_gmm.silu_mul(gate_up)
            results.append(
                [found.order, found.inverse, found.offs, found.counts, rows, d_rows, d_weights,
                 cupy_gmm.combine(rows, found, array(weights)), cupy_gmm.permute_backward(d_rows, found)]
            )  # fmt: skip
            cupy_gmm.silu_mul_backward(gate_up, h)
        for host, device in zip(*results, strict=True):
            lane.check(device, np.asarray(host), ("routing", tokens, slots, experts, width))


def main(seed: int = 20) -> int:
    """Runs the lane; returns the number of checked calls."""
    import cupy

    cupy.cuda.set_allocator(None)
    lane = Lane(cupy, np.random.default_rng(seed))
    every_config("grouped_mm", lane.forward)
    every_config("grouped_mm_wgrad", lane.gradient)
    for part in (places, schedules, long_groups, routing):
        part(lane)
    cupy.cuda.runtime.deviceSynchronize()
    return lane.calls


if __name__ == "__main__":
    print(f"sanitizer lane: {main()} calls checked, seed 20", flush=True)

"""One step of an expert layer for the demo: make the inputs, run it, judge it, time it."""

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from .. import moe
from ..counts import replay, scale
from . import oracle
from .output import progress

_REPEATS = 10


@dataclasses.dataclass(frozen=True, slots=True)
class Sizes:
    """Extents of the layer."""

    tokens: int
    hidden: int
    inner: int
    experts: int
    top_k: int


def make(xp: Any, source: bytes, sizes: Sizes, recorded: tuple[int, ...] | None, seed: int) -> oracle.Layer:
    """Bytes to a layer's inputs, all from one seed.

    Args:
        xp: NumPy or CuPy, whose arrays the layer shall have.
        source: one token a byte.
        sizes: extents.
        recorded: counts to replay, scaled to the rows there are; None lets the router decide.
        seed: of embedding, router, weights and gradient.
    """
    rng = np.random.default_rng(seed)

    def normal(*shape: int, scale: float) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * np.float32(scale)).astype(ml_dtypes.bfloat16)

    embedding = rng.standard_normal((256, sizes.hidden), np.float32)
    letters = np.frombuffer(source, np.uint8)
    # A token is its letter and a trace of the one before: language is uneven in both.
    x = embedding[letters] + np.float32(0.5) * np.roll(embedding[np.roll(letters, 1)], 1, axis=1)
    x = (x / np.sqrt(np.float32(1.25))).astype(ml_dtypes.bfloat16)
    logits = x.astype(np.float32) @ rng.standard_normal((sizes.hidden, sizes.experts), np.float32) / sizes.hidden**0.5
    if recorded is None:
        expert_idx = _top(logits, sizes)
    else:
        expert_idx = replay(scale(recorded, sizes.tokens * sizes.top_k), sizes.top_k, seed=seed)
    chosen = np.exp(np.take_along_axis(logits, expert_idx, 1))
    return oracle.Layer(
        xp=xp,
        x=xp.asarray(x),
        w_gate_up=xp.asarray(normal(sizes.experts, sizes.hidden, 2 * sizes.inner, scale=sizes.hidden**-0.5)),
        w_down=xp.asarray(normal(sizes.experts, sizes.inner, sizes.hidden, scale=sizes.inner**-0.5)),
        expert_idx=xp.asarray(expert_idx.astype(np.int32)),
        expert_weight=xp.asarray((chosen / chosen.sum(1, keepdims=True)).astype(np.float32)),
        dy=xp.asarray(normal(sizes.tokens, sizes.hidden, scale=1.0)),
    )


def _top(logits: np.ndarray, sizes: Sizes) -> np.ndarray:
    """Each token's best experts; the last one stays empty, the one before gets one row, if there is room."""
    edge_cases = sizes.experts >= sizes.top_k + 2
    if edge_cases:
        logits = np.where(np.arange(sizes.experts) >= sizes.experts - 2, -np.inf, logits)
    best = np.argsort(-logits, axis=1, kind="stable")[:, : sizes.top_k]
    if edge_cases:
        best[sizes.tokens // 2, -1] = sizes.experts - 2
    return best


def run(layer: oracle.Layer, sizes: Sizes, on_gpu: bool) -> dict[str, Any]:
    """Forward and backward through the library: counts, checks and times, ready for JSON."""
    xp = layer.xp
    inputs = (layer.x, layer.w_gate_up, layer.w_down, layer.expert_idx, layer.expert_weight)
    with progress("demo", sizes.experts + 2) as advance:
        started = time.perf_counter()
        y, saved = moe.expert_ffn(*inputs, save=True)
        dx, dw_gate_up, dw_down, dexpert_weight = moe.expert_ffn_backward(layer.dy, saved)
        if on_gpu:
            xp.cuda.get_current_stream().synchronize()
        first_call_s = time.perf_counter() - started
        advance("timing")
        clock = _device_ms if on_gpu else _host_ms
        timings = {
            "forward_ms": clock(xp, lambda: moe.expert_ffn(*inputs, save=True)),
            "backward_ms": clock(xp, lambda: moe.expert_ffn_backward(layer.dy, saved)),
            "first_call_s": first_call_s,
            "clock": "CUDA events, median" if on_gpu else "host clock, median",
        }
        advance("judging")
        got = {
            "y": y,
            "dx": dx,
            "dw_gate_up": dw_gate_up,
            "dw_down": dw_down,
            "dexpert_weight": dexpert_weight,
        }
        ratios = oracle.judge(*_where_float64_is(layer, got), advance)
    counts = np.bincount(np.ravel(layer.expert_idx.tolist()), minlength=sizes.experts).tolist()
    checks = [_check(name, got[name], ratios[name]) for name in got]
    if empty := [expert for expert, rows in enumerate(counts) if rows == 0]:
        checks.append(_check_empty(got, empty))
    flop = 6 * sizes.tokens * sizes.top_k * sizes.hidden * sizes.inner
    return {"counts": counts, "checks": checks, "timings": timings, "flop": flop}


def _where_float64_is(layer: oracle.Layer, got: dict[str, Any]) -> tuple[oracle.Layer, dict[str, Any]]:
    """Layer and results as they are, or on the host where CuPy finds no cuBLAS, which we do not depend on."""
    xp = layer.xp
    if xp is np:
        return layer, got
    try:
        xp.ones((2, 2)) @ xp.ones((2, 2))
        return layer, got
    except Exception:  # a missing library has no one type
        arrays = {
            field.name: xp.asnumpy(getattr(layer, field.name))
            for field in dataclasses.fields(layer)
            if field.name != "xp"
        }
        return oracle.Layer(xp=np, **arrays), {name: xp.asnumpy(array) for name, array in got.items()}


def _check(name: str, got: Any, ratio: float) -> dict[str, Any]:
    return {
        "quantity": name,
        "shape": got.shape,
        "dtype": str(got.dtype),
        "worst_error_over_bound": ratio,
        "ok": ratio <= 1,
    }


def _check_empty(got: dict[str, Any], empty: list[int]) -> dict[str, Any]:
    zero = all(bool((got[name][empty].view("uint16") == 0).all()) for name in ("dw_gate_up", "dw_down"))
    return {
        "quantity": f"dw of {len(empty)} empty expert{'s' * (len(empty) > 1)}",
        "shape": (len(empty),),
        "dtype": "all bytes zero",
        "worst_error_over_bound": None,
        "ok": zero,
    }


def _device_ms(xp: Any, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(_REPEATS + 2):
        start, stop = xp.cuda.Event(), xp.cuda.Event()
        start.record()
        call()
        stop.record()
        stop.synchronize()
        times.append(xp.cuda.get_elapsed_time(start, stop))
    return statistics.median(times[2:])


def _host_ms(xp: Any, call: Callable[[], Any]) -> float:
    times: list[float] = []
    while len(times) < 3 or (sum(times) < 2 and len(times) < _REPEATS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3

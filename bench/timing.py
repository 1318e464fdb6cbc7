"""How every table of this folder is timed: all contenders in turn, on a hot card, with a cold L2, by device events.

One round runs each contender once. Before each run a buffer larger than the L2 is overwritten, which also gives the
host time to enqueue the run, so that launch gaps do not count. Medians over the rounds are compared by ratio.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
HOT_SECONDS = 3.0


def heat(seconds: float = HOT_SECONDS) -> None:
    """Runs a large product until the card has settled at its power limit."""
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(8):
            a @ a
        torch.cuda.synchronize()


def interleaved(contenders: Mapping[str, Callable[[], Any]], rounds: int = 20, warmup: int = 3) -> dict[str, float]:
    """Median device time of each contender in microseconds.

    Args:
        contenders: Name -> a call that enqueues work on torch's current stream and returns at once.
        rounds: Timed runs of each.
        warmup: Untimed runs of each before.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")
    for _ in range(warmup):
        for call in contenders.values():
            call()
    torch.cuda.synchronize()
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for _ in range(8):  # after a wait the device is idle: let the host run ahead before the first contender
            flush.fill_(1)
        for name, call in contenders.items():
            flush.fill_(1)
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            pairs[name].append((begin, end))
        torch.cuda.synchronize()
    return {name: statistics.median(b.elapsed_time(e) for b, e in found) * 1e3 for name, found in pairs.items()}


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    micros = interleaved({"copy": lambda: target.copy_(source)}, rounds=10)["copy"]
    return 2 * source.numel() / (micros * 1e-6)


def host_micros(call: Callable[[], Any], calls: int = 100, repeats: int = 25) -> float:
    """Median host time of one call in microseconds; `call` must keep the device idle most of the time."""
    for _ in range(20):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begin) / calls * 1e6)
        torch.cuda.synchronize()
    return statistics.median(found)

"""How every table of this folder is timed: all contenders in turn, on a hot card, with a cold L2, by device events.

Under load the card lowers its clock until it draws its power limit, and a number taken before that is up to a quarter
too good. So a large product runs for a second before the rounds of a problem, and again before every timed run: each
contender has the same neighbour, whoever comes before it and however little power it draws itself. Then a buffer
larger than the L2 is read: not written, or its last lines would go to memory on the contender's time. Meanwhile the
host is far ahead, so that launch gaps do not count: a contender whose call keeps the host for longer than the load
lasts, such as a loop over groups, gets several loads. The order is drawn anew in each round. Nothing waits between
rounds. Medians are compared by ratio.
"""

import dataclasses
import functools
import random
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

FLUSH_BYTES = 256 << 20
LOAD_EXTENT = 8192  # of the product that keeps the card hot: 1.1 TFLOP, 1.4 to 1.8 ms
LOAD_MICROS = 1000  # that one load surely lasts
HOT_SECONDS = 1.0
FIRST_HOT_SECONDS = 3.0  # from cold: the temperature settles too


@functools.cache
def _load() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Random data: a product of zeros draws a third less power.
    shape = (LOAD_EXTENT, LOAD_EXTENT)
    a, b = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return a, b, torch.empty_like(a)


def load() -> None:
    """Enqueues one product that draws all the power there is."""
    a, b, out = _load()
    torch.mm(a, b, out=out)


@functools.cache
def _buffer() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(FLUSH_BYTES // 4, device="cuda"), torch.empty((), device="cuda")


def flush() -> None:
    """Enqueues a read of more than the L2 holds: no operand is left in it, nor anything to be written back."""
    lines, total = _buffer()
    torch.sum(lines, 0, out=total)


def heat(seconds: float = HOT_SECONDS) -> None:
    """Runs the load until the card has settled at its power limit."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for _ in range(16):
            load()
        torch.cuda.synchronize()


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """Device times of a set of contenders.

    Attributes:
        samples: Microseconds of each round, by contender.
        window: When the rounds began and ended, as `time.time()` has it.
    """

    samples: dict[str, list[float]]
    window: tuple[float, float]

    def median(self, name: str) -> float:
        return statistics.median(self.samples[name])

    def medians(self) -> dict[str, float]:
        return {name: self.median(name) for name in self.samples}

    def spread(self, name: str) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        if len(self.samples[name]) < 2:
            return 0.0
        low, middle, high = statistics.quantiles(self.samples[name], n=4)
        return (high - low) / 2 / middle


def loads_for(micros: float) -> int:
    """Loads before a call that keeps the host for so long: they last twice as long, to be safe."""
    return 1 + int(2 * micros / LOAD_MICROS)


def interleaved(
    contenders: Mapping[str, Callable[[], Any]], rounds: int = 20, seconds: float = HOT_SECONDS, warmup: int = 2
) -> Times:
    """Times contenders in turns.

    Args:
        contenders: Name -> a call that enqueues work on torch's current stream and returns at once.
        rounds: Timed runs of each.
        seconds: How long the card is loaded first; 0 where it is hot.
        warmup: Untimed runs of each before that.
    """
    for _ in range(warmup):
        for call in contenders.values():
            call()
    loads = {name: loads_for(host_micros(call, calls=1, repeats=3, warmup=0)) for name, call in contenders.items()}
    order, shuffled = list(contenders), random.Random(0)
    pairs: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contenders}
    heat(seconds)
    began = time.time()
    for _ in range(rounds):
        shuffled.shuffle(order)
        for name in order:
            for _ in range(loads[name]):
                load()
            flush()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            contenders[name]()
            end.record()
            pairs[name].append((begin, end))
    torch.cuda.synchronize()
    samples = {name: [begin.elapsed_time(end) * 1e3 for begin, end in found] for name, found in pairs.items()}
    return Times(samples, (began, time.time()))


def copy_bandwidth() -> float:
    """Bytes read and written per second by a large device-to-device copy."""
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    micros = interleaved({"copy": lambda: target.copy_(source)}, rounds=10, seconds=0).median("copy")
    return 2 * source.numel() / (micros * 1e-6)


def host_micros(call: Callable[[], Any], calls: int = 100, repeats: int = 25, warmup: int = 20) -> float:
    """Median host time of one call in microseconds; `calls` in a row must leave the device idle most of the time."""
    for _ in range(warmup):
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

"""A training step of an expert layer inside JAX: ours against `jax.lax.ragged_dot`, and what handlers cost the host.

    python -m bench.jax_step --problem balanced --steps 20

Two products, their two input gradients and two weight gradients a step, in one `jit`. Times are of the whole step on
the host's clock, many steps in flight, the contenders taking turns; run it again with
`XLA_FLAGS=--xla_gpu_enable_command_buffer=` to see it without command buffers. Where XLA replays a command buffer it
does not call the handlers at all.

A handler's time runs from its first line of Python to its last, less what the clock and the call around it take, which
an empty handler shows. Then the steps are run again with two marks around its launches: `launches` is the time between
them, less that of marks with nothing between. It holds the driver and the wait for Python's lock, which CuPy gives up
meanwhile. `Python` is the rest. Not in it is the way from XLA into Python and back, 0.2 us where the caches are warm.
"""

import argparse
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import cupy_gmm.jax
from bench import one_gpu, shapes
from cupy_gmm.jax import _abi, _handler, _lowering

ROUNDS = 9


_numbers = itertools.count()


class Handlers:
    """The execute stages with a clock, under names of their own. To be made before anything is traced."""

    def __init__(self, platform: str = "CUDA") -> None:
        self._times: dict[str, list[tuple[int, int]]] = {}  # ns: all, between the marks
        self._whole: dict[str, list[int]] = {}  # ns without marks
        self._marked = False
        self._began = self._ended = 0
        for kind in (_handler.Schedule, _handler.Product):
            kind.made = self._with_marks(kind.made)  # type: ignore[method-assign]
        self._kept, end = [], f".timed{next(_numbers)}"  # XLA may call them as long as the process lives
        for target, kind in _handler.KINDS.items():
            stages = {
                "instantiate": _abi.handler(_handler.instantiate(kind)),
                "execute": _abi.Handler(self._timed(target, _handler.executing(kind))),
            }
            capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
            jax.ffi.register_ffi_target(target + end, capsules, platform=platform)
            self._kept.append(stages)
        foreign = _lowering.foreign
        _lowering.foreign = lambda target, *rest: foreign(target + end, *rest)

    def _timed(self, name: str, entry: Callable[[int], int]) -> Callable[[int], int]:
        clock, times = time.perf_counter_ns, self._times.setdefault(name, [])

        def timed(frame: int) -> int:
            began = clock()
            failed = entry(frame)
            times.append((clock() - began, self._ended - self._began))
            return failed

        return timed

    def _begin(self) -> None:
        self._began = time.perf_counter_ns()

    def _end(self) -> None:
        self._ended = time.perf_counter_ns()

    def _with_marks(self, made: Callable[..., Any]) -> Callable[..., Any]:
        def marked(launches: Any, *given: Any) -> Any:
            found = made(launches, *given)
            return (self._begin, *found, self._end) if self._marked else found

        return marked

    def _of_its_own(self, calls: int = 2000) -> tuple[float, float]:
        """ns that the clock takes around nothing, and the marks around nothing."""
        empty, found = self._timed("", lambda frame: 0), self._times.pop("")
        for _ in range(calls):
            for each in (self._begin, self._end):
                each()
            empty(0)
        whole, marks = (statistics.median(each) for each in zip(*found, strict=True))
        return whole, marks

    def warmed(self) -> None:
        """Forgets what came before the steps that count."""
        for times in self._times.values():
            times.clear()

    def mark(self) -> None:
        """Launches are timed from now on; the next call of each handler takes longer."""
        self._whole = {name: [whole for whole, _ in found] for name, found in self._times.items()}
        self._marked = True
        for launches in _handler._ready.values():
            launches.known.clear()

    def lines(self, steps: int) -> list[str]:
        """One for each kind of handler that ran in so many steps before the marks."""
        said, (own, marks) = [], self._of_its_own()
        for name, found in self._whole.items():
            if not found:
                continue
            whole, parts = (statistics.median(found) - own) / 1e3, ""
            if self._times[name]:  # where XLA replays a command buffer, nobody may have called since
                launches = max(0.0, statistics.median(between for _, between in self._times[name]) - marks) / 1e3
                parts = f", Python {whole - launches:.1f} and launches {launches:.1f}"
            said.append(f"{name}: {whole:.1f} us on the host{parts}, {len(found) / steps:.2f} calls a step")
        return [*said, f"taken off: {own / 1e3:.2f} us of the clock around a call, {marks / 1e3:.2f} of its marks"]


def step(dot: Callable[..., Any]) -> Callable[..., Any]:
    """Loss and gradients of two products, jitted."""

    def loss(x: Any, up: Any, down: Any, sizes: Any) -> Any:
        hidden = jax.nn.relu(dot(x, up, sizes))
        return dot(hidden, down, sizes).astype(jnp.float32).mean()

    return jax.jit(jax.value_and_grad(loss, (0, 1, 2)))


def once(function: Callable[..., Any], operands: tuple[Any, ...], steps: int) -> float:
    """Microseconds a step."""
    began = time.perf_counter()
    for _ in range(steps):
        result = function(*operands)
    jax.block_until_ready(result)
    return (time.perf_counter() - began) / steps * 1e6


def main(words: list[str]) -> None:
    names = [problem.name for problem in shapes.PROBLEMS]
    parser = argparse.ArgumentParser(prog="python -m bench.jax_step", description=__doc__.splitlines()[0])
    parser.add_argument("--problem", choices=names, default=names[0])
    parser.add_argument("--rows", type=int, help="scale the problem to so many rows")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", choices=["ours", "lax"], help="one contender")
    given = parser.parse_args(words)
    problem = shapes.problem(given.problem)
    problem = problem.scaled(given.rows) if given.rows else problem
    keys = jax.random.split(jax.random.key(0), 3)
    k, n, groups = problem.k, problem.n, problem.groups
    extents = (problem.rows, k), (groups, k, n), (groups, n, k)
    arrays = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, extents, strict=True)]
    operands = (*arrays, jnp.array(problem.counts, jnp.int32))
    handlers = Handlers()
    contenders = {"ours": step(cupy_gmm.jax.ragged_dot), "lax": step(jax.lax.ragged_dot)}
    contenders = {name: call for name, call in contenders.items() if given.only in (None, name)}
    for call in contenders.values():
        once(call, operands, 3)
    handlers.warmed()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            times[name].append(once(call, operands, given.steps))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {problem.name}, {problem.rows} rows")
    for name, found in times.items():
        print(f"{name:>5}: {statistics.median(found):10.1f} us a step, {min(found):.1f} to {max(found):.1f}")
    if "ours" in contenders:
        handlers.mark()
        once(contenders["ours"], operands, 3)
        handlers.warmed()
        for _ in range(ROUNDS):  # as before: with more steps in flight, a launch waits for room in the queue
            once(contenders["ours"], operands, given.steps)
        print(*handlers.lines(ROUNDS * given.steps), sep="\n")


if __name__ == "__main__":
    one_gpu()
    main(sys.argv[1:])

"""A training step of an expert layer inside JAX: ours against `jax.lax.ragged_dot`, and what handlers cost the host.

    python -m bench.jax_step --problem balanced --steps 20

Two products, their two input gradients and two weight gradients a step, in one `jit`. Times are of the whole step on
the host's clock, many steps in flight, the contenders taking turns; run it again with
`XLA_FLAGS=--xla_gpu_enable_command_buffer=` to see it without command buffers. Where XLA replays a command buffer it
does not call the handlers at all.

A handler's time runs from the first thing that it reads to the return of its last launch. Of it, `launches` is the time
inside CuPy's launchKernel and memsetAsync: the driver, and the wait for Python's lock, which CuPy gives up meanwhile.
`Python` is the rest, with half a microsecond of the clock's own. What ctypes does before and behind is in neither.
"""

import argparse
import os
import statistics
import sys
import time
import types
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp

import cupy_gmm.jax
from bench import shapes
from cupy_gmm import _device, _launch
from cupy_gmm.jax import _abi, _handler

ROUNDS = 9


class Handlers:
    """Seconds in the handlers: all, and in launches. To be made before the first of them runs."""

    def __init__(self) -> None:
        self.times: dict[str, list[tuple[float, float]]] = {}
        self._began = self._launches = 0.0
        attribute, cuda = _abi.attribute, _device.import_cupy().cuda

        def first(frame: int) -> bytes:
            self._began, self._launches = time.perf_counter(), 0.0
            return attribute(frame)

        _abi.attribute = first
        launching = types.SimpleNamespace(
            driver=types.SimpleNamespace(launchKernel=self._launching(cuda.driver.launchKernel)),
            runtime=types.SimpleNamespace(memsetAsync=self._launching(cuda.runtime.memsetAsync)),
        )
        _launch._cuda = lambda: launching  # type: ignore[assignment]
        for kind in (_handler.Schedule, _handler.Product):
            kind.__call__ = self._timed(kind.__name__, kind.__call__)  # type: ignore[method-assign]

    def _launching(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any) -> None:
            began = time.perf_counter()
            call(*arguments)
            self._launches += time.perf_counter() - began

        return timed

    def _timed(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        def timed(launch: Any, *rest: Any) -> None:
            call(launch, *rest)
            self.times.setdefault(name, []).append((time.perf_counter() - self._began, self._launches))

        return timed

    def lines(self, steps: int) -> list[str]:
        """One for each kind of handler, of so many steps."""
        said = []
        for name, found in self.times.items():
            whole, launches, own = (
                statistics.median(each) * 1e6 for each in zip(*((a, b, a - b) for a, b in found), strict=True)
            )
            said.append(
                f"{name}: {whole:.1f} us on the host, Python {own:.1f} and launches {launches:.1f}, "
                f"{len(found) / steps:.2f} calls a step"
            )
        return said


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
    handlers.times.clear()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(ROUNDS):
        for name, call in contenders.items():
            times[name].append(once(call, operands, given.steps))
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {problem.name}, {problem.rows} rows")
    for name, found in times.items():
        print(f"{name:>5}: {statistics.median(found):10.1f} us a step, {min(found):.1f} to {max(found):.1f}")
    print(*handlers.lines(ROUNDS * given.steps), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])

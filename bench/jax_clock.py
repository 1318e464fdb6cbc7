"""Device time of work inside JAX's programs and outside of them, on a card that is kept hot: events, one neighbour.

JAX hands out no stream. But a call of our own in a program is told which one it is on: `begin` and `end` are such
calls, which record an event each and launch no kernel. So what is timed begins and ends on the device, whatever the
host does, and nothing but the work is between. Before each run a load is enqueued on the stream of CuPy and torch;
`begin` makes XLA's stream wait for it, and what comes next waits for `end`. So the device goes from one to the other
without a gap as long as the host is ahead, which the load gives it time for. XLA cannot put the two into a command
buffer, only what is between them.
"""

import collections
import itertools
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from cupy_gmm.jax import _abi

Pair = tuple[int, int]  # events of a run: begin, end
PATIENCE = 20.0  # seconds for the host's side of a run

_numbers = itertools.count()


class Clock:
    """Events around work of several libraries on one device."""

    def __init__(self, runtime: Any, load: Callable[[], None], platform: str = "CUDA", stream: int = 0) -> None:
        """
        Args:
            runtime: `cupy.cuda.runtime`.
            load: Enqueues what comes before each run.
            platform: That of JAX.
            stream: On which `load` and what is outside of JAX runs; 0 is the default one of CuPy and torch.
        """
        self._runtime, self._load, self._stream = runtime, load, stream
        self._next: collections.deque[tuple[int, Pair]] = collections.deque()
        self._running: tuple[int, Pair] = 0, (0, 0)
        self._ended = threading.Semaphore(0)
        number = next(_numbers)
        self._targets = {name: f"cupy_gmm_bench.{name}{number}" for name in ("begin", "end")}
        bodies = self._begin, self._end
        # Not to be captured: an event that a command buffer records has no time.
        self._kept = [_abi.handler(body, traits=0) for body in bodies]
        for target, function in zip(self._targets.values(), self._kept, strict=True):
            jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform=platform)
        self._mark_begin, self._mark_end = jax.jit(self.begin), jax.jit(self.end)
        self._nothing = jnp.zeros(1, jnp.int32)

    # ---- to be traced

    def begin(self, array: Any) -> Any:
        """`array`; what is computed from it comes behind the mark."""
        result = jax.ShapeDtypeStruct(array.shape, array.dtype)
        return jax.ffi.ffi_call(
            self._targets["begin"], result, input_output_aliases={0: 0}, has_side_effect=True
        )(array)  # fmt: skip

    def end(self, *arrays: Any) -> Any:
        """A mark behind all that these are computed by. To be returned by the program; holds nothing."""
        result = jax.ShapeDtypeStruct((1,), jnp.int32)
        return jax.ffi.ffi_call(self._targets["end"], result, has_side_effect=True)(*arrays)

    # ---- what XLA calls

    def _begin(self, frame: int) -> None:
        loaded, pair = self._next.popleft()
        stream = stream_of(frame)
        self._running = stream, pair
        self._runtime.streamWaitEvent(stream, loaded)
        self._runtime.eventRecord(pair[0], stream)

    def _end(self, frame: int) -> None:
        stream, pair = self._running
        if stream_of(frame) != stream:
            raise RuntimeError("XLA ended on another stream than it began on: its events say nothing.")
        self._runtime.eventRecord(pair[1], stream)
        self._ended.release()

    # ---- runs

    def inside(self, run: Callable[[], Any]) -> Pair:
        """Runs a program of JAX with both marks, behind the load; does not wait for the device."""
        loaded, pair = self._event(), self._pair()
        self._load()
        self._runtime.eventRecord(loaded, self._stream)
        self._next.append((loaded, pair))
        result = run()
        if not self._ended.acquire(timeout=PATIENCE):
            jax.block_until_ready(result)  # raises what went wrong
            raise RuntimeError("the program came to no end")
        self._runtime.streamWaitEvent(self._stream, pair[1])
        return pair

    def in_flight(self, call: Callable[[], Any], calls: int) -> Pair:
        """`inside` of so many calls that have no marks."""

        def run() -> Any:
            begun = self._mark_begin(self._nothing)
            results = [call() for _ in range(calls)][-1:]
            return results, self._mark_end(begun)

        return self.inside(run)

    def outside(self, run: Callable[[], None]) -> Pair:
        """Runs what enqueues on the stream of CuPy and torch, behind the load."""
        pair = self._pair()
        self._load()
        self._runtime.eventRecord(pair[0], self._stream)
        run()
        self._runtime.eventRecord(pair[1], self._stream)
        return pair

    def micros(self, pairs: list[Pair], each: int) -> list[float]:
        """Microseconds of each run, divided by the things that it did. Waits for the device."""
        self._runtime.deviceSynchronize()
        return [self._runtime.eventElapsedTime(*pair) * 1e3 / each for pair in pairs]

    def _event(self) -> int:
        return self._runtime.eventCreate()

    def _pair(self) -> Pair:
        return self._event(), self._event()


def stream_of(frame: int) -> int:
    """The stream of a call.

    Raises:
        RuntimeError: XLA has none.
    """
    _, api, context, *_ = _abi.CALL.unpack_from(_abi.BYTES, frame)
    asked = _abi.StreamGetArgs(_abi.STREAM_GET_BYTES)
    asked[_abi.ASKED_CTX] = context
    if _abi.stream_get(api)(asked):
        raise RuntimeError("XLA gave no stream")
    return int(asked[_abi.ASKED_STREAM])


def kernels(run: Callable[[], Any], symbol: str) -> list[float]:
    """Microseconds of each kernel with `symbol` in its name, in their order, as the profiler of JAX sees them.

    Empty where it sees none: it needs CUPTI, which a machine may forbid.
    """
    try:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = options.host_tracer_level = 0
        with tempfile.TemporaryDirectory() as folder:
            with jax.profiler.trace(folder, profiler_options=options):
                run()
            paths = list(pathlib.Path(folder).rglob("*.xplane.pb"))
            planes = [plane for path in paths for plane in jax.profiler.ProfileData.from_file(str(path)).planes]
            found = [
                (event.start_ns, event.duration_ns / 1e3)
                for plane in planes if plane.name.startswith("/device:GPU")
                for line in plane.lines if line.name.startswith("Stream")  # others tell the same once more
                for event in line.events if symbol in event.name
            ]  # fmt: skip
    except Exception as error:  # a column less
        print(f"the profiler tells no kernels: {error}")
        return []
    return [duration for _, duration in sorted(found)]

"""The handlers of `cupy_gmm.jax` on XLA's CPU platform: the interface is the real one, the launches are NumPy.

What stands in for the device writes where a kernel would, from addresses alone, and only when it is asked to launch.
"""

import ctypes
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cupy_gmm import _device, _launch, _params, _plan, _table, reference
from cupy_gmm._config import GROUPED_MM
from tests import xla_rows
from tests.backends import DTYPES
from tests.memory import at

STREAM = 0x57
DEVICE = 3
COUNTERS = 64


def _counters() -> Any:
    from cupy_gmm.jax import _counters  # imports JAX

    return _counters


def repeated(launch: Callable[..., None]) -> Callable[..., Callable[[], None]]:
    """`launch` in two steps."""
    return lambda *arguments: lambda: launch(*arguments)


class Machine:
    """What was launched, in order: ("fill" | "zero" | operation | kernel of rows, details)."""

    def __init__(self) -> None:
        self.log: list[tuple[str, Any]] = []
        self.built: list[tuple[Any, int]] = []
        self.counter_memory = {size: np.zeros(COUNTERS * size, np.uint8) for size in _counters().SLOTS}
        self.counters = {
            size: _counters().Counters(memory.ctypes.data, COUNTERS, size)
            for size, memory in self.counter_memory.items()
        }

    def counters_of(self, device: int, words: int) -> Any:
        assert device == DEVICE
        return next(counters for size, counters in self.counters.items() if 4 * words <= size)

    def names(self) -> list[str]:
        return [name for name, _ in self.log]

    # ---- in place of _launch

    def enqueue(self, kernel: Any, stream: int, params: bytes) -> None:
        assert stream == STREAM
        xla_rows.perform(kernel.handle, params)
        self.log.append((kernel.handle, kernel))

    def zero(self, address: int, nbytes: int, stream: int) -> None:
        assert stream == STREAM
        ctypes.memset(address, 0, nbytes)
        self.log.append(("zero", (address, nbytes)))

    # ---- in place of _table and _plan

    def fill(
        self, shape: Any, stride: int, wide: bool, offset: int, num_groups: int, zeroed_words: int, device: int,
        sizes: bool,
    ) -> Any:  # fmt: skip
        assert (stride, num_groups, zeroed_words, device) == (1, _params.UNKNOWN_GROUPS, 0, DEVICE)

        def launch(stream: int, offs: int, group_offset: int, table: int, zeroed: int) -> None:
            assert (stream, zeroed) == (STREAM, 0)
            first = int(at(group_offset, (1,), np.int32)[0]) if group_offset else offset
            ends = at(offs, (shape.groups,), np.int64 if wide else np.int32)
            if sizes:
                ends = np.clip(np.cumsum(ends, dtype=np.int64), -(2**31), 2**31 - 1)
            at(table, (shape.words,), np.int32)[:] = reference.schedule(ends, shape.rows, first, None, *shape.blocks)
            self.log.append(("fill", first))

        return types.SimpleNamespace(ready=repeated(launch))

    def build(self, problem: Any, groups: int, table: Any, config: Any, device: int) -> Any:
        self.built.append((problem, device))
        zeroed_words = _params.TICKET_WORDS if problem.op == GROUPED_MM else _table.COUNTER_WORDS
        zeroed_bytes = _table.whole(4 * zeroed_words)

        def launch(
            stream: int, a: int, b: int, c: int, schedule: int, tickets: int, partials: int, status: int
        ) -> None:
            assert (stream, status) == (STREAM, 0)
            assert not at(tickets, (zeroed_words,), np.int32).any(), "tickets are not zero"
            kind = DTYPES[problem.dtype]
            words = at(schedule, (table.words,), np.int32)
            assert words[5] == problem.rows
            first = reference.HEADER_WORDS + 1
            bounds = reference.clamp_offsets(words[first : first + groups], problem.rows)
            x = at(a, (problem.rows, problem.k), kind)
            out = at(c, problem.out_shape, DTYPES[problem.out_dtype])
            if problem.op == GROUPED_MM:
                w = at(b, (problem.groups, problem.k, problem.n), kind, problem.b_strides)
                reference.grouped_mm(x, w, bounds, out, int(words[3]))
            else:
                dy = at(b, (problem.rows, problem.n), kind)
                reference.grouped_mm_wgrad(x, dy, bounds, out, False, int(words[3]))
            assert partials % 4 == 0
            self.log.append((problem.op, problem))

        return types.SimpleNamespace(
            launch=types.SimpleNamespace(ready=repeated(launch)),
            zeroed_words=zeroed_words,
            zeroed_bytes=zeroed_bytes,
            restores=True,
        )


def _answer(place: int, asked: Any) -> None:
    """XLA has no stream on the CPU."""
    asked[place] = STREAM


def machine(patch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """Handlers registered for the CPU, with calls lowered as for CUDA."""
    import jax

    from cupy_gmm.jax import _abi, _handler, _lowering

    made = Machine()
    runtime = types.SimpleNamespace(getDevice=lambda: DEVICE)
    cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    patch.setattr(_device, "import_cupy", lambda: cupy)
    patch.setattr(_device, "info", lambda device: _device.typical("sm_90"))
    patch.setattr(_launch, "unit_function", lambda unit, symbol, device, smem=0: types.SimpleNamespace(handle=symbol))
    patch.setattr(_launch, "enqueue", made.enqueue)
    patch.setattr(_launch, "ready", repeated(made.enqueue))
    patch.setattr(_launch, "zeroing", repeated(made.zero))
    patch.setattr(_table, "fill", made.fill)
    patch.setattr(_plan, "build", made.build)
    patch.setattr(_abi, "stream_get", lambda api: functools.partial(_answer, _abi.ASKED_STREAM))
    patch.setattr(_device, "count", lambda: DEVICE + 1)
    patch.setattr(_counters(), "of", made.counters_of)
    patch.setattr(_handler, "_local_devices", lambda: [DEVICE])
    patch.setattr(_handler, "_ready", {})
    choose = jax.lax.platform_dependent
    patch.setattr(
        jax.lax, "platform_dependent", lambda *operands, cuda, default: choose(*operands, cpu=cuda, default=default)
    )
    kept = _handler.handlers()
    targets = {target: f"{target}.{len(KEPT)}" for target in kept}  # XLA keeps the first of a name
    for target, stages in kept.items():
        capsules = {stage: jax.ffi.pycapsule(function) for stage, function in stages.items()}
        jax.ffi.register_ffi_target(targets[target], capsules, platform="cpu")
    KEPT.append(kept)
    foreign = _lowering.foreign
    patch.setattr(_lowering, "foreign", lambda target, *rest: foreign(targets[target], *rest))
    jax.clear_caches()
    yield made
    jax.clear_caches()


KEPT: list[Any] = []  # XLA may call them as long as the process lives

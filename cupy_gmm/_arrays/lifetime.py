"""What must outlive a launch, and in which order streams go on.

A launch reads memory after the Python call that made it has returned. Arrays whose own library frees memory
in the order of our stream need no care. All others (a JAX buffer, a capsule, an array of a library whose
current stream is another one) stay in `pending` until an event recorded after the launch has completed: asked
for in later calls, never waited on. The last such arrays of a program stay alive until its next call.
"""

import contextlib
import sys
import threading
from contextlib import AbstractContextManager
from typing import Any

from .. import _device

LEGACY = (0, 1)  # two names of the legacy default stream
NOTHING = contextlib.nullcontext()


class _Thread(threading.local):
    bound = False  # whether this thread is known to have a context


thread = _Thread()


def on(device: int) -> AbstractContextManager[Any]:
    """Makes a device current in this thread, for driver calls too; nearly free when it is current already."""
    runtime = _device.import_cupy().cuda.runtime
    if runtime.getDevice() != device:
        return _Switched(runtime, device)
    if not thread.bound:  # a fresh thread names device 0 and yet has no context
        runtime.setDevice(device)
        thread.bound = True
    return NOTHING


class _Switched:
    """Another device is current inside."""

    __slots__ = ("_before", "_device", "_runtime")

    def __init__(self, runtime: Any, device: int) -> None:
        self._runtime = runtime
        self._device = device

    def __enter__(self) -> None:
        self._before = self._runtime.getDevice()
        self._runtime.setDevice(self._device)

    def __exit__(self, *_: object) -> None:
        self._runtime.setDevice(self._before)


def order(first: int, then: int, device: int) -> None:
    """Work enqueued on `then` from here on waits for all that `first` holds now; the host does not wait."""
    cupy = _device.import_cupy()
    with on(device):
        event = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(event.ptr, first)
        cupy.cuda.runtime.streamWaitEvent(then, event.ptr)


def captured(stream: int) -> bool:
    """Whether a stream is being captured into a CUDA graph."""
    # The legacy stream cannot be captured, and asking it while another one is would end that capture.
    return stream not in LEGACY and bool(_device.import_cupy().cuda.runtime.streamIsCapturing(stream))


class GraphBlock:
    """Memory from an allocation node of the graph under capture; `release` adds the free node."""

    __slots__ = ("_device", "_runtime", "_stream", "ptr")

    def __init__(self, nbytes: int, device: int, stream: int) -> None:
        self._runtime = _device.import_cupy().cuda.runtime
        self._device = device
        self._stream = stream
        with on(device):
            self.ptr = int(self._runtime.mallocAsync(max(nbytes, 1), stream))

    def release(self) -> None:
        """Gives the memory back, in stream order, after the launches so far; a second call does nothing."""
        ptr, self.ptr = self.ptr, 0
        if ptr:
            with on(self._device):
                self._runtime.freeAsync(ptr, self._stream)


class Launched:
    """Owners of memory that the launches on a stream so far read or write."""

    __slots__ = ("_event", "device", "owners")

    def __init__(self, device: int, stream: int, owners: tuple[object, ...]) -> None:
        cupy = _device.import_cupy()
        self.device = device
        self.owners = owners
        with on(device):
            self._event = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(self._event.ptr, stream)

    def done(self, fences: dict[Any, Any]) -> bool:
        return bool(self._event.done)


class Returned:
    """Memory of ours that a jax.Array used, and that JAX has given back.

    XLA gives foreign memory back as soon as the array object goes, when its stream may not have come to the
    kernels that read it. So a computation of one element follows them on that stream: once it is ready, they
    are done.
    """

    __slots__ = ("_fence", "_place", "device", "owners")

    def __init__(self, device: int, place: Any, owner: object) -> None:
        self.device = device
        self.owners = (owner,)
        self._place = place  # JAX's name of the device
        self._fence: Any = None

    def done(self, fences: dict[Any, Any]) -> bool:
        try:
            if self._fence is not None:
                return bool(self._fence.is_ready())
            if self._place not in fences:
                fences[self._place] = _fence(self._place)
        except RuntimeError:  # JAX's client is gone, and all its work with it
            return True
        self._fence = fences[self._place]
        return False


def _fence(place: Any) -> Any:
    global _tick
    jax = sys.modules["jax"]
    with jax.ensure_compile_time_eval():  # the user may be tracing something else
        if _tick is None:
            _tick = jax.jit(lambda value: value + 1)
        return _tick(jax.device_put(0, place))


_tick: Any = None
pending: list[Launched | Returned] = []  # never rebound: `locate` looks at this list in every call
_polling = threading.Lock()
_orphans: list[object] = []  # in a forked child: handles of its parent, neither used nor freed


def retire(device: int, place: Any, owner: object) -> None:
    """JAX has let go of `owner`. Called by a finalizer, in any thread, so it only takes a note."""
    pending.append(Returned(device, place, owner))


def poll() -> None:
    """Lets go of what is done. Never waits; where another thread is at it already, leaves it to that one."""
    if not _polling.acquire(blocking=False):
        return
    finished: list[Launched | Returned] = []
    try:
        if not (count := len(pending)):  # finalizers may append meanwhile
            return
        fences: dict[Any, Any] = {}
        kept: list[Launched | Returned] = []
        with _device.current(pending[0].device):  # which allows to ask for events during a capture
            for item in pending[:count]:
                (finished if item.done(fences) else kept).append(item)
        pending[:count] = kept
    finally:
        _polling.release()
    del finished  # owners may run any code as they go, so outside the lock


def _after_fork() -> None:
    global _polling
    _polling = threading.Lock()  # another thread of the parent may have held it
    _orphans.extend(pending)
    pending.clear()


_device.forget_in_child(_after_fork)

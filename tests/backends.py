"""Where a product test runs: NumPy arrays or CuPy arrays, always inside a poisoned buffer with guard bands.

`Backend.place` and `Backend.output` give a `Placed`: the array handed to the library, the true values, and a
check that nothing around it was touched.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests import layouts

# One quiet NaN for bf16 (0x7fe5), fp16 (0x7fe5) and fp32 (0x7fe57fe5); as an int32 offset far past every row.
POISON = 0x7FE5
GUARD_BYTES = 4096
ALIGN = 256

DTYPES: dict[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


def bits(array: np.ndarray) -> np.ndarray:
    """The elements as unsigned integers of their own width."""
    array = np.ascontiguousarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def is_poison(array: np.ndarray) -> np.ndarray:
    pattern = np.full(array.dtype.itemsize // 2, POISON, np.uint16).view(f"u{array.dtype.itemsize}")[0]
    return bits(array) == pattern


@dataclasses.dataclass
class Placed:
    """An array of the backend that lies inside a larger poisoned buffer."""

    array: Any  # what the library gets
    values: np.ndarray  # its elements when it was placed, contiguous, on the host
    backend: "Backend"
    _buffer: Any  # flat uint16, the backend's memory
    _before: np.ndarray  # flat uint16, the buffer when it was placed
    _view: Any  # rebuilds the array's window over a host copy of the buffer

    def read(self) -> np.ndarray:
        """The elements now, contiguous, on the host."""
        return np.ascontiguousarray(self._view(self.backend.flat(self._buffer)))

    def check_guards(self) -> None:
        """Every byte around the array still holds what it held before the call."""
        now = self.backend.flat(self._buffer)
        window = self._view(now)
        window[...] = self.values
        wrong = np.flatnonzero(now != self._before)
        assert wrong.size == 0, f"{wrong.size} half-words written outside the array, first at half-word {wrong[0]}"

    def check_untouched(self) -> None:
        """An input: not one byte of array and guard bands changed."""
        wrong = np.flatnonzero(self.backend.flat(self._buffer) != self._before)
        assert wrong.size == 0, f"{wrong.size} half-words of an input changed, first at half-word {wrong[0]}"


class Backend:
    """NumPy. `CupyBackend` overrides the five functions that touch memory."""

    name = "cpu"

    def place(self, values: np.ndarray, layout: layouts.Layout = layouts.contiguous) -> Placed:
        """`values` laid out as asked; where elements share memory, `.values` tells what is there."""
        where = layout(values.shape)
        item = values.dtype.itemsize
        shift = -(-where.shift_bytes // item) * item
        start = GUARD_BYTES + shift
        total = start + where.span * item + GUARD_BYTES
        host = np.full(-(-total // 2), POISON, np.uint16)
        first, strides = start + where.first * item, tuple(s * item for s in where.strides)

        def view(flat: np.ndarray, offset: int = 0) -> np.ndarray:
            return np.ndarray(values.shape, values.dtype, flat.data, offset + first, strides)

        view(host)[...] = values
        buffer, array = self.upload(host, values.shape, values.dtype, first, strides)
        return Placed(array, np.ascontiguousarray(view(host)), self, buffer, host, view)

    def output(self, shape: tuple[int, ...], dtype: str, layout: layouts.Layout = layouts.contiguous) -> Placed:
        """An array that holds nothing but the poison NaN."""
        blank = np.full(-(-layouts.elements(shape) * DTYPES[dtype].itemsize // 2), POISON, np.uint16)
        return self.place(blank.view(DTYPES[dtype])[: layouts.elements(shape)].reshape(shape), layout)

    def ints(self, values: Any, dtype: str = "int32") -> Any:
        """Offsets: an integer array between guard bands that look like huge offsets."""
        return self.place(np.asarray(values, DTYPES[dtype])).array

    def upload(
        self, host: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, first: int, strides: tuple[int, ...]
    ) -> tuple[Any, Any]:
        """A copy of the flat buffer, its base a multiple of ALIGN, and the array inside it."""
        raw = np.empty(host.size + ALIGN // 2, np.uint16)
        skip = -raw.ctypes.data % ALIGN // 2
        buffer = raw[skip : skip + host.size]
        buffer[:] = host
        return buffer, np.ndarray(shape, dtype, buffer.data, first, strides)

    def flat(self, buffer: Any) -> np.ndarray:
        """A host copy of a flat buffer."""
        return np.array(buffer)

    def get(self, array: Any) -> np.ndarray:
        """Any array of this backend, on the host."""
        return np.ascontiguousarray(array)

    def poison_allocator(self, shape: tuple[int, ...], dtype: str) -> None:
        """Leave freed blocks of that size full of NaN, so that fresh memory is not zero by luck."""
        blocks = [np.full(shape, np.nan, DTYPES[dtype]) for _ in range(3)]
        del blocks

    def dirty_chip(self) -> None:
        """Leave NaN in whatever on-chip memory the next kernel inherits."""

    def same(self, a: Any, b: Any) -> bool:
        """Bit equality where the arrays are; both contiguous, of one shape and type."""
        return bool((bits(a) == bits(b)).all())

    def synchronize(self) -> None:
        pass


# Every thread also runs through registers full of NaN, so that accumulators do not start as zeros by luck.
_FILL_SHARED = r"""
extern "C" __global__ void fill_shared(int words, int* seen) {
    extern __shared__ unsigned int shared[];
    for (int i = threadIdx.x; i < words; i += blockDim.x) shared[i] = 0x7fe57fe5u;
    __syncthreads();
    float held[64];
    for (int i = 0; i < 64; ++i) held[i] = __uint_as_float(shared[(threadIdx.x + 33 * i) % words]);
    float sum = 0.0f;
    for (int i = 0; i < 64; ++i) sum += held[i] * held[63 - i];
    if (sum == 1.0f) *seen = 1;
}
"""


class CupyBackend(Backend):
    name = "cupy"

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy

    def upload(
        self, host: np.ndarray, shape: tuple[int, ...], dtype: np.dtype, first: int, strides: tuple[int, ...]
    ) -> tuple[Any, Any]:
        buffer = self.cupy.asarray(host)  # the pool gives multiples of 512
        assert buffer.data.ptr % ALIGN == 0
        return buffer, self.cupy.ndarray(shape, dtype, buffer.data + first, strides)

    def flat(self, buffer: Any) -> np.ndarray:
        return self.cupy.asnumpy(buffer)

    def get(self, array: Any) -> np.ndarray:
        """By way of whole numbers: copying strided bf16 would take a kernel that knows the type."""
        dtype = np.dtype(array.dtype)
        raw = self.cupy.ndarray(array.shape, f"u{dtype.itemsize}", array.data, array.strides)
        return np.ascontiguousarray(self.cupy.asnumpy(raw)).view(dtype).reshape(array.shape)

    def poison_allocator(self, shape: tuple[int, ...], dtype: str) -> None:
        halves = -(-layouts.elements(shape) * DTYPES[dtype].itemsize // 2)
        blocks = [self.cupy.full(max(halves, 1), POISON, self.cupy.uint16) for _ in range(3)]
        del blocks

    def dirty_chip(self) -> None:
        kernel = self.cupy.RawKernel(_FILL_SHARED, "fill_shared")
        limit = self.cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        kernel.max_dynamic_shared_size_bytes = limit
        blocks = 2 * self.cupy.cuda.Device().attributes["MultiProcessorCount"]
        seen = self.cupy.zeros(1, self.cupy.int32)
        kernel((blocks,), (256,), (np.int32(limit // 4), seen), shared_mem=limit)

    def same(self, a: Any, b: Any) -> bool:
        word = f"u{a.dtype.itemsize}"
        left, right = (self.cupy.ndarray(array.shape, word, array.data) for array in (a, b))
        return bool((left == right).all())

    def synchronize(self) -> None:
        self.cupy.cuda.get_current_stream().synchronize()


def use_first_gpu() -> None:
    """Makes it current in this thread."""
    import cupy

    cupy.cuda.runtime.setDevice(0)


def two_gpus() -> None:
    """A skip on a machine with one GPU, as most have: no second device can be made up.

    The CUDA runtime is asked, and no framework, so that one that misses the second GPU fails. `gpu_log` complains of a
    log with a skip.
    """
    import cupy

    count = cupy.cuda.runtime.getDeviceCount()
    if count < 2:
        pytest.skip(f"needs two GPUs: here is {count}")


@contextlib.contextmanager
def no_allocation() -> Iterator[None]:
    """CuPy gives no memory of a GPU inside."""
    import cupy

    def fail(_: int) -> Any:
        raise AssertionError("allocated")

    before = cupy.cuda.get_allocator() if hasattr(cupy.cuda, "get_allocator") else cupy.get_default_memory_pool().malloc
    cupy.cuda.set_allocator(fail)
    try:
        yield
    finally:
        cupy.cuda.set_allocator(before)


def make(name: str) -> Backend:
    return CupyBackend() if name == "cupy" else Backend()

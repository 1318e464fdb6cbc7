"""Memory at an address as an array: for what stands in for kernels."""

import ctypes
from typing import Any

import numpy as np


def at(address: int, shape: tuple[int, ...], dtype: Any, strides: tuple[int, ...] | None = None) -> np.ndarray:
    """Memory as an array; strides in elements."""
    kind = np.dtype(dtype)
    extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if strides else int(np.prod(shape))
    raw = (ctypes.c_char * (extent * kind.itemsize)).from_address(address)
    flat = np.frombuffer(raw, kind)
    if strides is None:
        return flat.reshape(shape)
    return np.lib.stride_tricks.as_strided(flat, shape, [step * kind.itemsize for step in strides])

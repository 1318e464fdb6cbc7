"""Call frames of XLA's foreign function interface, made in our own memory for `cupy_gmm.jax` to read."""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from cupy_gmm.jax import _abi


class Frame:
    """A call frame with functions and attributes of such a kind, no arrays, nothing behind the pointers."""

    def __init__(
        self,
        frame_bytes: int = 176,
        api_bytes: int = 256,
        version: tuple[int, int] = (0, 1),
        attributes: int = 1,
        kind: int = _abi.STRING,
    ) -> None:
        self.words = np.zeros(64, np.uint64)
        self.api = np.zeros(64, np.uint64)
        self.kinds = np.array([kind, 0], np.uint32)
        self.words[0], self.api[0] = frame_bytes, api_bytes
        self.put("api", self.api.ctypes.data)
        self.api.view(np.int32)[_abi.API["api_version"] // 4 + 4 :][:2] = version
        self.words[(_abi.FRAME["attrs"] + _abi.ATTRS["size"]) // 8] = attributes
        self.words[(_abi.FRAME["attrs"] + _abi.ATTRS["types"]) // 8] = self.kinds.ctypes.data
        self.kept: list[Any] = []

    def put(self, field: str, value: int, within: int = 0) -> None:
        self.words[(_abi.FRAME[field] + within) // 8] = value

    @property
    def address(self) -> int:
        return int(self.words.ctypes.data)


class Call(Frame):
    """One that can be executed: a text, arrays at addresses, a context whose stream is 0x5000 further on.

    Attributes:
        asked: (bytes, context) of each question for the stream.
        errors: Codes and texts of errors that were made of it.
    """

    def __init__(
        self, text: bytes, operands: Sequence[int], results: Sequence[int], context: int = 1, **facts: Any
    ) -> None:
        super().__init__(**facts)
        self.asked: list[tuple[int, int]] = []
        self.errors: list[tuple[int, str]] = []
        self.put("ctx", context)
        letters = np.frombuffer(text, np.uint8)
        self.put("attrs", self._table([self._words([letters.ctypes.data, len(text)])]), _abi.ATTRS["attrs"])
        self.kept.append(letters)
        for field, addresses in (("args", operands), ("rets", results)):
            self.put(field, len(addresses), _abi.ARGS["size"])
            self.put(field, self._table([self._buffer(address) for address in addresses]), _abi.ARGS["args"])
        for name, function in (("XLA_FFI_Stream_Get", self._stream_get), ("XLA_FFI_Error_Create", self._error_create)):
            made = _abi.Handler(function)
            self.kept.append(made)
            self.api[_abi.API[name] // 8] = ctypes.cast(made, ctypes.c_void_p).value

    def _words(self, words: Sequence[int]) -> int:
        self.kept.append(np.array(words, np.uint64))
        return int(self.kept[-1].ctypes.data)

    def _table(self, pointers: Sequence[int]) -> int:
        return self._words([*pointers, 0xBAD0])

    def _buffer(self, address: int) -> int:
        return self._words([_abi.BUFFER_BYTES, 0, 0, address, 0, 0])

    def _stream_get(self, address: int) -> int:
        size, _, context, _ = words = (ctypes.c_uint64 * 4).from_address(address)
        self.asked.append((size, context))
        words[3] = 0x5000 + context
        return 0 if context else 0xE0

    def _error_create(self, address: int) -> int:
        asked = _abi._ErrorCreateArgs.from_address(address)
        self.errors.append((asked.errc, asked.message.decode()))
        return 0xE000 + len(self.errors)

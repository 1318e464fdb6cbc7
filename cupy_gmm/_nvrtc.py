"""NVRTC: source text to machine code of one architecture, with what the compiler says of each kernel.

`_compile` calls it when its caches have nothing. Never touches the driver, so it works on a machine without a
GPU, before a fork and after one. Knows nothing of caches or of what the kernels compute.
"""

import functools
import importlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from . import _device, _source
from .errors import CompileError

# No -ftz and no fast arithmetic. No -lineinfo: it makes a cubin two thirds larger.
OPTIONS = (
    "-std=c++20",
    "--device-as-default-execution-space",  # constexpr functions and lambdas need no annotation
    "--ptxas-options=-v",  # registers and spills of each kernel, into the log
    "--no-cache",  # NVRTC's own cache starts the driver
)


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel takes."""

    registers: int  # of a thread
    spill_bytes: int  # stores and loads, with those of every device function that was not inlined
    stack_bytes: int  # of a thread
    static_smem: int  # bytes of a block


def version() -> str:
    """Such as "12.9".

    Raises:
        CompileError: NVRTC cannot be used; the message names the extra that brings it.
    """
    major, minor = _device.check(_api().nvrtcVersion(), "asking NVRTC for its version")
    return f"{major}.{minor}"


def options(arch: str) -> list[str]:
    """All that NVRTC is told: one architecture, how to compile, and the one folder to include from."""
    return [f"-arch={arch}", *OPTIONS, f"-I{_source.kernels_dir()}"]


def compile_text(text: str, arch: str, name: str) -> tuple[bytes, str, dict[str, Resources]]:
    """Compile: the cubin, the log, and the resources by symbol. The same call gives the same bytes.

    Args:
        text: CUDA C++; its `#include`s are relative to the kernels folder, nothing else is searched.
        arch: a real architecture, `sm_80` or `sm_90a`: only those give a cubin.
        name: stands for the text in messages.

    Raises:
        CompileError: with the compiler's log; or NVRTC cannot be used.
    """
    arguments = [option.encode() for option in options(arch)]
    with _program(text, name) as program:
        (status,) = _api().nvrtcCompileProgram(program, len(arguments), arguments)
        log = _without_times(_output(program, "ProgramLog").decode(errors="replace"))
        if int(status) != 0:
            raise CompileError(_explain(getattr(status, "name", str(status)), log, arch, name))
        return _output(program, "CUBIN"), log, resources(log)


@functools.cache
def _api() -> Any:
    try:
        api = importlib.import_module("cuda.bindings.nvrtc")
        api.nvrtcVersion()  # the library itself is looked for at the first call
    except (ImportError, OSError, RuntimeError) as error:
        raise CompileError(
            f"kernels are compiled by NVRTC through `cuda-bindings`, which cannot be used ({error}): "
            f"{_device.advice()}."
        ) from error
    return api


@contextmanager
def _program(text: str, name: str) -> Iterator[Any]:
    # NVRTC looks for headers beside a text before -I: without a folder that is the working directory.
    # In brackets, so that the log's lines of a text do not pass for lines of a file of that name.
    path = _source.kernels_dir() / f"[{name}]"
    created = _api().nvrtcCreateProgram(text.encode(), str(path).encode(), 0, [], [])
    program = _device.check(created, f"reading `{name}`")
    try:
        yield program
    finally:
        _api().nvrtcDestroyProgram(program)


def _output(program: Any, what: str) -> bytes:
    doing = f"reading NVRTC's {what}"
    size = _device.check(getattr(_api(), f"nvrtcGet{what}Size")(program), doing)
    # The bindings' examples fill a bytes object; one of a single byte is shared by the whole interpreter.
    buffer = bytearray(size)
    _device.check(getattr(_api(), f"nvrtcGet{what}")(program, buffer), doing)
    return bytes(buffer)


def _without_times(log: str) -> str:
    lines = log.rstrip("\0 \n").splitlines()
    return "\n".join(line for line in lines if "Compile time =" not in line)


def _explain(status: str, log: str, arch: str, name: str) -> str:
    if "invalid value for --gpu-architecture" in log:
        numbers = _device.check(_api().nvrtcGetSupportedArchs(), "asking NVRTC for its architectures")
        known = ", ".join(f"sm_{number}" for number in numbers)
        return f"`{name}` cannot be compiled for {arch}: NVRTC {version()} has {known}; install a newer one."
    return f"NVRTC {version()} could not compile `{name}` for {arch} ({status}):\n{log}"


_ENTRY = re.compile(r"Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_STACK = re.compile(r"(\d+) bytes cumulative stack size")
_SMEM = re.compile(r"(\d+) bytes smem")


def resources(log: str) -> dict[str, Resources]:
    """What ptxas wrote: for each kernel its name, then frame and spills, then what it uses.

    Device functions that were not inlined follow without a caller: their spills count for every kernel.
    """
    found: dict[str, Resources] = {}
    outside = spills = stack = 0
    symbol = ""
    for line in log.splitlines():
        if entry := _ENTRY.search(line):
            symbol, spills, stack = entry[1], 0, 0
        elif (frame := _FRAME.search(line)) and symbol:
            stack, spills = int(frame[1]), int(frame[2]) + int(frame[3])
        elif frame:
            outside += int(frame[2]) + int(frame[3])
        elif symbol and (used := _USED.search(line)):
            stack = max(stack, _number(_STACK, line))
            found[symbol] = Resources(int(used[1]), spills, stack, _number(_SMEM, line))
            symbol = ""  # a kernel's lines end here
    return {name: replace(kernel, spill_bytes=kernel.spill_bytes + outside) for name, kernel in found.items()}


def _number(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else 0

"""Asks a C++ compiler whether XLA's header agrees with `cupy_gmm.jax._abi`, offset by offset and number by number.

`tests/test_jax_abi.py` asks about the header of the installed jaxlib. Those of other releases, out of their wheels:

    python -m tests.ffi_header FOLDER...        folders that hold xla/ffi/api/c_api.h
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from cupy_gmm.jax import _abi
from tests import compilers

HEADER = "xla/ffi/api/c_api.h"
# By the frame's own member: releases call the type differently, and it is what the frame points at that counts.
EXTENSION = "std::remove_pointer_t<decltype(XLA_FFI_CallFrame::extension_start)>"
TABLES = {
    "XLA_FFI_CallFrame": _abi.FRAME,
    "XLA_FFI_Args": _abi.ARGS,
    "XLA_FFI_Rets": {"size": _abi.ARGS["size"], "rets": _abi.ARGS["args"]},
    "XLA_FFI_Attrs": _abi.ATTRS,
    "XLA_FFI_Buffer": _abi.BUFFER,
    "XLA_FFI_Api": _abi.API,
    "XLA_FFI_Api_Version": _abi.VERSION,
    EXTENSION: _abi.EXTENSION,
    "XLA_FFI_Metadata_Extension": _abi.METADATA_EXTENSION,
    "XLA_FFI_Metadata": _abi.METADATA_FIELDS,
    "XLA_FFI_Stream_Get_Args": _abi.STREAM_GET_ARGS,
    "XLA_FFI_Error_Create_Args": _abi.ERROR_CREATE_ARGS,
    "XLA_FFI_ByteSpan": {"ptr": 0, "len": 8},
}
NUMBERS = {
    "XLA_FFI_ExecutionStage_INSTANTIATE": _abi.INSTANTIATE,
    "XLA_FFI_ExecutionStage_PREPARE": _abi.PREPARE,
    "XLA_FFI_ExecutionStage_INITIALIZE": _abi.INITIALIZE,
    "XLA_FFI_ExecutionStage_EXECUTE": _abi.EXECUTE,
    "XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE": _abi.COMMAND_BUFFER_COMPATIBLE,
    "XLA_FFI_AttrType_STRING": _abi.STRING,
    "XLA_FFI_Extension_Metadata": _abi.METADATA,
    "XLA_FFI_Error_Code_INVALID_ARGUMENT": _abi.INVALID_ARGUMENT,
    "XLA_FFI_Error_Code_UNIMPLEMENTED": _abi.UNIMPLEMENTED,
    "XLA_FFI_Error_Code_INTERNAL": _abi.INTERNAL,
    "XLA_FFI_API_MAJOR": _abi.API_VERSION[0],
}


def program() -> str:
    """C++ that compiles where all of it holds."""
    lines = ["#include <cstddef>", "#include <type_traits>", f'#include "{HEADER}"']
    for number, (struct, fields) in enumerate(TABLES.items()):
        lines.append(f"using Type{number} = {struct};")
        lines += [
            f'static_assert(offsetof(Type{number}, {field}) == {at}, "{struct}: {field}");'
            for field, at in fields.items()
        ]
    lines += [f'static_assert({name} == {number}, "{name}");' for name, number in NUMBERS.items()]
    lines += [
        f"static_assert(sizeof(XLA_FFI_Buffer) == {_abi.BUFFER_BYTES});",
        f"static_assert(offsetof(XLA_FFI_CallFrame, attrs) + sizeof(XLA_FFI_Attrs) == {_abi.FRAME_BYTES});",
        f"static_assert(sizeof(XLA_FFI_Api) >= {_abi.API_BYTES});",
        f"static_assert(sizeof(XLA_FFI_Stream_Get_Args) == {_abi.STREAM_GET_BYTES});",
        f"static_assert(XLA_FFI_API_MINOR >= {_abi.API_VERSION[1]});",
        # What follows an extension is an extension, and the one with metadata begins like any other.
        f"using Extension = {EXTENSION};",
        "static_assert(std::is_same_v<decltype(Extension::next), decltype(XLA_FFI_CallFrame::extension_start)>);",
        "static_assert(std::is_same_v<decltype(XLA_FFI_Metadata_Extension::extension_base), Extension>);",
        "static_assert(offsetof(XLA_FFI_Metadata_Extension, extension_base) == 0);",
    ]
    return "\n".join(lines) + "\n"


def complaints(folder: Path, text: str | None = None) -> str:
    """What the compiler says against `text`, by default `program()`, with the header in `folder`, or nothing."""
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "places.cpp"
        source.write_text(program() if text is None else text)
        compiler = compilers.find() or "g++"
        command = [
            compiler,
            "-std=c++17",
            "-fsyntax-only",
            "-Wno-invalid-offsetof",
            f"-I{folder}",
            source,
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.stderr if done.returncode else ""


if __name__ == "__main__":
    found = {folder: complaints(Path(folder)) for folder in sys.argv[1:]}
    for folder, said in found.items():
        print(f"{folder}: {said or 'as _abi says'}")
    sys.exit(any(found.values()))

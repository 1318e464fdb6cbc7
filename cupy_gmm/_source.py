"""Where the CUDA sources are, what they are worth as a cache key, and how a compile begins.

`_compile` hashes them, `_variants` and `_launch` put them at the head of what they compile. Knows nothing of
shapes or compilers.
"""

import hashlib
from pathlib import Path

from .errors import CompileError

_HERE = Path(__file__).resolve().parent

# An installed package has the first, a checkout or an editable install the second.
PLACES = (_HERE / "kernels", _HERE.parent / "kernels")

# What an #include may name. Documentation in the folder does not change a kernel.
SUFFIXES = frozenset({".cu", ".cuh"})


def kernels_dir() -> Path:
    """The folder of the CUDA sources.

    Raises:
        CompileError: neither place holds them; both are named.
    """
    for place in PLACES:
        # Asks for a file of ours: another package may well put a folder called `kernels` beside this one.
        if (place / "ptx" / "types.cuh").is_file():
            return place
    tried = " nor ".join(f"`{place}`" for place in PLACES)
    raise CompileError(
        f"the CUDA sources of cupy_gmm are missing: neither {tried} holds `ptx/types.cuh`; install the package again."
    )


def digest() -> str:
    """SHA-256 over name and text of every CUDA source, as hex.

    Read anew at each call, about a millisecond: an edit made while the program runs counts.

    Raises:
        CompileError: the folder is missing or a file cannot be read.
    """
    folder = kernels_dir()
    total = hashlib.sha256()
    try:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in SUFFIXES):
            text = path.read_bytes()
            # The length keeps the border between two files unambiguous.
            total.update(f"{path.relative_to(folder).as_posix()}\0{len(text)}\0".encode())
            total.update(text)
    except OSError as error:
        raise CompileError(f"a CUDA source of cupy_gmm cannot be read: {error}.") from error
    return total.hexdigest()


def header_text(*includes: str) -> str:
    """The first lines of a compile: which sources it belongs to, then one `#include` a name.

    Args:
        includes: names relative to the kernels folder, in the order wanted.
    """
    lines = [f"// kernels {digest()}", *(f'#include "{name}"' for name in includes)]
    return "\n".join(lines) + "\n"


def unit(name: str) -> str:
    """Text that compiles one whole `.cu` file, such as `routing.cu`.

    Raises:
        CompileError: there is no such unit; those that exist are named.
    """
    folder = kernels_dir()
    if not (folder / name).is_file():
        known = ", ".join(sorted(path.name for path in folder.glob("*.cu"))) or "none"
        raise CompileError(f"`{name}` is no CUDA unit of `{folder}`: expected one of {known}.")
    return header_text(name)

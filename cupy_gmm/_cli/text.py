"""Real text for the demo: the standard library's docstrings, on every machine that has Python."""

import functools
import importlib
import inspect
import warnings
from pathlib import Path

from ..errors import ArgumentError

# Modules with long documentation and no side effect when imported; the order is part of the text.
_MODULES = (
    "argparse", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "csv", "dataclasses",
    "datetime", "decimal", "difflib", "doctest", "enum", "fractions", "functools", "getopt", "glob", "gzip",
    "hashlib", "heapq", "inspect", "io", "itertools", "json", "logging", "math", "operator", "os",
    "pathlib", "pdb", "pickle", "random", "re", "shutil", "statistics", "string", "struct", "subprocess",
    "tempfile", "textwrap", "threading", "timeit", "typing", "unittest", "urllib.parse", "zipfile",
)  # fmt: skip


@functools.cache
def standard_library() -> bytes:
    """All docstrings of the listed modules, their classes, functions and methods, as UTF-8.

    Always the same for one Python version.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old names of a module, touched on the way
        pieces = [piece for name in _MODULES for piece in _documentation(name)]
    text = "\n\n".join(pieces).encode()
    if not text:
        raise ArgumentError("This Python runs without docstrings (-OO): pass your own text with `--text FILE`")
    return text


def _documentation(name: str) -> list[str]:
    module = importlib.import_module(name)
    found: list[object] = [module]
    for _, item in sorted(vars(module).items()):
        if callable(item) and getattr(item, "__module__", None) == name:
            members = sorted(vars(item).items()) if inspect.isclass(item) else []
            found += [item, *(member for _, member in members if callable(member))]
    return [piece for piece in map(inspect.getdoc, found) if piece]


def read(path: Path) -> bytes:
    """The bytes of a file of the user's."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from error
    if not text:
        raise ArgumentError(f"{path} is empty: the demo needs some text, one token a byte")
    return text

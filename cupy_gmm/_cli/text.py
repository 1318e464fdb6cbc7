"""Real text for the demo: the standard library's docstrings, on every machine that has Python."""

import ast
import functools
import importlib
import inspect
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

    Always the same for one Python version: read from the sources, since other libraries replace functions of the
    standard library when they are imported.
    """
    text = "\n\n".join(piece for name in _MODULES for piece in _documentation(name)).encode()
    if not text:
        raise ArgumentError("This Python has no sources of its library: pass your own text with `--text FILE`")
    return text


def _documentation(name: str) -> list[str]:
    module = importlib.import_module(name)
    path = getattr(module, "__file__", None) or ""
    if path.endswith(".py"):
        tree = ast.parse(Path(path).read_bytes())
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
        found = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    else:  # compiled
        public = [item for key, item in sorted(vars(module).items()) if not key.startswith("_") and callable(item)]
        found = [inspect.getdoc(item) for item in (module, *public)]
    return [piece for piece in found if piece]


def read(path: Path) -> bytes:
    """The bytes of a file of the user's."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise ArgumentError(f"{path} cannot be read: {error.strerror}") from error
    if not text:
        raise ArgumentError(f"{path} is empty: the demo needs some text, one token a byte")
    return text

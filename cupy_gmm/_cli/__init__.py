"""The command line: one file a command, `output.py` for what they print, `figures.py` for what they draw.

Only `main` is called from outside. Nothing heavier than the standard library is imported until it runs.
"""

import importlib.util
import json
import sys
from collections.abc import Sequence

from ..errors import ArgumentError, GmmError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: the words after the program's name; default `sys.argv[1:]`.

    Returns:
        Exit code: 0 fine, 1 a check failed or the machine is not usable, 2 wrong use.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if missing := [name for name in ("typer", "rich") if importlib.util.find_spec(name) is None]:
        return _refuse(words, f"The command line needs {' and '.join(missing)}: pip install 'cupy-gmm[cli]'", 1)

    from .app import build

    try:
        build()(args=words, prog_name="python -m cupy_gmm")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except GmmError as error:
        return _refuse(words, str(error), 2 if isinstance(error, ArgumentError) else 1)
    return 0


def _refuse(words: Sequence[str], sentence: str, code: int) -> int:
    print(sentence, file=sys.stderr)
    if "--json" in words:
        print(json.dumps({"error": sentence}))
    return code

"""Calls of the command line in tests: a small layer to ask for, and how to read an answer (fixture `cli`)."""

import json
from typing import Any

# A layer that the demo computes in a moment.
SMALL = "--cpu --tokens 300 --hidden 24 --inner 40 --experts 7 --top-k 2".split()


def document(result: tuple[int, str, str], code: int = 0) -> Any:
    """The JSON document that a command printed, if it ended with `code`."""
    assert result[0] == code, result
    return json.loads(result[1])

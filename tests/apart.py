"""What must run apart from the test that asks for it: a fresh interpreter, many threads at the same moment."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def python(
    program: str, *words: str, limit: float = 300, environment: Mapping[str, str] | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Runs `program` in a fresh interpreter at the top of the tree, and expects that it ends well.

    Args:
        program: Python text.
        words: What it finds in `sys.argv[1:]`.
        limit: Seconds.
        environment: All that it inherits; None for everything this process has.
        more: Variables besides.
    """
    inherited = os.environ if environment is None else environment
    done = subprocess.run(
        [sys.executable, "-c", program, *words],
        cwd=ROOT,
        env={**inherited, "PYTHONDONTWRITEBYTECODE": "1", **more},
        capture_output=True,
        text=True,
        timeout=limit,
    )
    assert done.returncode == 0, done.stderr
    return done


def at_once(call: Callable[[], Any], threads: int = 16, limit: float = 60) -> list[Any]:
    """What `call` returned in each of many threads that began it together."""
    together, results = threading.Barrier(threads), []

    def work() -> None:
        together.wait()
        results.append(call())

    running = [threading.Thread(target=work, daemon=True) for _ in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(limit)
    assert len(results) == threads, f"{threads - len(results)} threads raised, or still run"
    return results

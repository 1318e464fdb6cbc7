"""What every command prints with: one JSON document, or tables for people; progress on stderr.

Called by the command files only. Knows no GPU and no command.
"""

import contextlib
import dataclasses
import json
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else.")]

# A pipe or a log file has no width of its own; a terminal may be too narrow, and would cut numbers in two.
_WIDTH_OF_A_PIPE, _WIDTH_OF_A_TABLE = 160, 112
_SECONDS_BEFORE_A_BAR = 2.0


def console() -> Console:
    """Where tables go: stdout, in its own width when it is a terminal wide enough."""
    own = shutil.get_terminal_size().columns if sys.stdout.isatty() else _WIDTH_OF_A_PIPE
    return Console(width=max(own, _WIDTH_OF_A_TABLE), highlight=False)


def emit(document: dict[str, Any], as_json: bool, draw: Callable[[Console], None]) -> None:
    """Print the one document, or let `draw` print it for people."""
    if as_json:
        print(json.dumps(plain(document), indent=2, allow_nan=False))
    else:
        draw(console())


def plain(value: Any) -> Any:
    """`value` in types that JSON has: dataclasses become objects, NumPy numbers numbers, NaN and Inf null."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def table(title: str, *columns: str, caption: str | None = None) -> Table:
    """An empty table: the first column reads left, all others are numbers and read right."""
    out = Table(
        title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_style="bold",
        title_justify="left", caption_justify="left",
    )  # fmt: skip
    for index, column in enumerate(columns):
        # In a narrow terminal the names fold, never the numbers.
        out.add_column(column, justify="right" if index else "left", overflow="fold", no_wrap=index > 0)
    return out


def mark(ok: bool) -> str:
    """A word for the last column of a check."""
    return "[green]ok[/]" if ok else "[bold red]WRONG[/]"


@contextlib.contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[str], None]]:
    """Yield `advance(what comes next)`: a bar on stderr, only on a terminal and only after two seconds."""
    started, bar = time.monotonic(), None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    visible = sys.stderr.isatty()
    done = 0

    def advance(what: str) -> None:
        nonlocal bar, done
        done += 1
        if visible and bar is None and time.monotonic() - started > _SECONDS_BEFORE_A_BAR:
            bar = Progress(*columns, console=Console(stderr=True), transient=True)
            bar.add_task(label, total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=done, description=f"{label}: {what}")

    try:
        yield advance
    finally:
        if bar is not None:
            bar.stop()

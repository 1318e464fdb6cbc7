"""Counts what XLA calls of `cupy_gmm.jax`: used by programs that GPU tests run in processes of their own."""

from collections.abc import Mapping
from typing import Any


def counted(kinds: Mapping[str, type]) -> dict[str, int]:
    """How often XLA calls each kind of launches from now on, by the name that it has here; kept up to date."""
    called = dict.fromkeys(kinds, 0)

    def watch(name: str, kind: Any) -> None:
        made = kind.made

        def count() -> None:
            called[name] += 1

        kind.made = lambda self, *addresses: (count, *made(self, *addresses))

    for name, kind in kinds.items():
        watch(name, kind)
    return called

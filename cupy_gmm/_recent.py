"""What is remembered by address: so much in the whole process, of which the oldest goes first.

Used by `_launch`, `_tensormap` and `jax/_execute`. A process that serves sees ever other shapes and addresses, so what
each kernel may remember says nothing of what all of them hold.
"""

import collections
from typing import Any

MOST = 16384  # things, each of 4 KB at most

_order: collections.deque[tuple[dict[Any, Any], Any]] = collections.deque()


def remember(known: dict[Any, Any], key: Any, value: Any) -> None:
    """Puts `value` into a dictionary that nothing else writes to; other threads may do so meanwhile."""
    known[key] = value
    _order.append((known, key))
    while len(_order) > MOST:
        oldest, gone = _order.popleft()
        oldest.pop(gone, None)

"""Peers: what others offer for the same product, one module a library.

A peer is a function from a `Work` to one call or several, of which the best counts. A call enqueues one product and
returns its result as a torch tensor in which torch's current stream may read. What is not there, or does not take the
product, raises `Unavailable` with the reason; nothing here is fatal to a table.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from bench.work import Work

Calls = dict[str, Callable[[], Any]]  # name of a variant -> call


class Unavailable(Exception):
    """Why a peer takes no part."""


@dataclasses.dataclass(frozen=True, slots=True)
class Peer:
    """One peer.

    Attributes:
        name: Its column; the fields of a record are `<name>_us` and `<name>_config`.
        make: Its calls for a product.
        crossing: The same way there and back around nothing, where results come over from another stream.
        slow: Far slower than the rest: timed apart and in few rounds, since it would let the card cool.
    """

    name: str
    make: Callable[[Work], Calls]
    crossing: Callable[[Work], Callable[[], Any]] | None = None
    slow: bool = False


def registry() -> dict[str, Peer]:
    """All peers by name; imports none of their libraries but torch."""
    from bench.peers import cublas, jax_gpu, quack

    found = (
        Peer("torch", lambda work: {"": cublas.grouped(work)}),
        Peer("loop", lambda work: {"": cublas.loop(work)}),
        Peer("pallas", jax_gpu.pallas, crossing=jax_gpu.crossing),
        Peer("quack", quack.grouped),
        Peer("ragged_dot", jax_gpu.ragged_dot, crossing=jax_gpu.crossing, slow=True),
    )
    return {peer.name: peer for peer in found}


# In every table unless peers are named.
DEFAULT = ("torch", "loop", "pallas", "quack")
# A peer's own rounding may differ; more than this is an error of it, or in how it is called.
LOOSE = 4.0


@dataclasses.dataclass(slots=True)
class Gathered:
    """The peers of one product.

    Attributes:
        calls: Contender -> call; the name is `peer` or `peer:variant`.
        errors: Contender -> error over bound.
        out: Peer, or contender -> why it takes no part.
    """

    calls: Calls = dataclasses.field(default_factory=dict)
    errors: dict[str, float] = dataclasses.field(default_factory=dict)
    out: dict[str, str] = dataclasses.field(default_factory=dict)


def sentence(error: BaseException) -> str:
    """An error as one line of a table."""
    text = str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]


def gather(work: Work, wanted: Iterable[Peer]) -> Gathered:
    """Makes the calls of every peer and judges each once."""
    found = Gathered()
    for peer in wanted:
        try:
            calls = peer.make(work)
        except Exception as error:
            found.out[peer.name] = sentence(error)
            continue
        for variant, call in calls.items():
            name = f"{peer.name}:{variant}" if variant else peer.name
            try:
                # What its allocator hands out next was filled with NaN.
                work.poisoned()
                error = float(work.error(call()))
            except Exception as failure:
                found.out[name] = sentence(failure)
                continue
            found.errors[name] = error
            if error <= LOOSE:
                found.calls[name] = call
            else:
                found.out[name] = f"wrong: error over bound {error:.3g}"
    return found


def names(calls: Iterable[str]) -> set[str]:
    """The peers among contenders."""
    return {name.partition(":")[0] for name in calls}


def concluded(wanted: Iterable[Peer], medians: dict[str, float]) -> dict[str, Any]:
    """`<peer>_us` of every peer that was timed, the best of its variants, less the way there and back."""
    fields: dict[str, Any] = {}
    for peer in wanted:
        own = {name: us for name, us in medians.items() if name.partition(":")[0] == peer.name}
        if own:
            best = min(own, key=lambda name: own[name])
            fields[f"{peer.name}_us"] = own[best] - (medians.get("crossing", 0.0) if peer.crossing else 0.0)
            if ":" in best:
                fields[f"{peer.name}_config"] = best.partition(":")[2]
    return fields

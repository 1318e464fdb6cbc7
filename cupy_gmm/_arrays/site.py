"""Where one call runs: the `View` of an array and the `Site` of a call.

`locate` makes both; `ops` and the modules beside it allocate, launch and finish through the Site. Of
frameworks it knows only what the family object of the first array (`families`, `foreign`) tells.
"""

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

from ..errors import ArgumentError
from . import lifetime


class View(NamedTuple):
    """One array: where its elements are. A tuple, since every call makes several."""

    ptr: int  # address of element (0, ..., 0)
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    dtype: str  # "bfloat16", "float16", "int32", ...
    device: int  # CUDA ordinal; -1 is the CPU
    readonly: bool
    owner: object  # keeps the memory alive

    def __repr__(self) -> str:  # without the owner, whose text would fetch it from the device
        return f"View({self.dtype}{list(self.shape)}, strides {self.strides}, {self.ptr:#x} on {self.device})"


class Family(Protocol):
    """What a Site asks of the library that its first array comes from."""

    name: str
    graph_pool: bool  # whether memory allocated inside a capture belongs to the graph
    leased: bool  # whether its arrays come in a capsule

    def stream(self, device: int) -> int: ...
    def empty(self, site: "Site", shape: tuple[int, ...], dtype: str) -> tuple[Any, View]: ...
    def scratch(self, site: "Site", nbytes: int) -> View: ...
    def finish(self, site: "Site", native: Any) -> Any: ...


class Site:
    """Family, device and stream of one call, and what to keep until its launches are done."""

    __slots__ = ("_after", "_current", "_foreign", "_graph", "anchor", "device", "family", "first", "maker", "stream")

    def __init__(self, maker: Family, first: str, anchor: Any, device: int, stream: int) -> None:
        self.maker = maker
        self.family = maker.name  # "numpy", "cupy", "torch", "jax", "dlpack"
        self.first = first  # name of the argument that decided
        self.anchor = anchor  # that argument
        self.device = device  # CUDA ordinal; -1 is the CPU
        self.stream = stream  # CUDA handle; 0 is the legacy default stream, and what the CPU has
        self._foreign: list[object] | None = None  # owners to keep
        self._after: list[int] | None = None  # streams of other libraries that wait for our writes
        self._graph: bool | None = None  # whether `stream` is being captured; None until asked
        self._current = device < 0  # found to be current already: a Site lives for one call of one thread

    @property
    def is_cpu(self) -> bool:
        return self.device < 0

    def guard(self) -> AbstractContextManager[Any]:
        """Makes `device` current in this thread, for driver calls too; nearly free when it is so already.

        CuPy has a current stream for each device, so in the families `cupy`, `jax` and `dlpack` that stream
        is then `stream` as well.
        """
        if self._current:
            return lifetime.NOTHING
        guard = lifetime.on(self.device)
        self._current = guard is lifetime.NOTHING
        return guard

    def empty(self, shape: tuple[int, ...], dtype: str) -> tuple[Any, View]:
        """An uninitialised row-major array in the caller's family, and its View; ordered on `stream`.

        In the families `jax` and `dlpack` it is a CuPy array (on the CPU a NumPy one) until `finish`.

        Raises:
            ArgumentError: CuPy would have to allocate while `stream` is being captured into a graph.
        """
        if self.capturing():
            raise ArgumentError(
                "the current stream is being captured into a CUDA graph, where CuPy has no memory that lives "
                "as long as the graph: pass `out=`, and a schedule made before the capture."
            )
        return self.maker.empty(self, shape, dtype)

    def scratch(self, nbytes: int) -> View:
        """Device memory for one launch, 256-byte aligned: keep the View, and give it to `hold` afterwards.

        Outside a capture it comes from the family's caching allocator, which reuses it in stream order.
        Inside a capture with CuPy it is memory of the graph itself: an allocation node here, a free node in
        `hold`.
        """
        if not self.capturing():
            return self.maker.scratch(self, nbytes)
        block = lifetime.GraphBlock(nbytes, self.device, self.stream)
        return View(block.ptr, (nbytes,), (1,), "uint8", self.device, False, block)

    def finish(self, native: Any) -> Any:
        """What the user gets for an array of `empty`: a jax.Array in the family `jax`, else `native`."""
        return self.maker.finish(self, native)

    def hold(self, views: Iterable[View | None] = ()) -> None:
        """After each launch: keep foreign memory until it is done, give the scratch among `views` back."""
        if self._graph:
            for view in views:
                if view is not None and isinstance(view.owner, lifetime.GraphBlock):
                    view.owner.release()
        if self._foreign:
            lifetime.pending.append(lifetime.Launched(self.device, self.stream, tuple(self._foreign)))
        for stream in self._after or ():
            lifetime.order(self.stream, stream, self.device)

    def capturing(self) -> bool:
        """Whether an allocation now would come from CuPy's pool inside a capture; never so in PyTorch's."""
        return not self.maker.graph_pool and self.in_graph()

    def in_graph(self) -> bool:
        """Whether `stream` is being captured into a CUDA graph."""
        if self._graph is None:
            self._graph = self.device >= 0 and lifetime.captured(self.stream)
        return self._graph

    def admit(self, family: Family, array: Any, view: View, written: bool) -> None:
        """Orders an array of another library on `stream`, and notes it for `hold`.

        Inside a capture nothing is ordered and nothing kept: what orders a graph is its launch, and the
        arrays that it names are the user's to keep, whatever library they come from.
        """
        if self.device < 0 or self.in_graph():
            return
        if family.leased:  # the producer was told our stream and has seen to the order
            self._keep(view.owner)
            return
        theirs = family.stream(self.device)
        if theirs == self.stream or (theirs in lifetime.LEGACY and self.stream in lifetime.LEGACY):
            return
        lifetime.order(theirs, self.stream, self.device)
        self._keep(array)
        if written:
            self._after = [*(self._after or ()), theirs]

    def _keep(self, owner: object) -> None:
        if self._foreign is None:
            self._foreign = []
        self._foreign.append(owner)

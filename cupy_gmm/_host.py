"""The CPU path of the products: the same checks and the same semantics, computed by `reference`."""

from typing import Any

from . import _arrays, _heuristics, _problem, _schedule, reference
from ._config import GROUPED_MM, WGRAD


def grouped_mm(site: Any, problem: _problem.Problem, views: Any, offs: "Offsets", config: object) -> Any:
    """`ops.grouped_mm` on views (x, w, offs, out, ...) of host memory; returns the array it allocated, if any."""
    x, w, _, out, _ = views
    if config is not None:
        _heuristics.forced(config, GROUPED_MM)
    bounds = offs.bounds(problem.rows)
    native, view = (None, out) if out is not None else site.empty(problem.out_shape, problem.out_dtype)
    reference.grouped_mm(_arrays.host(x), _arrays.host(w), bounds, _arrays.host(view), offs.group_offset)
    return native


def grouped_mm_wgrad(site: Any, problem: _problem.Problem, views: Any, offs: "Offsets", config: object) -> Any:
    """`ops.grouped_mm_wgrad` on views (x, dy, offs, out, ...) of host memory."""
    x, dy, _, out, _ = views
    if config is not None:
        _heuristics.forced(config, WGRAD)
    bounds = offs.bounds(problem.rows)
    native, view = (None, out) if out is not None else site.empty(problem.out_shape, problem.out_dtype)
    operands = _arrays.host(x), _arrays.host(dy)
    reference.grouped_mm_wgrad(*operands, bounds, _arrays.host(view), problem.accumulate, offs.group_offset)
    return native


class Offsets:
    """End offsets, or the table of a Schedule, in host memory."""

    def __init__(self, view: Any, schedule: Any, group_offset: int, check: str | None) -> None:
        self._array = _arrays.host(view)
        self._schedule = schedule
        self._check = check
        self.group_offset = int(self._array[3]) if schedule is not None else group_offset

    def bounds(self, rows: int) -> Any:
        """Effective bounds (groups + 1,); reports malformed offsets as `check` says."""
        if self._schedule is None:
            status = reference.status(self._array, rows)
            bounds = reference.clamp_offsets(self._array, rows)
        else:
            groups = self._schedule.groups
            status = int(self._array[_schedule.STATUS_WORD])
            first = reference.HEADER_WORDS
            bounds = reference.clamp_offsets(self._array[first : first + groups + 1], rows)[1:]
        if self._check == "sync":
            _schedule.raise_for_status(status, rows)
        elif self._check == "async":
            _schedule.status_word(-1)[0] |= status
        return bounds

"""Would the tests notice? Faults planted one at a time in `cupy_gmm.reference`, the CPU path and the oracle.

A row names a unique text of the module and its replacement. A text that is not there exactly once fails, so that the
table keeps up with the source; a fault that no test of `test_reference` notices fails as well.
"""

import inspect
import types
from collections.abc import Callable

import hypothesis
import numpy as np
import pytest

from cupy_gmm import reference
from tests import layouts, offsets, test_reference

MUTANTS: dict[str, tuple[str, str]] = {
    "clamp removed": ("np.clip(ends, 0, rows), out=", "ends, out="),
    "running maximum removed": (
        "np.maximum.accumulate(np.clip(ends, 0, rows), out=bounds[1:])",
        "bounds[1:] = np.clip(ends, 0, rows)",
    ),
    "int64 cut to int32": (
        "ends = np.asarray(offs).astype(np.int64)\n    bounds",
        "ends = np.asarray(offs).astype(np.int32)\n    bounds",
    ),
    "negative is below -1": ("(ends < 0).any()", "(ends < -1).any()"),
    "equal counts as decreasing": ("ends[1:] < ends[:-1]", "ends[1:] <= ends[:-1]"),
    "rows count as beyond": ("(ends > rows).any()", "(ends >= rows).any()"),
    "rows before the window not zeroed": ("    out[: bounds[low]] = 0\n", ""),
    "tail not zeroed": ("    out[bounds[high] :] = 0\n", ""),
    "window not clamped at 0": ("low = min(max(group_offset, 0), groups)", "low = min(group_offset, groups)"),
    "weights of the wrong expert": ("w[group - group_offset])", "w[group - low])"),
    "start offset for end offset": (
        "rows = slice(bounds[group], bounds[group + 1])\n            out[rows] = _blockwise",
        "rows = slice(bounds[group - 1], bounds[group])\n            out[rows] = _blockwise",
    ),
    "empty group skipped in the gradient": ("            out[local] = 0\n", "            pass\n"),
    "gradient window shifted": ("start = bounds[local + group_offset]", "start = bounds[local + low]"),
    "overwrites instead of adding": (
        "_float32(out[local]) if accumulate else np.float32(0)",
        "np.float32(0)",
    ),
    "adds instead of overwriting": ("_float32(out[local]) if accumulate else", "_float32(out[local]) if True else"),
    "empty groups zeroed when accumulating": ("    if not accumulate:\n", "    if True:\n"),
    "sums in the type of the operands": ("return array.astype(np.float32)", "return array"),
    "ceil became floor": ("counts = -(-lengths // np.where", "counts = (lengths // np.where"),
    "blocks reach into the next group": (
        "np.minimum(first + granule * (share[owner] + (index < longer[owner])), bounds[owner + 1])",
        "first + granule * (share[owner] + (index < longer[owner]))",
    ),
    "one block too long": ("(index < longer[owner])), b", "(index <= longer[owner])), b"),
    "shorter blocks first": (
        "np.minimum(index, longer[owner])",
        "np.maximum(index - (counts[owner] - longer[owner]), 0)",
    ),
    "group one past the window": ("local < (2**31 - 1 if", "local <= (2**31 - 1 if"),
    "groups before the window": ("(local >= 0) & (", "("),
    "a tail block too many": ("np.arange(used, rows, height", "np.arange(used, rows + 1, height"),
    "a tail block past the rows": ("np.minimum(first + height, rows)", "first + height"),
    "shortest group first": ("np.argsort(-lengths", "np.argsort(lengths"),
    "table too small": ("rows // split + groups + 2", "rows // split + groups"),
    "header words swapped": ("group_offset, groups, rows, height", "group_offset, rows, groups, height"),
    "magnitude of the sum": (
        "value[rows], magnitude[rows] = a @ b, np.abs(a) @ np.abs(b)",
        "value[rows], magnitude[rows] = a @ b, np.abs(a @ b)",
    ),
    "gradient's magnitude of the sum": ("np.abs(a.T) @ np.abs(b)", "np.abs(a.T @ b)"),
    "bound twice as wide": ("2.0**-8, 2.0**-134", "2.0**-7, 2.0**-134"),
    "bound without its root": ("4 * np.sqrt(np.asarray(terms, np.float64))", "4 * np.asarray(terms, np.float64)"),
}  # fmt: skip


def mutated(text: str, replacement: str) -> types.ModuleType:
    """`cupy_gmm.reference` with one text replaced."""
    source = inspect.getsource(reference)
    assert source.count(text) == 1, f"the text is there {source.count(text)} times: {text!r}"
    module = types.ModuleType("cupy_gmm.reference")
    exec(compile(source.replace(text, replacement), "reference.py, mutated", "exec"), module.__dict__)
    return module


def battery() -> list[Callable[[], None]]:
    """The tests of the reference, as calls; the fastest to notice first."""
    t = test_reference
    calls: list[Callable[[], None]] = [
        lambda given=given: t.test_bounds_and_status_of_the_fixture(given) for given in offsets.ALL
    ]
    calls += [
        t.test_clamp_takes_int64_before_it_narrows,
        t.test_zeros_are_positive,
        t.test_empty_accumulated_groups_keep_their_bytes,
        t.test_error_bound_in_figures,
        t.test_products_are_summed_in_float32,
        t.test_schedule_table,
        t.test_forward_against_whole_numbers,
        t.test_weight_gradient_against_whole_numbers,
        t.test_clamp_is_the_contract,
    ]
    rng = np.random.default_rng(20)
    calls += [lambda: t.test_error_bound_of_random_data("bfloat16", rng)]
    return [*calls, *(lambda name=name: t.test_out_of_any_strides(name, rng) for name in layouts.LAYOUTS)]


@pytest.fixture
def _without_shrinking(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing example is all that is wanted here, not the smallest one."""
    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    for test in vars(test_reference).values():
        if hasattr(test, "hypothesis"):
            quick = hypothesis.settings(test._hypothesis_internal_use_settings, phases=phases)
            monkeypatch.setattr(test, "_hypothesis_internal_use_settings", quick)


def noticed(module: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(test_reference, "reference", module)
    for call in battery():
        try:
            call()
        except Exception:  # an error inside a mutant is a noticed mutant too
            return True
    return False


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_without_shrinking")
@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert noticed(mutated(*MUTANTS[name]), monkeypatch), "no test noticed"


@pytest.mark.usefixtures("_without_shrinking")
def test_the_original_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    same = "HEADER_WORDS = 16"
    assert not noticed(mutated(same, same), monkeypatch)

"""The kernel matrix: operations, group layouts, extents, types, array layouts and configs, bit for bit."""

import numpy as np
import pytest

from cupy_gmm import _config
from tests import calls, layouts, offsets
from tests.backends import Backend
from tests.calls import Case

# Operation -> are the weights handed over as the transposed view of what is stored, and are K and N swapped?
FORWARD = {
    "forward": (layouts.contiguous, False),
    "forward-transposed": (layouts.transposed, False),
    "input-gradient": (layouts.transposed, True),
    "input-gradient-transposed": (layouts.contiguous, True),
}
OPERATIONS = [*FORWARD, "weight-gradient"]
DTYPES = ("bfloat16", "float16")
FORWARD_CONFIGS = sorted(name for name, config in _config.CONFIGS.items() if config.op == "grouped_mm")
WGRAD_CONFIGS = sorted(name for name, config in _config.CONFIGS.items() if config.op == "grouped_mm_wgrad")


def run(operation: str, backend: Backend, rng: np.random.Generator, case: Case, **options: object) -> None:
    """One operation of the matrix; `case.kn` is (K, N) of the forward product."""
    if operation == "weight-gradient":
        calls.wgrad(backend, rng, case, **options)
        return
    w_layout, swapped = FORWARD[operation]
    if swapped:
        case = Case(case.groups, case.kn[::-1], case.dtype, case.out_dtype, case.group_offset, case.local, case.offs)
    calls.mm(backend, rng, case, w_layout=w_layout, **options)


def extents(groups: layouts.Groups) -> tuple[tuple[int, int], ...]:
    return layouts.KN if len(groups.sizes) < 256 else layouts.KN_SMALL


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("name", layouts.GROUPS)
def test_matrix(name: str, operation: str, backend: Backend, rng: np.random.Generator) -> None:
    """Tile heights, types and `out=` take turns over the extents, so that each meets each group layout."""
    for index, kn in enumerate(extents(layouts.GROUPS[name](64))):
        groups = layouts.GROUPS[name](layouts.HEIGHTS[index % 3])
        for turn, dtype in enumerate(DTYPES):
            given = layouts.contiguous if (index + turn) % 2 else None
            run(operation, backend, rng, Case(groups, kn, dtype), out_layout=given)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_output_types(dtype: str, out_dtype: str, operation: str, backend: Backend, rng: np.random.Generator) -> None:
    for name in ("primes", "around-two-tiles", "tail-of-tiles"):
        for kn in ((67, 37), (72, 40), (264, 136)):
            run(operation, backend, rng, Case(layouts.GROUPS[name](64), kn, dtype, out_dtype))


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("count", layouts.GROUP_COUNTS)
def test_group_counts(count: int, operation: str, backend: Backend, rng: np.random.Generator) -> None:
    """147 rows spread over `count` groups, and the same with an empty group after each."""
    sizes = np.bincount(np.sort(rng.integers(0, count, 147)), minlength=count)
    for kn in ((32, 32), (13, 31)):
        run(operation, backend, rng, Case(layouts.Groups(tuple(sizes.tolist()), 150), kn))
    doubled = np.stack([sizes, np.zeros_like(sizes)], axis=1).ravel()
    run(operation, backend, rng, Case(layouts.Groups(tuple(doubled.tolist()), 147), (17, 11), "float16"))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_pattern_of_empty_groups(operation: str, backend: Backend, rng: np.random.Generator) -> None:
    for index, groups in enumerate(layouts.empty_patterns()):
        kn = ((29, 23), (40, 72))[index % 2]
        run(operation, backend, rng, Case(groups, kn, DTYPES[index // 2 % 2]))


@pytest.mark.parametrize("kn", [(72, 40), (67, 37), (1, 1), (64, 128), (128, 256)])
@pytest.mark.parametrize("layout", layouts.INPUT_LAYOUTS)
@pytest.mark.parametrize("operand", ["x", "w", "dy", "x-wgrad"])
def test_input_layouts(
    operand: str, layout: str, kn: tuple[int, int], backend: Backend, rng: np.random.Generator
) -> None:
    groups = layouts.GROUPS["around-two-tiles"](64)
    chosen = layouts.INPUT_LAYOUTS[layout]
    case = Case(groups, kn)
    if operand == "x":
        calls.mm(backend, rng, case, x_layout=chosen)
    elif operand == "w":
        calls.mm(backend, rng, case, w_layout=chosen)
    elif operand == "dy":
        calls.wgrad(backend, rng, case, dy_layout=chosen)
    else:
        calls.wgrad(backend, rng, case, x_layout=chosen)


@pytest.mark.parametrize("kn", [(72, 40), (67, 37), (1, 1), (64, 128)])
@pytest.mark.parametrize("layout", layouts.LAYOUTS)
@pytest.mark.parametrize("operation", ["forward", "weight-gradient"])
def test_output_layouts(
    operation: str, layout: str, kn: tuple[int, int], backend: Backend, rng: np.random.Generator
) -> None:
    """Written in place, and not one byte between the rows of `out`."""
    for dtype, out_dtype in (("bfloat16", "bfloat16"), ("float16", "float32")):
        case = Case(layouts.GROUPS["three-empty-inside"](64), kn, dtype, out_dtype)
        run(operation, backend, rng, case, out_layout=layouts.LAYOUTS[layout])


@pytest.mark.parametrize("kn", [(72, 40), (67, 37), (128, 64)])
@pytest.mark.parametrize("turn", range(8))
def test_layouts_together(turn: int, kn: tuple[int, int], backend: Backend, rng: np.random.Generator) -> None:
    """All operands odd at once, a different pairing each turn."""
    names = list(layouts.LAYOUTS.values())
    a, b, c = (names[(turn * step + start) % len(names)] for step, start in ((1, 1), (3, 5), (5, 9)))
    case = Case(layouts.GROUPS["primes"](64), kn)
    calls.mm(backend, rng, case, x_layout=a, w_layout=b, out_layout=c)
    calls.wgrad(backend, rng, case, x_layout=b, dy_layout=c, out_layout=a)


@pytest.mark.parametrize("operation", ["forward", "weight-gradient"])
def test_int64_offsets(operation: str, backend: Backend, rng: np.random.Generator) -> None:
    """64-bit ends far outside 32 bits are clamped, not cut."""
    groups = layouts.Groups((11, 0, 30, 9), 50)
    for ends in ([11, 11, 41, 50], [11, -(2**40), 2**40 + 41, 50], [-(2**63), 2**32 + 3, 5, 2**63 - 1]):
        case = Case(groups, (24, 40), offs=np.array(ends, np.int64))
        run(operation, backend, rng, case)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("offset,local", [(0, 3), (2, 4), (5, 1), (7, 1), (3, 0), (8, 0), (6, None)])
def test_group_offset(
    offset: int, local: int | None, operation: str, backend: Backend, rng: np.random.Generator
) -> None:
    """A window of the groups; rows of all others come out zero, whatever they hold."""
    for sizes, tail in (((3, 17, 0, 23, 66, 0, 19, 7), 5), ((0, 0, 70, 0, 0, 131, 1, 0), 0)):
        groups = layouts.Groups(sizes, sum(sizes) + tail)
        for kn in ((40, 72), (29, 23)):
            run(operation, backend, rng, Case(groups, kn, group_offset=offset, local=local))


@pytest.mark.parametrize("kn", [(72, 40), (67, 37), (136, 264)])
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "pitch-plus-7", "pitch-16-bytes"])
def test_accumulate(
    layout: str, out_dtype: str, kn: tuple[int, int], backend: Backend, rng: np.random.Generator
) -> None:
    """Adds where a group has rows; the bytes of empty groups, here NaN with a payload, stay."""
    for name in ("three-empty-inside", "primes", "all-zero", "no-rows", "tail-of-tiles", "all-in-middle"):
        case = Case(layouts.GROUPS[name](64), kn, out_dtype=out_dtype, accumulate=True)
        calls.wgrad(backend, rng, case, out_layout=layouts.LAYOUTS[layout])


# Rows below, at and above the tile, empty groups, columns that end inside a tile; and pitches of 16 bytes, which
# every config can read.
CONFIG_GROUPS = ("primes", "around-two-tiles", "three-empty-inside", "tail-of-tiles", "hot-60", "all-zero")
CONFIG_KN = ((72, 40), (67, 37), (264, 136), (1, 1), (0, 16), (128, 257), (64, 255), (257, 11))


def offered(config: str, rows: int, kn: tuple[int, int]) -> bool:
    """Hopper's copy engine cannot describe an empty operand, and its configs say so; all else runs everywhere."""
    return not (isinstance(_config.CONFIGS[config], _config.WgmmaConfig) and 0 in (rows, *kn))


@pytest.mark.gpu
@pytest.mark.parametrize("w_layout", [layouts.padded_to_16_bytes, layouts.transposed_to_16_bytes])
@pytest.mark.parametrize("config", FORWARD_CONFIGS)
def test_forward_configs(config: str, w_layout: layouts.Layout, gpu: Backend, rng: np.random.Generator) -> None:
    operands = {"x_layout": layouts.padded_to_16_bytes, "w_layout": w_layout, "config": config}
    for index, name in enumerate(CONFIG_GROUPS):
        groups = layouts.GROUPS[name](layouts.HEIGHTS[index % 3])
        for kn in CONFIG_KN:
            if not offered(config, groups.rows, kn):
                continue
            for given in (None, layouts.padded(3), layouts.padded_to_16_bytes):
                calls.mm(gpu, rng, Case(groups, kn, DTYPES[index % 2]), out_layout=given, **operands)
    for out_dtype in ("bfloat16", "float16", "float32"):
        for out_layout in (None, layouts.transposed, layouts.step_two, layouts.shifted(4)):
            case = Case(layouts.GROUPS["primes"](64), (67, 37), "float16", out_dtype)
            calls.mm(gpu, rng, case, out_layout=out_layout, **operands)


@pytest.mark.gpu
@pytest.mark.parametrize("config", WGRAD_CONFIGS)
def test_wgrad_configs(config: str, gpu: Backend, rng: np.random.Generator) -> None:
    pitch = layouts.padded_to_16_bytes
    operands = {"x_layout": pitch, "dy_layout": pitch, "config": config}
    for index, name in enumerate(CONFIG_GROUPS):
        groups = layouts.GROUPS[name](layouts.HEIGHTS[index % 3])
        for kn in CONFIG_KN:
            if not offered(config, groups.rows, kn):
                continue
            given = (None, layouts.padded(3), pitch)[index % 3]
            calls.wgrad(gpu, rng, Case(groups, kn, DTYPES[index % 2]), out_layout=given, **operands)
            for out_dtype in ("float32", "bfloat16"):
                calls.wgrad(gpu, rng, Case(groups, kn, "bfloat16", out_dtype, accumulate=True), **operands)


@pytest.mark.gpu
@pytest.mark.parametrize("config", sorted(_config.CONFIGS))
def test_offsets_fixture_on_every_config(config: str, gpu: Backend, rng: np.random.Generator) -> None:
    """The same malformed offsets for every path; the bytes around every buffer stay."""
    pitch = layouts.padded_to_16_bytes
    for given in offsets.ALL:
        if not offered(config, given.rows, (37, 29)):
            continue
        ends = np.array(given.offs, np.int32)
        case = Case(layouts.Groups(tuple(np.diff(given.bounds)), given.rows), (37, 29), offs=ends)
        if config in FORWARD_CONFIGS:
            calls.mm(gpu, rng, case, x_layout=pitch, w_layout=pitch, out_layout=pitch, config=config)
        else:
            calls.wgrad(gpu, rng, case, x_layout=pitch, dy_layout=pitch, out_layout=pitch, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["seven-rows-of-1024", "zipf-256", "alternating", "random-cuts", "falling-powers"])
@pytest.mark.parametrize("config", sorted(_config.CONFIGS))
def test_many_groups_on_every_config(config: str, name: str, gpu: Backend, rng: np.random.Generator) -> None:
    for height in layouts.HEIGHTS:
        case = Case(layouts.GROUPS[name](height), (72, 136))
        if config in FORWARD_CONFIGS:
            calls.mm(gpu, rng, case, config=config)
            calls.mm(gpu, rng, case, config=config, w_layout=layouts.transposed, out_layout=layouts.contiguous)
        else:
            calls.wgrad(gpu, rng, case, config=config)


@pytest.mark.gpu
@pytest.mark.parametrize("config", FORWARD_CONFIGS)
def test_long_reductions_on_every_config(config: str, gpu: Backend, rng: np.random.Generator) -> None:
    """More turns of the load ring than it has slots, and a last step of every length."""
    groups = layouts.Groups((5, 0, 300, 67), 380)
    for k in (63, 65, 191, 256, 320, 449, 1000, 1024, 4104):
        for w_layout in (layouts.padded_to_16_bytes, layouts.transposed_to_16_bytes):
            case = Case(groups, (k, 200))
            calls.mm(gpu, rng, case, x_layout=layouts.padded_to_16_bytes, w_layout=w_layout, config=config)

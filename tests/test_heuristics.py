"""The choice of tuning points: golden values, and the limits that a choice must respect."""

import types

import pytest

from bench.shapes import PROBLEMS
from cupy_gmm import _device, _heuristics, _plan, _table
from cupy_gmm._config import CONFIGS
from cupy_gmm.errors import ArgumentError

GOLDEN_FORWARD = {  # problem -> (sm_90, sm_80, sm_89); the last one also where sm_90's copy engine cannot read
    "balanced": ("hopper-256x208", "128x256", "128x128"),
    "skewed": ("hopper-256x208", "128x256", "128x128"),
    "hot": ("hopper-256x208", "128x256", "128x128"),
    "dsv3-up": ("hopper-256x208", "128x256", "128x128"),
    "qwen3-30b-up": ("hopper-256x208", "128x256", "128x128"),
    "qwen3-30b-down": ("hopper-256x208", "128x256", "128x128"),
    "mixtral-up": ("hopper-256x208", "128x256", "128x128"),
    "mixtral-down": ("hopper-256x208", "128x256", "128x128"),
    "decode-qwen3-up": ("hopper-256x208", "16x128", "16x128"),
}


def choose(problem: object, arch: str, copy_engine: bool = True) -> str:
    facts = (problem.rows, problem.groups, problem.n, False, copy_engine, arch, _device.SMEM_LIMIT[arch])
    return _heuristics.choose_forward(*facts).name


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_golden_forward(problem: object) -> None:
    assert tuple(choose(problem, arch) for arch in ("sm_90", "sm_80", "sm_89")) == GOLDEN_FORWARD[problem.name]
    assert choose(problem, "sm_90", copy_engine=False) == GOLDEN_FORWARD[problem.name][2]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
def test_golden_weight_gradient(problem: object) -> None:
    names = [_heuristics.choose_wgrad(problem.k, problem.n, False, True, arch).name for arch in ("sm_90", "sm_80")]
    assert names == ["hopper-wgrad-pingpong-128x192", "wgrad-128x128"]


@pytest.mark.parametrize("mean", [0, 1, 24, 25, 96, 97, 5000])
@pytest.mark.parametrize("n", [1, 128, 129, 4096])
@pytest.mark.parametrize("any_stride", [False, True])
@pytest.mark.parametrize("arch", _device.PORTABLE)
def test_a_choice_is_always_legal(mean: int, n: int, any_stride: bool, arch: str) -> None:
    limit = _device.SMEM_LIMIT[arch]
    config = _heuristics.choose_forward(mean * 8, 8, n, any_stride, not any_stride, arch, limit)
    assert config.why_illegal(arch, limit, any_stride) is None
    config = _heuristics.choose_wgrad(n, mean + 1, any_stride, not any_stride, arch)
    assert config.why_illegal(arch, limit, any_stride) is None


@pytest.mark.parametrize("arch", _device.PORTABLE)
def test_blocks_are_whole_granules(arch: str) -> None:
    for rows, groups in ((0, 0), (10, 0), (0, 5), (512, 128), (4096, 64), (1 << 20, 8)):
        blocks = _heuristics.block_shape(rows, groups, arch)
        assert blocks.height % blocks.granule == blocks.split % blocks.granule == 0
        assert 0 < blocks.split <= blocks.height
        assert blocks.granule % 16 == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_can_be_forced_for_its_operation_only(name: str) -> None:
    config = CONFIGS[name]
    other = "grouped_mm" if config.op == "grouped_mm_wgrad" else "grouped_mm_wgrad"
    assert _heuristics.forced(name, config.op) is config
    with pytest.raises(ArgumentError, match="`config` is"):
        _heuristics.forced(name, other)


@pytest.mark.parametrize("rows", [0, 1, 1000, 16384, 1 << 20])
@pytest.mark.parametrize("tiles", [1, 36, 255, 256, 4096])
def test_pieces_of_a_split_are_long_and_few(rows: int, tiles: int) -> None:
    chunk = _heuristics.split_chunk(rows, tiles)
    assert chunk >= 1
    if chunk < rows:
        assert chunk % 64 == 0
        assert chunk >= _heuristics.SHORTEST_PIECE
        assert rows // chunk * tiles <= _heuristics.SPLIT_TILES


def test_counters_behind_a_schedule_are_enough_for_any_weight_gradient() -> None:
    """The kernel counts arrivals there and looks at no limit: one word too few would be another array's."""
    config = CONFIGS["hopper-wgrad-pingpong-128x192"]
    most = 0
    for tiles in range(1, 300):
        for rows in (*range(0, 400_000, 1999), 768 * 1365, 2**31 - 1):
            slots = _plan._pieces(types.SimpleNamespace(op="grouped_mm_wgrad", rows=rows), tiles)[1]
            most = max(most, _plan._scratch(config, tiles, slots)[0])
    assert 0.95 * _table.COUNTER_WORDS < most <= _table.COUNTER_WORDS


@pytest.mark.parametrize(
    "lengths",
    [(1536, 1536), (1535, 1537), (3072,), (1536,) * 20, (2559, 2560, 5), (1024,) * 9, (200_000, 1536, 1536, 7)],
)
def test_scratch_holds_the_pieces_of_any_split(lengths: tuple[int, ...]) -> None:
    """As `pieces_of` in tiles.cuh cuts them; the first case needs every slot."""
    problem = types.SimpleNamespace(op="grouped_mm_wgrad", rows=sum(lengths))
    chunk, slots = _plan._pieces(problem, 1)
    pieces = [(length + chunk // 2) // chunk for length in lengths]
    assert sum(each for each in pieces if each > 1) <= slots
    if lengths == (1536, 1536):
        assert (chunk, slots) == (1024, 4)


def test_resident_ctas() -> None:
    """By registers, by shared memory, by threads, and never none."""
    assert _plan.resident_ctas(CONFIGS["128x256"], 234, 228 * 1024) == 1
    assert _plan.resident_ctas(CONFIGS["128x128"], 232, 228 * 1024) == 2
    assert _plan.resident_ctas(CONFIGS["16x128"], 92, 228 * 1024) == 3
    assert _plan.resident_ctas(CONFIGS["128x256"], 255, 100 * 1024) == 1

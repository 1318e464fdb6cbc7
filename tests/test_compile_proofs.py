"""Every kernel that ships compiles for every portable architecture, without spills, local memory or excess."""

import re

import pytest

from bench import ingest
from cupy_gmm import _compile, _device, _plan, _variants
from cupy_gmm._config import CONFIGS

pytest.importorskip("cuda.bindings.nvrtc", reason="needs the extra nvrtc, cuda12 or cuda13")

PRODUCTS = {variant.symbol: variant for variant in _variants.product_variants()}
SHIPPED = [(name, arch) for arch in _device.PORTABLE for name, _, _ in _variants.sources(arch)]
MAX_REGISTERS = 255


def compiled(name: str, arch: str) -> _compile.Cubin:
    text, target = next((text, target) for known, text, target in _variants.sources(arch) if known == name)
    return _compile.compile_source(text, target, name)


@pytest.mark.parametrize("name,arch", SHIPPED)
def test_no_spills_no_local_memory(name: str, arch: str) -> None:
    cubin = compiled(name, arch)
    assert cubin.resources, f"{name} for {arch} has no kernel"
    for symbol, used in cubin.resources.items():
        assert used.spill_bytes == 0, f"{symbol} for {arch} spills {used.spill_bytes} bytes"
        assert used.stack_bytes == 0, f"{symbol} for {arch} has a stack of {used.stack_bytes} bytes"
        assert used.registers <= MAX_REGISTERS
    assert not re.search(r"\bC75\d\d\b", cubin.log), cubin.log


def test_what_measures_an_sm() -> None:
    """`bench.ingest` needs a GPU; its kernel and the argument that it packs are looked at here."""
    used = _compile.compile_source(ingest.text(), ingest.ARCH, ingest.SOURCE.name).resources[ingest.SYMBOL]
    assert (used.spill_bytes, used.stack_bytes) == (0, 0)
    assert used.static_smem + ingest.PLACES * ingest.PIECE_BYTES <= _device.SMEM_LIMIT["sm_90"]
    assert ingest.PARAMS.size == 320  # sizeof


@pytest.mark.parametrize("symbol,arch", [pair for pair in SHIPPED if pair[0] in PRODUCTS])
def test_as_many_ctas_fit_as_the_config_says(symbol: str, arch: str) -> None:
    """Registers leave room for `min_ctas`, and shared memory fits wherever the config may be chosen."""
    config = PRODUCTS[symbol].config
    used = compiled(symbol, arch).resources[symbol]
    limit = _device.SMEM_LIMIT[arch]
    if config.why_illegal(arch, limit, not config.vectorised) is not None:
        assert config.shared_bytes > limit
        return
    assert config.shared_bytes + used.static_smem <= limit
    registers = -(-used.registers // 8) * 8 * config.threads
    assert registers * config.min_ctas <= _plan.REGISTERS_PER_SM


def test_each_architecture_has_a_config_for_every_call() -> None:
    """What the heuristics may choose always fits: the narrow tile of each height is legal everywhere."""
    for arch, limit in _device.SMEM_LIMIT.items():
        for name in (
            "128x128",
            "64x128",
            "16x128",
            "any-128x64",
            "wgrad-128x128",
            "wgrad-64x64",
            "wgrad-any-64x64",
        ):
            config = CONFIGS[name]
            assert config.why_illegal(arch, limit, not config.vectorised) is None, (arch, name)


def test_a_drifted_field_name_is_a_compile_error() -> None:
    """The two declarations of a tuning point cannot part unnoticed."""
    variant = next(iter(PRODUCTS.values()))
    text = variant.text().replace(".tile_m", ".tile_rows")
    with pytest.raises(_compile.CompileError, match="tile_rows"):
        _compile.compile_source(text, "sm_80", "drifted")


def test_a_wrong_shared_memory_prediction_is_a_compile_error() -> None:
    variant = next(iter(PRODUCTS.values()))
    text = variant.text().replace(f"== {variant.config.shared_bytes}", f"== {variant.config.shared_bytes + 16}")
    with pytest.raises(_compile.CompileError, match="static"):
        _compile.compile_source(text, "sm_80", "predicted")


@pytest.mark.parametrize(
    "change,why",
    [
        ((".tile_m = 128", ".tile_m = 120"), "slices of 16 rows"),
        ((".stages = 3", ".stages = 1"), "one stage cannot be filled while it is read"),
        ((".stages = 3", ".stages = 9"), "more shared memory than any architecture has"),
    ],
)
def test_an_illegal_config_is_a_compile_error(change: tuple[str, str], why: str) -> None:
    variant = next(v for v in PRODUCTS.values() if v.config.name == "128x128")
    text = re.sub(r"static_assert\(kCfg\.shared_bytes.*\n", "", variant.text())
    assert change[0] in text
    with pytest.raises(_compile.CompileError, match="TileConfig"):
        _compile.compile_source(text.replace(*change), "sm_90", why)


def test_symbols_are_distinct() -> None:
    assert len({variant.symbol for variant in _variants.product_variants()}) == len(_variants.product_variants())

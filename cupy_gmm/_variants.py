"""Every kernel that ships as source text: a few lines that name a tuning point and instantiate a header."""

from dataclasses import dataclass

from . import _source
from ._config import CONFIGS, GROUPED_MM, HOPPER, Config, HopperRowsConfig, PingpongConfig, WgmmaConfig

UNITS = ("schedule.cu", "routing.cu", "activation.cu")
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}

K_MAJOR = "kKMajor"
MN_MAJOR = "kMnMajor"
STRIDED = "kStrided"


@dataclass(frozen=True, slots=True)
class Variant:
    """One instantiation of a product kernel: a tuning point, an element type and the layouts of both operands.

    `boxes`: Hopper's forward kernel stores by the copy engine, in the type of the operands.
    """

    config: Config
    dtype: str
    a_layout: str
    b_layout: str
    boxes: bool = False

    @property
    def symbol(self) -> str:
        """Name of the kernel in the cubin; says what it is in a profiler."""
        tile = self.config.name.replace("wgrad-", "")
        words = [self.config.op, tile, DTYPES[self.dtype], self.b_layout.removeprefix("k").lower()]
        return "_".join(words + ["boxes"] * self.boxes).replace("-", "_")

    def text(self) -> str:
        """The translation unit that NVRTC compiles."""
        config = self.config
        kernel, folder, suffix, params, operands = config.op, "", "", "Params", [self.a_layout, self.b_layout]
        stores: list[str] = []
        if isinstance(config, PingpongConfig):
            kernel, folder, suffix, params, operands = f"{kernel}_pingpong", "sm90/", "_sm90", "PingpongParams", []
        elif isinstance(config, HopperRowsConfig):
            folder, suffix, params, operands = "sm90/", "_sm90", "HopperParams", [self.b_layout]
            stores = ["cupy_gmm::Store::" + ("kBoxes" if self.boxes else "kElements")]
        arguments = ", ".join(
            ["kCfg", f"cupy_gmm::{DTYPES[self.dtype]}"] + [f"cupy_gmm::Layout::{o}" for o in operands] + stores
        )
        return (
            _source.header_text(f"{folder}{kernel}.cuh")
            + f"namespace {{ {constant(config, 'kCfg')} }}\n"
            + f"static_assert(kCfg.shared_bytes() == {config.shared_bytes});\n"
            + f'extern "C" __global__ void __launch_bounds__(kCfg.threads(), {config.min_ctas})\n'
            + f"{self.symbol}(const __grid_constant__ cupy_gmm::{params} p) {{\n"
            + f"    cupy_gmm::{kernel}{suffix}<{arguments}>(p);\n}}\n"
        )


def constant(config: Config, name: str) -> str:
    """C++ that declares `config` as a constant."""
    fields = ", ".join(f".{field} = {value}" for field, value in config.fields().items())
    return f"constexpr cupy_gmm::{config.struct} {name}{{{fields}}};"


def layouts(config: Config) -> list[tuple[str, str]]:
    """The operand layouts that `config` is compiled for."""
    if not config.vectorised:
        return [(STRIDED, STRIDED)]
    if config.op == GROUPED_MM:
        return [(K_MAJOR, MN_MAJOR), (K_MAJOR, K_MAJOR)]
    return [(MN_MAJOR, MN_MAJOR)]


def product_variants() -> list[Variant]:
    """All product kernels that ship."""
    return [
        Variant(config, dtype, a_layout, b_layout, boxes)
        for config in CONFIGS.values()
        for dtype in DTYPES
        for a_layout, b_layout in layouts(config)
        for boxes in ((True, False) if isinstance(config, HopperRowsConfig) else (False,))
    ]


def sources(arch: str) -> list[tuple[str, str, str]]:
    """(name, text, target) of every translation unit that ships for an architecture, whole units first.

    Args:
        arch: "sm_80", "sm_90", ...
    """
    units = [(unit, _source.unit(unit), arch) for unit in UNITS]
    return units + [
        (variant.symbol, variant.text(), variant.config.target(arch))
        for variant in product_variants()
        if arch == HOPPER or not isinstance(variant.config, WgmmaConfig)
    ]

"""Every kernel that ships as source text: a few lines that name a tuning point and instantiate a header."""

from dataclasses import dataclass

from . import _source
from ._config import CONFIGS, GROUPED_MM, TileConfig

UNITS = ("schedule.cu", "routing.cu", "activation.cu")
DTYPES = {"bfloat16": "bf16", "float16": "fp16"}

K_MAJOR = "kKMajor"
MN_MAJOR = "kMnMajor"
STRIDED = "kStrided"


@dataclass(frozen=True, slots=True)
class Variant:
    """One instantiation of a product kernel: a tuning point, an element type and the layouts of both operands."""

    config: TileConfig
    dtype: str
    a_layout: str
    b_layout: str

    @property
    def symbol(self) -> str:
        """Name of the kernel in the cubin; says what it is in a profiler."""
        words = (self.config.op, self.config.name, DTYPES[self.dtype], self.b_layout.removeprefix("k").lower())
        return "_".join(words).replace("-", "_").replace("wgrad_wgrad", "wgrad")

    def text(self) -> str:
        """The translation unit that NVRTC compiles."""
        fields = ", ".join(f".{name} = {value}" for name, value in self.config.fields().items())
        op = self.config.op
        arguments = f"kCfg, cupy_gmm::{DTYPES[self.dtype]}, cupy_gmm::Layout::{self.a_layout}, cupy_gmm::Layout::{self.b_layout}"
        return (
            _source.header_text(f"{op}.cuh")
            + f"namespace {{ constexpr cupy_gmm::TileConfig kCfg{{{fields}}}; }}\n"
            + f"static_assert(kCfg.shared_bytes() == {self.config.shared_bytes});\n"
            + 'extern "C" __global__ void __launch_bounds__(kCfg.threads(), kCfg.min_ctas)\n'
            + f"{self.symbol}(const __grid_constant__ cupy_gmm::Params p) {{\n"
            + f"    cupy_gmm::{op}<{arguments}>(p);\n}}\n"
        )


def layouts(config: TileConfig) -> list[tuple[str, str]]:
    """The operand layouts that `config` is compiled for."""
    if not config.vectorised:
        return [(STRIDED, STRIDED)]
    if config.op == GROUPED_MM:
        return [(K_MAJOR, MN_MAJOR), (K_MAJOR, K_MAJOR)]
    return [(MN_MAJOR, MN_MAJOR)]


def product_variants() -> list[Variant]:
    """All product kernels that ship."""
    return [
        Variant(config, dtype, a_layout, b_layout)
        for config in CONFIGS.values()
        for dtype in DTYPES
        for a_layout, b_layout in layouts(config)
    ]


def sources() -> list[tuple[str, str]]:
    """(name, text) of every translation unit that ships, whole units first."""
    units = [(unit, _source.unit(unit)) for unit in UNITS]
    return units + [(variant.symbol, variant.text()) for variant in product_variants()]

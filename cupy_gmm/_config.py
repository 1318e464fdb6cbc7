"""The tuning points that ship, mirrored field by field by `config.cuh` and `sm90/config.cuh`."""

from dataclasses import dataclass

TILE_K = 64  # reduction elements of a pipeline stage; kTileK in config.cuh
ELEMENT_BYTES = 2
VECTOR_BYTES = 16

GROUPED_MM = "grouped_mm"
WGRAD = "grouped_mm_wgrad"
HOPPER = "sm_90"
RESERVED_SHARED_BYTES = 1024  # what CUDA keeps of an SM's shared memory for each CTA


@dataclass(frozen=True, slots=True)
class TileConfig:
    """One tuning point of a portable kernel.

    Attributes:
        name: What `config=` takes.
        op: The kernel it belongs to, "grouped_mm" or "grouped_mm_wgrad".
        tile_m: Rows of the output tile (rows of y; k of the weight gradient).
        tile_n: Columns of the output tile.
        warps_m: Warps along the rows.
        warps_n: Warps along the columns.
        stages: Slots of the load pipeline.
        min_ctas: CTAs that an SM must be able to hold; caps the registers.
        vector_bytes: 16 for cp.async on aligned operands, 2 for element loads at any stride and alignment.
    """

    name: str
    op: str
    tile_m: int
    tile_n: int
    warps_m: int
    warps_n: int
    stages: int
    min_ctas: int
    vector_bytes: int

    @property
    def consumers(self) -> int:
        """Parts of a tile that are finished each on its own: pieces of a split group arrive at so many counters."""
        return 1

    @property
    def threads(self) -> int:
        return 32 * self.warps_m * self.warps_n

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA; the compiler checks the same sum in `TileConfig::shared_bytes`."""
        return self.stages * (self.tile_m + self.tile_n) * TILE_K * ELEMENT_BYTES

    @property
    def vectorised(self) -> bool:
        return self.vector_bytes == VECTOR_BYTES

    @property
    def struct(self) -> str:
        """The CUDA type."""
        return "TileConfig"

    def fields(self) -> dict[str, int]:
        """The fields that the CUDA struct has, by name."""
        names = ("tile_m", "tile_n", "warps_m", "warps_n", "stages", "min_ctas", "vector_bytes")
        return {name: getattr(self, name) for name in names}

    def target(self, arch: str) -> str:
        """What to compile for on an architecture."""
        return arch

    def why_illegal(self, arch: str, smem_limit: int, any_stride: bool) -> str | None:
        """Says in words why this point cannot run such a call, or None when it can.

        Args:
            arch: Architecture of the device, "sm_90".
            smem_limit: Shared memory bytes that one CTA may use on the device.
            any_stride: An operand has no 16-byte access.
        """
        if any_stride and self.vectorised:
            return "it loads 16 bytes at a time, which these strides or base addresses do not allow"
        if self.shared_bytes > smem_limit:
            return f"it needs {self.shared_bytes} bytes of shared memory and the device offers {smem_limit} to a block"
        return None


class _OnHopper:
    """What the tuning points of the wgmma kernels have in common."""

    __slots__ = ()

    min_ctas = 1
    vectorised = True

    def target(self, arch: str) -> str:
        """What to compile for on an architecture: wgmma exists in the architecture-specific target only."""
        return arch + "a"

    def why_illegal(self, arch: str, smem_limit: int, any_stride: bool) -> str | None:
        """As `TileConfig.why_illegal`."""
        if arch != HOPPER:
            return f"it is written for {HOPPER} and the device is {arch}"
        return None


def _hopper_shared_bytes(units: int, consumers: int) -> int:
    """Twin of `hopper_shared_bytes`."""
    barriers = (2 * 8 + 2 * 2 + 1) * 8
    small = barriers + 2 * 9 * 4 + 2 * 32 + 1024
    return -(-(units * 16 * 128 + consumers * 64 * 128 + small) // 1024) * 1024


@dataclass(frozen=True, slots=True)
class HopperRowsConfig(_OnHopper):
    """One tuning point of forward and input gradient on Hopper.

    Attributes:
        name: What `config=` takes.
        columns: Columns of y of a wide tile; a narrow one has half of them.
        wide_tokens: Most rows of y of a wide tile.
        tokens: Most rows of y of a narrow one.
        ring: Units of 2 KB of the load ring.
    """

    name: str
    columns: int
    wide_tokens: int
    tokens: int
    ring: int

    op = GROUPED_MM
    struct = "HopperRowsConfig"

    @property
    def tile_m(self) -> int:
        """Most rows of a tile of y."""
        return self.tokens

    @property
    def tile_n(self) -> int:
        """Columns that a ticket stands for."""
        return self.columns

    @property
    def consumers(self) -> int:
        """Warpgroups that multiply."""
        return self.columns // 128

    @property
    def threads(self) -> int:
        return 128 * (1 + self.consumers)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA; the same sum as `HopperRowsConfig::shared_bytes`."""
        return _hopper_shared_bytes(self.ring, self.consumers)

    def fields(self) -> dict[str, int]:
        """The fields that the CUDA struct has, by name."""
        return {name: getattr(self, name) for name in ("columns", "wide_tokens", "tokens", "ring")}


@dataclass(frozen=True, slots=True)
class PingpongConfig(_OnHopper):
    """One tuning point of the weight gradient for sm_90 whose two warpgroups take tiles in turn.

    Attributes:
        name: What `config=` takes.
        m: Extent of a tile on wgmma's 64-row side, along k.
        n: Extent on its other side, along n.
        m_stages: Slots of the load ring of x.
        n_stages: Slots of that of dy.
        bundle: Most tiles that are handed out together and share their columns of dy.
        front: Percent of the CTAs that begin with the longest groups; the others begin with the shortest.
    """

    name: str
    m: int
    n: int
    m_stages: int
    n_stages: int
    bundle: int
    front: int

    op = WGRAD
    struct = "PingpongConfig"
    threads = 384
    consumers = 1  # a tile is finished by one warpgroup

    @property
    def tile_m(self) -> int:
        return self.m

    @property
    def tile_n(self) -> int:
        return self.n

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of one CTA; the same sum as `PingpongConfig::shared_bytes`."""
        rings = (self.m_stages * self.m + self.n_stages * self.n) * TILE_K * ELEMENT_BYTES
        staging = 2 * 64 * self.n * ELEMENT_BYTES
        small = (2 * self.m_stages + 2 * self.n_stages + 2 * 8 + 1 + 2 + 1) * 8 + 8 * 64 + 1280
        return -(-(rings + staging + small) // 1024) * 1024

    def fields(self) -> dict[str, int]:
        """The fields that the CUDA struct has, by name."""
        return {name: getattr(self, name) for name in ("m", "n", "m_stages", "n_stages", "bundle", "front")}


WgmmaConfig = HopperRowsConfig | PingpongConfig
Config = TileConfig | WgmmaConfig

CONFIGS: dict[str, Config] = {
    config.name: config
    for config in (
        TileConfig("128x256", GROUPED_MM, 128, 256, 2, 4, 3, 1, 16),
        TileConfig("128x128", GROUPED_MM, 128, 128, 2, 2, 3, 2, 16),
        TileConfig("64x128", GROUPED_MM, 64, 128, 2, 2, 4, 2, 16),
        TileConfig("16x128", GROUPED_MM, 16, 128, 1, 4, 4, 3, 16),
        TileConfig("any-128x64", GROUPED_MM, 128, 64, 2, 2, 2, 2, 2),
        HopperRowsConfig("hopper-256x208", 256, 208, 256, 104),
        # perf: bench/notes/0007-hopper-wgrad-pingpong.md
        PingpongConfig("hopper-wgrad-pingpong-128x192", 128, 192, 5, 4, 4, 75),
        TileConfig("wgrad-128x128", WGRAD, 128, 128, 2, 2, 3, 2, 16),
        TileConfig("wgrad-64x64", WGRAD, 64, 64, 2, 2, 4, 2, 16),
        TileConfig("wgrad-any-64x64", WGRAD, 64, 64, 2, 2, 2, 2, 2),
    )
}


def configs_of(op: str) -> list[Config]:
    """The shipped points of one kernel, in the order of the table."""
    return [config for config in CONFIGS.values() if config.op == op]

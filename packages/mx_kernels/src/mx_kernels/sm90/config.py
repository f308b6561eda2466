"""Tiles, stages and memory of the Hopper GEMM: every number that a tuner would turn.

Nothing here imports the DSL, so a configuration is checked, and refused with its reason, before anything is compiled.
"""

from dataclasses import dataclass
from functools import cached_property

SMEM_BYTES = 232_448  # 227 KiB, what one CTA may use on sm_90
TILE_K = 64  # one swizzle row of BF16
CONSUMERS = 2  # warpgroups that multiply, each one half of the tile's rows
MMA_ROWS = 64  # of one wgmma
STORE_ROW_BYTES = 128  # the epilogue's slab is one swizzle row wide
STORE_BUFFER_ROWS = 128  # of a consumer's slab buffers together
SCALE_TILE = 512  # bytes of one 128 x 4 tile of scales
BARRIER_BYTES = 1536  # mbarriers, tile descriptions
ALIGN_BYTES = 1024  # of the first buffer

ELEMENT_BYTES = {"bf16": 2, "mxfp8_e4m3": 1, "mxfp8_e5m2": 1}
OUT_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class TileConfig:
    """What one cluster of CTAs computes at a time: cluster_m x cluster_n tiles of tile_m x tile_n.

    CTAs of a cluster that share rows (columns) of the output share their loads of A (B) by multicast.
    """

    tile_m: int = 256
    tile_n: int = 128
    cluster_m: int = 1
    cluster_n: int = 1
    supergroup: int = 8  # tiles of N walked before the next step along M: keeps the output in flight square

    def __str__(self) -> str:
        return f"{self.tile_m}x{self.tile_n} cluster {self.cluster_m}x{self.cluster_n}"

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def cluster_tile(self) -> tuple[int, int]:
        return self.tile_m * self.cluster_m, self.tile_n * self.cluster_n


@dataclass(frozen=True)
class GemmKey:
    """Everything that a compiled kernel depends on; sizes are dynamic."""

    mode: str  # "fprop" | "dgrad" | "wgrad"
    a_format: str
    b_format: str
    out_dtype: str  # "bf16" | "fp32"
    aligned: bool  # RowMap.ALIGNED: groups start at multiples of 128 rows
    grouped: bool
    accumulate: bool
    tile: TileConfig

    @property
    def scaled(self) -> bool:
        return self.a_format != "bf16"

    @property
    def groups_along_k(self) -> bool:
        return self.mode == "wgrad"

    @property
    def a_k_major(self) -> bool:
        """Whether the reduced axis of A is the contiguous one (B's is, in fprop only)."""
        return self.mode != "wgrad"

    @property
    def b_k_major(self) -> bool:
        return self.mode == "fprop"

    @property
    def has_tail(self) -> bool:
        """Whether rows past the last group must be written as zeros."""
        return self.grouped and not self.aligned and not self.groups_along_k

    @property
    def rows_per_consumer(self) -> int:
        return self.tile.tile_m // CONSUMERS

    @property
    def store_n(self) -> int:
        """Columns of the epilogue's slab."""
        return STORE_ROW_BYTES // OUT_BYTES[self.out_dtype]

    @property
    def a_transposed(self) -> bool:
        """Whether A's codes must be transposed on their way to registers, which permutes the rows of the tile.

        wgmma takes A from registers K-major only; see gemm_operands.py.
        """
        return self.scaled and not self.a_k_major

    @property
    def store_rows(self) -> int:
        """Rows of a slab: those of one wgmma, or of two where the rows of the two are interleaved."""
        return 2 * MMA_ROWS if self.a_transposed else MMA_ROWS

    @property
    def store_stages(self) -> int:
        """Slab buffers of a consumer."""
        return STORE_BUFFER_ROWS // self.store_rows

    @property
    def sfa_tiles(self) -> int:
        """Scale tiles of A in one stage."""
        return self.tile.tile_m // 128 if self.scaled else 0

    @property
    def sfb_tiles(self) -> int:
        """Scale tiles of B in one stage."""
        return self.tile.tile_n // 128 if self.scaled else 0

    @property
    def stage_bytes(self) -> int:
        """What the copy engine writes for one K tile."""
        a = self.tile.tile_m * TILE_K * ELEMENT_BYTES[self.a_format]
        b = self.tile.tile_n * TILE_K * ELEMENT_BYTES[self.b_format]
        return a + b + (self.sfa_tiles + self.sfb_tiles) * SCALE_TILE

    @property
    def b_stages(self) -> int:
        """Tiles of B that stand dequantised in shared memory."""
        return 3 if self.scaled else 0

    @cached_property
    def stages(self) -> int:
        """Stages of the ring that the copy engine fills: as many as fit."""
        store = CONSUMERS * STORE_BUFFER_ROWS * STORE_ROW_BYTES
        dequantised = self.b_stages * self.tile.tile_n * TILE_K * ELEMENT_BYTES["bf16"]
        return (SMEM_BYTES - BARRIER_BYTES - ALIGN_BYTES - store - dequantised) // self.stage_bytes


def choose_tile(mode: str, scaled: bool, rows: int, groups: int, columns: int) -> TileConfig:
    """The tile for a problem of this size, from what the host knows: all rows, not how they fall into groups.

    Chosen from the tables in docs/sm90_gemm.md: fast in equal groups without wasting much on groups that end inside a
    tile.

    Args:
        mode: "fprop", "dgrad" or "wgrad".
        scaled: whether the operands are MXFP8.
        rows: of all groups together.
        groups: how many.
        columns: of the output.
    """
    few_rows = rows <= 192 * groups
    if scaled:
        if mode != "wgrad" and few_rows:
            return TileConfig(128, 128)
        return TileConfig(256, 128, cluster_n=2 if -(-columns // 128) % 2 == 0 else 1)
    if mode == "wgrad":
        if few_rows:
            return TileConfig(128, 128, cluster_m=2)
        return TileConfig(128, 256, cluster_m=2) if columns % 256 == 0 else TileConfig(256, 128)
    return TileConfig(128, 256, cluster_m=1 if few_rows else 2)


def why_impossible(key: GemmKey) -> str | None:
    """The reason why no kernel can be compiled for `key`, or None."""
    tile = key.tile
    if key.mode not in ("fprop", "dgrad", "wgrad"):
        return f"mode: expected fprop, dgrad or wgrad, got {key.mode!r}"
    for name, fmt in (("a", key.a_format), ("b", key.b_format)):
        if fmt not in ELEMENT_BYTES:
            return f"{name}: the Hopper GEMM takes {', '.join(ELEMENT_BYTES)} operands, got {fmt}"
    if (key.a_format == "bf16") != (key.b_format == "bf16"):
        return f"operands: both bf16 or both MXFP8, got {key.a_format} and {key.b_format}"
    if key.out_dtype not in OUT_BYTES:
        return f"out_dtype: expected bf16 or fp32, got {key.out_dtype}"
    if key.accumulate and (key.mode != "wgrad" or key.out_dtype != "fp32"):
        return f"accumulate: only wgrad into an fp32 output accumulates, got {key.mode} into {key.out_dtype}"
    if key.mode == "wgrad" and key.grouped and key.scaled and not key.aligned:
        return "wgrad of MXFP8 operands: expected ALIGNED rows (a scale block must not span two experts), got COMPACT"
    if tile.tile_m not in (128, 256):
        return f"tile_m: expected 128 or 256, got {tile.tile_m}"
    if tile.tile_n not in ((128,) if key.scaled else (64, 128, 256)):
        # With four warpgroups ptxas has 128 registers to place the operands of one wgmma in.
        return f"tile_n: expected {'128' if key.scaled else '64, 128 or 256'}, got {tile.tile_n}"
    if key.a_transposed and tile.tile_m != 256:
        return f"tile_m: wgrad of MXFP8 operands interleaves the rows of two wgmmas and needs 256, got {tile.tile_m}"
    if tile.tile_m * tile.tile_n > 256 * 128:
        return f"tile {tile}: the accumulators of two warpgroups hold 256 x 128 or 128 x 256"
    if (
        tile.cluster_m < 1
        or tile.cluster_n < 1
        or tile.cluster_size > 8
        or tile.cluster_size & (tile.cluster_size - 1)
    ):
        return f"cluster: expected 1, 2, 4 or 8 CTAs, got {tile.cluster_m} x {tile.cluster_n}"
    if tile.supergroup < 1:
        return f"supergroup: expected at least 1, got {tile.supergroup}"
    if key.stages < 3:
        return f"tile {tile}: {key.stages} stages fit in shared memory, 3 are needed"
    return None

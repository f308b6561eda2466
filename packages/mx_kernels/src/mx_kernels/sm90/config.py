"""Tiles, stages and memory of the Hopper GEMM: every number that a tuner would turn.

Nothing here imports the DSL, so a configuration is checked, and refused with its reason, before anything is compiled.
"""

from dataclasses import dataclass
from functools import cached_property

from mx_core import RowMap
from mx_core.groups import GROUP_ALIGNMENT

from mx_kernels.generic.gemm import ELEMENT_BYTES, OUT_BYTES, GemmVariant
from mx_kernels.problem import GemmProblem

SMEM_BYTES = 232_448  # 227 KiB, what one CTA may use on sm_90
TILE_K = 64  # one swizzle row of BF16
CONSUMERS = 2  # warpgroups that multiply, each one half of the tile's rows
MMA_ROWS = 64  # of one wgmma
STORE_ROW_BYTES = 128  # the epilogue's slab is one swizzle row wide
STORE_BUFFER_ROWS = 128  # of a consumer's slab buffers together
SCALE_TILE = 512  # bytes of one 128 x 4 tile of scales
BARRIER_BYTES = 1536  # mbarriers, tile descriptions
ALIGN_BYTES = 1024  # of the first buffer


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
class GemmKey(GemmVariant):
    """Everything that a compiled kernel depends on; sizes are dynamic.

    No kernel multiplies MXFP8 operands in wgrad: they become BF16 tensors first (`dequantize_first`).
    """

    chip = "Hopper"

    tile: TileConfig

    def fp8(self, operand: str) -> str:
        """Element type of operand "a" or "b" of a scaled GEMM, as PTX names it."""
        return (self.a_format if operand == "a" else self.b_format).removeprefix("mxfp8_")

    @property
    def store_n(self) -> int:
        """Columns of the epilogue's slab."""
        return STORE_ROW_BYTES // OUT_BYTES[self.out_dtype]

    @property
    def rows_per_consumer(self) -> int:
        return self.tile.tile_m // CONSUMERS

    @property
    def store_stages(self) -> int:
        """Slab buffers of a consumer."""
        return STORE_BUFFER_ROWS // MMA_ROWS

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
        return 4 if self.scaled else 0

    @cached_property
    def stages(self) -> int:
        """Stages of the ring that the copy engine fills: as many as fit."""
        store = CONSUMERS * STORE_BUFFER_ROWS * STORE_ROW_BYTES
        dequantised = self.b_stages * self.tile.tile_n * TILE_K * ELEMENT_BYTES["bf16"]
        return (SMEM_BYTES - BARRIER_BYTES - ALIGN_BYTES - store - dequantised) // self.stage_bytes

    def why_impossible_tile(self) -> str | None:
        """The reason why this tile gives no kernel, or None."""
        tile = self.tile
        if tile.tile_m not in (128, 256):
            return f"tile_m: expected 128 or 256, got {tile.tile_m}"
        if tile.tile_n not in ((128,) if self.scaled else (64, 128, 192, 256)):
            # With four warpgroups ptxas has 128 registers to place the operands of one wgmma in.
            return f"tile_n: expected {'128' if self.scaled else '64, 128, 192 or 256'}, got {tile.tile_n}"
        if tile.tile_n == 192 and tile.cluster_m > 1:
            return f"tile {tile}: 192 columns are not split into whole swizzle rows"
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
        if self.stages < 3:
            return f"tile {tile}: {self.stages} stages fit in shared memory, 3 are needed"
        return None


#: What a measurement chooses from (generic/autotune.py).
TILES = (
    *(
        TileConfig(tile_m, tile_n, cluster_m, cluster_n)
        for tile_m, tile_n in ((256, 128), (128, 256), (128, 128))
        for cluster_m, cluster_n in ((1, 1), (2, 1), (1, 2))
    ),
    TileConfig(128, 192),
    TileConfig(128, 192, cluster_n=2),
)


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
        return TileConfig(128, 128) if few_rows else TileConfig(256, 128)
    if mode == "wgrad":
        return TileConfig(128, 128, cluster_m=2)
    if columns <= 128:
        return TileConfig(256, 128)
    if mode == "dgrad" and few_rows and -columns % 384 <= -columns % 256:
        return TileConfig(128, 192, cluster_n=2)
    return TileConfig(128, 256, cluster_m=1 if few_rows else 2)


def likely_rows(problem: GemmProblem, rows: int, groups: int) -> int:
    """How many rows the groups have, where `rows` may be what was allocated for the most padding (mx_core.aligned_rows)."""
    if problem.grouped and problem.row_map is RowMap.ALIGNED:
        return max(rows - (GROUP_ALIGNMENT - 1) * groups, 0)
    return rows


#: Of the model in `dequantize_first`, fitted to docs/sm90_gemm.md: what BF16 operands multiply at, what a launch that
#: only converts moves, and how much longer than the product of BF16 operands that of MXFP8 operands takes.
BF16_FLOPS = 750e12
CONVERTED_BYTES = 3.9e12
IN_LOOP = {"fprop": 0.25, "dgrad": 0.28}


def dequantize_first(mode: str, rows: int, groups: int, n: int, k: int) -> bool:
    """Whether MXFP8 operands become BF16 tensors before the product, rather than BF16 tiles in its main loop.

    Before it, every element costs 3 bytes more of memory traffic; in the loop, instructions for every tile that uses it.
    wgrad, whose operands are both the wrong way round for a main loop, was faster this way at every size measured.

    Args:
        mode: "fprop", "dgrad" or "wgrad".
        rows: of all groups together.
        groups: how many.
        n: of the weights (groups, n, k).
        k: of the weights.
    """
    if mode == "wgrad":
        return True
    elements = rows * (k if mode == "fprop" else n) + groups * n * k
    return 3 * elements / CONVERTED_BYTES < IN_LOOP[mode] * 2 * rows * n * k / BF16_FLOPS

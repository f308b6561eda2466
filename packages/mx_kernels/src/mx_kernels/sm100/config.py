"""Tiles, stages and memory of the Blackwell GEMM: every number that a tuner would turn.

Nothing here imports the DSL, so a configuration is checked, and refused with its reason, before anything is compiled.
"""

from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

from mx_kernels.generic.gemm import ELEMENT_BYTES, OUT_BYTES, GemmVariant

SMEM_BYTES = 232_448  # 227 KiB, what one CTA may use on sm_100
TMEM_COLUMNS = 512  # 128 lanes x 512 columns of 32 bits
SCALE_TILE = 512  # bytes of one 128 x 4 tile of scales
SCALE_TILE_COLUMNS = 4  # TMEM columns one scale tile takes
K_TILE_BYTES = 128  # one swizzle row: 128 FP8 or 64 BF16 elements
STORE_STAGES = 2
BARRIER_BYTES = 1024  # mbarriers, tile descriptions and the alignment of the buffers


@dataclass(frozen=True)
class TileConfig:
    """What one cluster of CTAs computes at a time.

    `tile_m` 256 means a pair of CTAs that issues two-CTA MMAs (`cta_group::2`): each holds half of A, half of B, and
    the accumulator of its own 128 rows. `cluster_m` and `cluster_n` count CTAs; tiles of a cluster that share rows
    (columns) of the output share their loads of A (B) by multicast.
    """

    tile_m: int = 256
    tile_n: int = 256
    cluster_m: int = 2
    cluster_n: int = 1
    supergroup: int = 8  # tiles of N walked before the next step along M: keeps the output in flight square
    slab_bytes: int = (
        128  # width of what the epilogue stores at a time: 64 makes room for a stage, at twice the stores
    )

    def __str__(self) -> str:
        slab = "" if self.slab_bytes == 128 else f" slab {self.slab_bytes}"
        return f"{self.tile_m}x{self.tile_n} cluster {self.cluster_m}x{self.cluster_n}{slab}"

    @property
    def pair(self) -> int:
        """CTAs that work on one MMA: 1 or 2."""
        return self.tile_m // 128

    @property
    def cluster_size(self) -> int:
        return self.cluster_m * self.cluster_n

    @property
    def tiles_m(self) -> int:
        """MMA tiles of a cluster along M; along N there are cluster_n."""
        return self.cluster_m // self.pair

    @property
    def cluster_tile(self) -> tuple[int, int]:
        """Rows and columns of the output that a cluster computes at a time."""
        return self.tile_m * self.tiles_m, self.tile_n * self.cluster_n

    def smaller_cluster(self) -> "TileConfig | None":
        """What to take where this cluster does not fit: half of it, then one CTA's half of a pair's tile, then None."""
        if self.cluster_n > 1:
            return replace(self, cluster_n=self.cluster_n // 2)
        if self.cluster_m > self.pair:
            return replace(self, cluster_m=self.cluster_m // 2)
        return replace(self, tile_m=128, cluster_m=1) if self.pair == 2 else None


@dataclass(frozen=True)
class GemmKey(GemmVariant):
    """Everything that a compiled kernel depends on; sizes are dynamic."""

    chip = "Blackwell"

    tile: TileConfig

    @property
    def tile_k(self) -> int:
        return K_TILE_BYTES // ELEMENT_BYTES[self.a_format]

    @property
    def store_n(self) -> int:
        """Columns of the epilogue's slab."""
        return self.tile.slab_bytes // OUT_BYTES[self.out_dtype]

    @cached_property
    def memory(self) -> "MemoryPlan":
        return MemoryPlan.of(self)

    def why_impossible_tile(self) -> str | None:
        """The reason why this tile gives no kernel, or None."""
        tile = self.tile
        if tile.tile_m not in (128, 256):
            return f"tile_m: expected 128 (one CTA) or 256 (a CTA pair), got {tile.tile_m}"
        if tile.tile_n not in (64, 128, 192, 256):
            return f"tile_n: expected 64, 128, 192 or 256, got {tile.tile_n}"
        if tile.cluster_m % tile.pair or tile.cluster_m < 1 or tile.cluster_n < 1 or tile.cluster_size > 16:
            return f"cluster: expected a multiple of {tile.pair} x 1 CTAs, at most 16, got {tile.cluster_m} x {tile.cluster_n}"
        if tile.cluster_size & (tile.cluster_size - 1):
            return f"cluster: expected a power of two of CTAs, got {tile.cluster_m} x {tile.cluster_n}"
        if tile.slab_bytes not in (64, 128):
            return f"slab_bytes: expected 64 or 128, got {tile.slab_bytes}"
        if tile.supergroup < 1:
            return f"supergroup: expected at least 1, got {tile.supergroup}"
        if self.memory.stages < 3:
            return f"tile {tile}: {self.memory.stages} stages fit in shared memory, 3 are needed"
        return None


@dataclass(frozen=True)
class MemoryPlan:
    """Shared and tensor memory of one CTA."""

    stages: int
    stage_bytes: int
    smem_bytes: int
    sfb_tiles: int  # scale tiles that the columns of one tile touch
    acc_stages: int  # accumulators that can be full at a time
    acc_stride: int  # TMEM columns from one accumulator to the other
    scale_columns: int  # the last TMEM columns: SFA, then SFB

    @property
    def sfa_column(self) -> int:
        return TMEM_COLUMNS - self.scale_columns

    @property
    def sfb_column(self) -> int:
        return self.sfa_column + SCALE_TILE_COLUMNS

    @property
    def acc_shared(self) -> bool:
        """The two accumulators overlap in the columns that the scales leave no room for."""
        return self.acc_stages == 1

    @classmethod
    def of(cls, key: GemmKey) -> "MemoryPlan":
        tile = key.tile
        # An N tile of 64 or 192 begins in the middle of a scale tile every other time.
        sfb_tiles = -(-tile.tile_n // 128) if key.scaled else 0
        scales = (1 + sfb_tiles) * SCALE_TILE if key.scaled else 0
        stage = (128 + tile.tile_n // tile.pair) * K_TILE_BYTES + scales
        store = STORE_STAGES * 128 * tile.slab_bytes
        stages = (SMEM_BYTES - BARRIER_BYTES - store) // stage
        scale_columns = (1 + sfb_tiles) * SCALE_TILE_COLUMNS if key.scaled else 0
        free = TMEM_COLUMNS - scale_columns
        acc_stride = min(tile.tile_n, free - tile.tile_n)
        return cls(
            stages=stages,
            stage_bytes=stage,
            smem_bytes=stages * stage + store + BARRIER_BYTES,
            sfb_tiles=sfb_tiles,
            acc_stages=2 if acc_stride == tile.tile_n else 1,
            acc_stride=acc_stride,
            scale_columns=scale_columns,
        )


# ------------------------------------------------------------------------------------------------ choice of a tile

#: What the estimate chooses from.
TILES = tuple(
    TileConfig(tile_m, tile_n, cluster_m=tile_m // 128)
    for tile_m in (256, 128)
    for tile_n in (256, 192, 128, 64)
)
#: What only a measurement may choose. Clusters beyond one pair save L2 traffic, but strand SMs where a GPC's SMs are no
#: multiple of 4 CTAs; half slabs trade a stage more for twice the stores.
VARIANTS = (
    TileConfig(256, 256, 2, 2),
    TileConfig(256, 256, 4, 1),
    TileConfig(256, 128, 2, 2),
    TileConfig(256, 128, 4, 1),
    TileConfig(128, 256, 2, 1),
    *(replace(tile, slab_bytes=64) for tile in TILES if tile.tile_n % 128 == 0),
)
WORTH_MEASURING = 1.5  # times the smallest estimate
L2_BYTES_PER_CLOCK = 56  # what one SM draws from L2 while all do (13-17 TB/s on 148 SMs)
SMEM_BYTES_PER_CLOCK = 128  # what the tensor core reads of its operands
TILE_CLOCKS = 600  # of a tile's latency, what overlapping accumulators leave exposed


def estimated_clocks(
    tile: TileConfig, mode: str, a_format: str, rows: int, groups: int, n: int, k: int, sms: int
) -> float:
    """Projected clocks of a GEMM with equal groups: waves of tiles x the slowest of MMA, operand reads and loads.

    Args:
        tile: the candidate.
        mode: "fprop", "dgrad" or "wgrad".
        a_format: of the operands: BF16 MMAs take twice the clocks and bytes.
        rows: rows of all groups together.
        groups: how many.
        n: columns of the output.
        k: the other extent of the weights: reduced in fprop and dgrad, the output's rows in wgrad.
        sms: multiprocessors.
    """
    group_rows = -(-rows // groups)
    m, k = (k, group_rows) if mode == "wgrad" else (group_rows, k)
    tile_m, tile_n = tile.cluster_tile
    tiles = groups * -(-m // tile_m) * -(-n // tile_n)
    waves = -(-tiles // (sms // tile.cluster_size))
    bytes_k = ELEMENT_BYTES[a_format] * k
    mma = bytes_k * tile.tile_n / 64
    operands = bytes_k * (128 + tile.tile_n / tile.pair)
    return waves * (max(mma, operands / SMEM_BYTES_PER_CLOCK, operands / L2_BYTES_PER_CLOCK) + TILE_CLOCKS)


@lru_cache(maxsize=1024)
def choose_tile(mode: str, a_format: str, rows: int, groups: int, n: int, k: int, sms: int) -> TileConfig:
    """The tile with the smallest estimate; arguments as `estimated_clocks`."""
    fits = [tile for tile in TILES if tile.cluster_size <= sms]
    return min(fits, key=lambda tile: estimated_clocks(tile, mode, a_format, rows, groups, n, k, sms))


def candidates(
    mode: str, a_format: str, rows: int, groups: int, n: int, k: int, sms: int
) -> tuple[TileConfig, ...]:
    """The tiles that are worth measuring, those with the smallest estimates first; arguments as `estimated_clocks`."""
    fits = [tile for tile in (*TILES, *VARIANTS) if tile.cluster_size <= sms]
    clocks = {tile: estimated_clocks(tile, mode, a_format, rows, groups, n, k, sms) for tile in fits}
    limit = WORTH_MEASURING * min(clocks.values())
    return tuple(sorted((tile for tile in fits if clocks[tile] <= limit), key=clocks.__getitem__))

"""What every warp role of the Hopper GEMM knows."""

from typing import NamedTuple

from cutlass import Int32

from mx_kernels.device.gemm_scheduler import TileOrder, Work
from mx_kernels.sm90.config import GemmKey


class Cta(NamedTuple):
    """Where a CTA stands in its cluster, and who receives its multicasts."""

    m: Int32
    n: Int32
    rank: Int32
    a_mask: Int32
    b_mask: Int32


class GemmRole:
    """Base of the roles; GroupedGemm sets the attributes."""

    key: GemmKey
    order: TileOrder
    out_type: type  # of D
    element: type  # of what the copy engine brings: BF16, or codes as bytes
    threads: int

    @property
    def a_slices(self) -> int:
        """Parts that A's tile is loaded in: as many as CTAs can have it in common."""
        return 2 if self.order.splits_tails else self.key.tile.cluster_n

    @property
    def b_slices(self) -> int:
        return self.key.tile.cluster_m

    def tile_of(self, work: Work, cta: Cta):
        """This CTA's tile of the group: (M tile, N tile)."""
        tile = self.key.tile
        m_tile, n_tile = work.m_tile * tile.cluster_m + cta.m, work.n_tile * tile.cluster_n + cta.n
        if self.order.splits_tails:
            return m_tile - work.split * cta.m, n_tile + work.split * (work.n_tile + cta.m)
        return m_tile, n_tile

    def sfa_place(self, work: Work, m_tile: Int32):
        """Where the scales of A's tile begin: (R tile, C tile, group)."""
        return work.unit + m_tile * self.key.sfa_tiles, Int32(0), Int32(0)

    def sfb_place(self, work: Work, n_tile: Int32):
        """Where the scales of B's tile begin: (R tile, C tile, group)."""
        return n_tile * self.key.sfb_tiles, Int32(0), work.group

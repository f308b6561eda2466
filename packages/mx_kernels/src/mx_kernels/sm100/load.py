"""The load warp: TMA copies of A, B and their scales into the ring of shared-memory stages."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Constexpr, Int32
from cutlass.cute.nvgpu import cpasync

from mx_kernels.device.gemm_scheduler import Work, next_work
from mx_kernels.device.gemm_tensors import ragged_rows
from mx_kernels.sm100.layouts import KernelLayouts


class Load(NamedTuple):
    """One operand as the load warp sees it: the copy atom and the tensor of TMA coordinates."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class LoadRole(KernelLayouts):
    """Mixin of GroupedGemm."""

    @cute.jit
    def load(self, ab_pipe, work_pipe, sWork, smem, mma, loads, cta):
        """Fill one stage per K tile of every tile of work: A, B and, for MX operands, their scales.

        loads: `Load` of A, B, SFA, SFB (the last two None without scales); smem: their tensors, stages last.
        """
        thr_mma = mma.get_slice(cta.v)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.key.memory.stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            m_tile = work.m_tile * self.key.tile.tiles_m + cta.m
            n_tile = work.n_tile * self.key.tile.cluster_n + cta.n
            parts = self.partition_loads(thr_mma, smem, loads, work, m_tile, n_tile, cta)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                ab_pipe.producer_acquire(state)
                self.copy_stage(parts, k_tile, state.index, ab_pipe.producer_get_barrier(state))
                state.advance()
            work, work_state = next_work(work_pipe, work_state, sWork)
        # A CTA must not leave while its peers still signal its barriers.
        ab_pipe.producer_tail(state)

    @cute.jit
    def partition_loads(self, thr_mma, smem, loads, work: Work, m_tile: Int32, n_tile: Int32, cta):
        """What one tile of work copies: (atom, source by K tile, target by stage, multicast mask) for every operand."""
        tile = self.key.tile
        (a, b, sfa, sfb), (sA, sB, sSFA, sSFB) = loads, smem
        gA = thr_mma.partition_A(self.a_tiles(a.tensor, work, m_tile))
        gB = thr_mma.partition_B(self.b_tiles(b.tensor, work, n_tile))
        parts = (
            self.partition_load(a.atom, cta.n, tile.cluster_n, sA, gA, cta.a_mask),
            self.partition_load(b.atom, cta.m, tile.tiles_m, sB, gB, cta.b_mask),
        )
        if cutlass.const_expr(self.key.scaled):
            gSFA = self.sfa_tiles(sfa.tensor, work, m_tile, cta)
            gSFB = self.sfb_tiles(sfb.tensor, work, n_tile)
            parts += (
                self.partition_load(sfa.atom, cta.n, tile.cluster_n, sSFA, gSFA, cta.a_mask),
                self.partition_load(sfb.atom, cta.x, tile.cluster_m, sSFB, gSFB, cta.sfb_mask),
            )
        return parts

    @cute.jit
    def copy_stage(self, parts, k_tile: Int32, stage: Int32, full):
        """Issue the copies of one K tile; their bytes are counted on barrier `full`."""
        for atom, source, target, mask in parts:
            cute.copy(atom, source[(None, k_tile)], target[(None, stage)], tma_bar_ptr=full, mcast_mask=mask)

    @cute.jit
    def partition_load(
        self, atom, coord: Int32, sharers: Constexpr[int], s: cute.Tensor, g: cute.Tensor, mask
    ):
        """This CTA's part of a tile that `sharers` CTAs share."""
        target, source = cpasync.tma_partition(
            atom,
            coord,
            cute.make_layout(sharers),
            cute.group_modes(s, 0, cute.rank(s) - 1),
            cute.group_modes(g, 0, cute.rank(g) - 1),
        )
        return atom, source, target, mask

    @cute.jit
    def a_tiles(self, mA: cute.Tensor, work: Work, m_tile: Int32) -> cute.Tensor:
        """The K tiles of A for one tile of work: (tile_m, tile_k, K tiles). A's rows are ragged in every mode."""
        tile = (self.key.tile.tile_m, self.key.tile_k)
        view = ragged_rows(mA, work.start, work.length, 1 if self.key.groups_along_k else 0)
        return cute.local_tile(view, tile, (m_tile, None))

    @cute.jit
    def b_tiles(self, mB: cute.Tensor, work: Work, n_tile: Int32) -> cute.Tensor:
        """The K tiles of B: (tile_n, tile_k, K tiles). Ragged along K in wgrad, else the group's weights."""
        tile = (self.key.tile.tile_n, self.key.tile_k)
        if cutlass.const_expr(self.key.groups_along_k):
            return cute.local_tile(ragged_rows(mB, work.start, work.length, 1), tile, (n_tile, None))
        return cute.local_tile(mB[(None, None, work.group)], tile, (n_tile, None))

    @cute.jit
    def sfa_tiles(self, mSFA: cute.Tensor, work: Work, m_tile: Int32, cta) -> cute.Tensor:
        """A's scale tiles for this CTA's 128 rows: (128 words, 1, 1, K tiles)."""
        row = m_tile * self.key.tile.pair + cta.v
        if cutlass.const_expr(self.key.groups_along_k):
            return self.scale_tiles(mSFA, row, work.unit, 0, 1)
        return self.scale_tiles(mSFA, work.unit + row, 0, 0, 1)

    @cute.jit
    def sfb_tiles(self, mSFB: cute.Tensor, work: Work, n_tile: Int32) -> cute.Tensor:
        """B's scale tiles for all columns of the tile: (128 words, sfb_tiles, 1, K tiles)."""
        row = n_tile * self.key.tile.tile_n // 128
        if cutlass.const_expr(self.key.groups_along_k):
            return self.scale_tiles(mSFB, row, work.unit, 0, self.key.memory.sfb_tiles)
        return self.scale_tiles(mSFB, row, 0, work.group, self.key.memory.sfb_tiles)

    @cute.jit
    def scale_tiles(self, mSF: cute.Tensor, row, column, group, rows: Constexpr[int]) -> cute.Tensor:
        """mSF: (128 words, row tiles, column tiles, groups); a scale tile is 128 words, a K tile one column of tiles."""
        view = cute.domain_offset((0, row, column), mSF[(None, None, None, group)])
        return cute.local_tile(view, (128, rows, 1), (0, 0, None))

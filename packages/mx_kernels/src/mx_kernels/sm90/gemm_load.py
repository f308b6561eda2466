"""The load warp: TMA copies of A and B into the ring of shared-memory stages."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Constexpr, Int32, Uint8
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

from mx_kernels.device.gemm_scheduler import Work, next_work
from mx_kernels.device.gemm_tensors import ragged_rows
from mx_kernels.sm90.config import SCALE_TILE, TILE_K
from mx_kernels.sm90.gemm_role import GemmRole


class Loads(NamedTuple):
    """One operand as the load warp sees it: the copy atom and the tensor of TMA coordinates."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class LoadRole(GemmRole):
    """Mixin of GroupedGemm."""

    @cute.jit
    def load(self, ab_pipe, work_pipe, sWork, smem, a: Loads, b: Loads, a_scale, b_scale, cta):
        """Fill one stage per K tile of every tile of work: A, B and, for MX operands, their scales.

        smem: (sA, sB, sSFA, sSFB) with the stages last; a_scale, b_scale: `scale_tiles`, or None.
        """
        sA, sB, sSFA, sSFB = smem
        tile = self.key.tile
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.key.stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            m_tile, n_tile = self.tile_of(work, cta)
            gA = self.a_tiles(a.tensor, work, m_tile)
            gB = self.b_tiles(b.tensor, work, n_tile)
            tAsA, tAgA = self.partition_load(a.atom, cta.n, tile.cluster_n, sA, gA)
            tBsB, tBgB = self.partition_load(b.atom, cta.m, tile.cluster_m, sB, gB)
            b_mask = cta.b_mask
            if cutlass.const_expr(self.order.splits_tails):
                # In a split tile every CTA has a B of its own and loads both halves of it.
                tBsB_peer, tBgB_peer = self.partition_load(b.atom, 1 - cta.m, tile.cluster_m, sB, gB)
                if work.split == 1:
                    b_mask = Int32(1) << cta.rank
            sfa_place, sfb_place = self.sfa_place(work, m_tile), self.sfb_place(work, n_tile)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                ab_pipe.producer_acquire(state)
                full = ab_pipe.producer_get_barrier(state)
                self.copy_tile(
                    a.atom, tAgA[(None, k_tile)], tAsA[(None, state.index)], full, cta.a_mask, tile.cluster_n
                )
                self.copy_tile(
                    b.atom, tBgB[(None, k_tile)], tBsB[(None, state.index)], full, b_mask, tile.cluster_m
                )
                if cutlass.const_expr(self.order.splits_tails):
                    if work.split == 1:
                        peer_half = tBsB_peer[(None, state.index)]
                        self.copy_tile(
                            b.atom, tBgB_peer[(None, k_tile)], peer_half, full, b_mask, tile.cluster_m
                        )
                if cutlass.const_expr(self.key.scaled):
                    column = k_tile // 2  # a tile of scales is 128 K positions wide and serves two K tiles
                    self.copy_scales(a_scale, sfa_place, column, sSFA[(None, None, state.index)], full)
                    self.copy_scales(b_scale, sfb_place, column, sSFB[(None, None, state.index)], full)
                state.advance()
            work, work_state = next_work(work_pipe, work_state, sWork)
        # A CTA must not leave while its peers still signal its barriers.
        ab_pipe.producer_tail(state)

    @cute.jit
    def copy_tile(
        self, atom, source: cute.Tensor, target: cute.Tensor, barrier, mask: Int32, sharers: Constexpr[int]
    ):
        if cutlass.const_expr(sharers > 1):
            cute.copy(atom, source, target, tma_bar_ptr=barrier, mcast_mask=mask)
        else:
            cute.copy(atom, source, target, tma_bar_ptr=barrier)

    @cute.jit
    def copy_scales(self, scales: cute.Tensor, place, column: Int32, target: cute.Tensor, barrier):
        """The tiles of scales of K position `column` to one stage. Rows past the last tile belong to no output; any
        tile will do.
        """
        atom = cute.make_copy_atom(cpasync.CopyBulkG2SOp(), Uint8, num_bits_per_copy=SCALE_TILE * 8)
        row, first_column, group = place
        last = cute.size(scales, mode=[1]) - 1
        for i in cutlass.range_constexpr(cute.size(target, mode=[1])):
            tile = scales[(None, cutlass.min(row + i, last), first_column + column, group)]
            with arch.elect_one():
                cute.copy(atom, tile, target[(None, i)], mbar_ptr=barrier)

    @cute.jit
    def partition_load(self, atom, coord: Int32, sharers: Constexpr[int], s: cute.Tensor, g: cute.Tensor):
        """This CTA's part of a tile shared by `sharers` CTAs: (smem (copy, stage), gmem (copy, K tile))."""
        return cpasync.tma_partition(
            atom, coord, cute.make_layout(sharers), cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
        )

    @cute.jit
    def a_tiles(self, mA: cute.Tensor, work: Work, m_tile: Int32) -> cute.Tensor:
        """The K tiles of A for one tile of work: (tile_m, TILE_K, K tiles). A's rows are ragged in every mode."""
        view = ragged_rows(mA, work.start, work.length, 1 if self.key.groups_along_k else 0)
        return cute.local_tile(view, (self.key.tile.tile_m, TILE_K), (m_tile, None))

    @cute.jit
    def b_tiles(self, mB: cute.Tensor, work: Work, n_tile: Int32) -> cute.Tensor:
        """The K tiles of B: (tile_n, TILE_K, K tiles). Ragged along K in wgrad, else the group's weights."""
        if cutlass.const_expr(self.key.groups_along_k):
            view = ragged_rows(mB, work.start, work.length, 1)
        else:
            view = mB[(None, None, work.group)]
        return cute.local_tile(view, (self.key.tile.tile_n, TILE_K), (n_tile, None))

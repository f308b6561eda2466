"""The load warp: TMA copies of A and B into the ring of shared-memory stages."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Constexpr, Int32, Uint8, select_
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync

from mx_kernels.device.gemm_scheduler import Work, next_work
from mx_kernels.device.gemm_tensors import ragged_rows
from mx_kernels.sm90.config import SCALE_TILE, TILE_K
from mx_kernels.sm90.gemm_role import Cta, GemmRole


class Loads(NamedTuple):
    """One operand as the load warp sees it: the copy atom and the tensor of TMA coordinates."""

    atom: cute.CopyAtom
    tensor: cute.Tensor


class Share(NamedTuple):
    """What of an operand's tile a CTA loads."""

    slot: Int32  # its slice
    mask: Int32  # of the CTAs that receive it
    whole: Boolean | None = None  # whether it loads its neighbour's slice too; None: never


class LoadRole(GemmRole):
    """Mixin of GroupedGemm."""

    @cute.jit
    def load(self, ab_pipe, work_pipe, sWork, smem, a: Loads, b: Loads, a_scale, b_scale, cta):
        """Fill one stage per K tile of every tile of work: A, B and, for MX operands, their scales.

        smem: (sA, sB, sSFA, sSFB) with the stages last; a_scale, b_scale: `scale_tiles`, or None.
        """
        sA, sB, sSFA, sSFB = smem
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.key.stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            m_tile, n_tile = self.tile_of(work, cta)
            share_a, share_b = self.shares(work, cta)
            a_parts = self.slices(a, share_a, sA, self.a_tiles(a.tensor, work, m_tile), self.a_slices)
            b_parts = self.slices(b, share_b, sB, self.b_tiles(b.tensor, work, n_tile), self.b_slices)
            sfa_place, sfb_place = self.sfa_place(work, m_tile), self.sfb_place(work, n_tile)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                ab_pipe.producer_acquire(state)
                full = ab_pipe.producer_get_barrier(state)
                self.copy_tile(a.atom, share_a, a_parts, k_tile, state.index, full, self.a_slices > 1)
                self.copy_tile(b.atom, share_b, b_parts, k_tile, state.index, full, self.b_slices > 1)
                if cutlass.const_expr(self.key.scaled):
                    column = k_tile // 2  # a tile of scales is 128 K positions wide and serves two K tiles
                    self.copy_scales(a_scale, sfa_place, column, sSFA[(None, None, state.index)], full)
                    self.copy_scales(b_scale, sfb_place, column, sSFB[(None, None, state.index)], full)
                state.advance()
            work, work_state = next_work(work_pipe, work_state, sWork)
        # A CTA must not leave while its peers still signal its barriers.
        ab_pipe.producer_tail(state)

    def shares(self, work: Work, cta: Cta):
        """Of A's and of B's tile, which slices this CTA loads and for whom.

        CTAs in a row of the cluster have A in common, those in a column B. Where tails are split, that is so for one
        tile and the other way round for the next: both operands then come in two slices, and a CTA loads the two of what
        it has alone.
        """
        if not self.order.splits_tails:
            return Share(cta.n, cta.a_mask), Share(cta.m, cta.b_mask)
        alone, both, split = Int32(1) << cta.rank, Int32(0b11), work.split == 1
        return (
            Share(cta.m, Int32(select_(split, both, alone)), work.split == 0),
            Share(cta.m, Int32(select_(split, alone, both)), split),
        )

    def slices(self, load: Loads, share: Share, s: cute.Tensor, g: cute.Tensor, count: int):
        """This CTA's slice of a tile as (smem (copy, stage), gmem (copy, K tile)), then its neighbour's if it may need it."""
        slots = [share.slot] if share.whole is None else [share.slot, 1 - share.slot]
        s, g = cute.group_modes(s, 0, 2), cute.group_modes(g, 0, 2)
        return [cpasync.tma_partition(load.atom, slot, cute.make_layout(count), s, g) for slot in slots]

    @cute.jit
    def copy_tile(
        self, atom, share: Share, parts, k_tile: Int32, stage: Int32, barrier, multicast: Constexpr[bool]
    ):
        """One K tile of an operand, as far as it is this CTA's to load."""
        options = {"tma_bar_ptr": barrier}
        if cutlass.const_expr(multicast):
            options["mcast_mask"] = share.mask
        own, *others = parts
        cute.copy(atom, own[1][(None, k_tile)], own[0][(None, stage)], **options)
        for other in others:
            if share.whole:
                cute.copy(atom, other[1][(None, k_tile)], other[0][(None, stage)], **options)

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

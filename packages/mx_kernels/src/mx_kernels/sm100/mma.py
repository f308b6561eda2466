"""The MMA warp: scales into tensor memory, then `tcgen05.mma` over the stages of the ring."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float8E8M0FNU, Int32
from cutlass.cute.nvgpu import tcgen05

from mx_kernels.device import tmem_fence
from mx_kernels.device.gemm_scheduler import next_work
from mx_kernels.sm100.layouts import KernelLayouts

SCALES_PER_COLUMN = 4  # bytes of one TMEM column: what its pointer counts in


class ScaleOperand(NamedTuple):
    """Scales of one operand."""

    operand: cute.Tensor  # in tensor memory, as the MMA reads them
    copy: cute.TiledCopy
    source: cute.Tensor  # descriptors of shared memory, stages last
    target: cute.Tensor


class MmaRole(KernelLayouts):
    """Mixin of GroupedGemm."""

    @cute.jit
    def multiply(self, ab_pipe, acc_pipe, work_pipe, sWork, smem, mma, tmem, cta):
        """Sum the K tiles of every tile of work into an accumulator. Only the leader of a CTA pair issues anything.

        smem: (sA, sB, sSFA, sSFB) as MMA operands, stages last; tmem: pointer to the allocated columns.
        """
        sA, sB, sSFA, sSFB = smem
        rA, rB = mma.make_fragment_A(sA), mma.make_fragment_B(sB)
        ab_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.memory.stages)
        acc_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Producer, self.key.memory.acc_stages
        )
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        sfa, sfb = self.scale_operands(mma, sSFA, sSFB, tmem)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            if cta.is_leader and work.k_tiles > 0:
                acc = self.accumulator(mma, tmem, self.acc_slot(acc_state, producer=True))
                n_tile = work.n_tile * self.key.tile.cluster_n + cta.n
                acc_pipe.producer_acquire(acc_state)
                tmem_fence.after_wait()
                mma.set(tcgen05.Field.ACCUMULATE, False)
                for _ in cutlass.range(work.k_tiles, unroll=1):
                    ab_pipe.consumer_wait(ab_state)
                    mma = self.multiply_stage(mma, acc, rA, rB, sfa, sfb, n_tile, ab_state.index)
                    ab_pipe.consumer_release(ab_state)
                    ab_state.advance()
                acc_pipe.producer_commit(acc_state)
                acc_state.advance()
            work, work_state = next_work(work_pipe, work_state, sWork)

    @cute.jit
    def multiply_stage(self, mma, acc, rA, rB, sfa, sfb, n_tile: Int32, stage: Int32):
        """One K tile; returns `mma`, set to accumulate. `tcgen05.cp` and `tcgen05.mma` run in the order of issue."""
        tSFB = self.copy_scales(sfa, sfb, n_tile, stage)
        for k in cutlass.range_constexpr(cute.size(rA, mode=[2])):
            a, b = rA[(None, None, k, stage)], rB[(None, None, k, stage)]
            if cutlass.const_expr(self.key.scaled):
                block = (None, None, k)
                cute.gemm(mma, acc, [a, sfa.operand[block]], [b, tSFB[block]], acc)
            else:
                cute.gemm(mma, acc, a, b, acc)
            mma.set(tcgen05.Field.ACCUMULATE, True)
        return mma

    @cute.jit
    def copy_scales(self, sfa, sfb, n_tile: Int32, stage: Int32):
        """One stage of scales into tensor memory. Returns SFB from the tile's first column on (None without scales)."""
        if cutlass.const_expr(not self.key.scaled):
            return None
        for scales in (sfa, sfb):
            cute.copy(scales.copy, scales.source[(None, None, None, None, stage)], scales.target)
        # A tile of 64 or 192 columns may begin in the middle of a scale tile: 32 rows to a TMEM column.
        skipped = (n_tile * self.key.tile.tile_n % 128) // 32
        return cute.make_tensor(sfb.operand.iterator + skipped * SCALES_PER_COLUMN, sfb.operand.layout)

    @cute.jit
    def accumulator(self, mma, tmem, slot: Int32) -> cute.Tensor:
        """Accumulator `slot` (0 or 1) as the MMA's operand D: (MMA, 1, 1)."""
        shape = mma.partition_shape_C(self.mma_tile[:2])
        return cute.make_tensor(tmem + slot * self.key.memory.acc_stride, mma.make_fragment_C(shape).layout)

    @cute.jit
    def scale_operands(self, mma, sSFA, sSFB, tmem):
        """SFA and SFB in tensor memory and their copies; None for operands without scales."""
        if cutlass.const_expr(not self.key.scaled):
            return None, None
        sfa_layout, sfb_layout = self.scale_tmem_layouts(mma)
        return (
            self.scale_operand(sSFA, tmem + self.key.memory.sfa_column, sfa_layout),
            self.scale_operand(sSFB, tmem + self.key.memory.sfb_column, sfb_layout),
        )

    @cute.jit
    def scale_operand(self, sSF: cute.Tensor, tmem, layout) -> ScaleOperand:
        """Scales in tensor memory from column `tmem` on, and `tcgen05.cp` of a stage into them."""
        atom = cute.make_copy_atom(tcgen05.Cp4x32x128bOp(self.cta_group), Float8E8M0FNU)
        operand = cute.make_tensor(cute.recast_ptr(tmem, dtype=Float8E8M0FNU), layout)
        target = cute.filter_zeros(operand)
        copy = tcgen05.make_s2t_copy(atom, target)
        thread = copy.get_slice(0)
        source = tcgen05.get_s2t_smem_desc_tensor(copy, thread.partition_S(cute.filter_zeros(sSF)))
        return ScaleOperand(operand, copy, source, thread.partition_D(target))

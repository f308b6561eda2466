"""The consumer warpgroups: wgmma over the stages of the ring, each for its own half of the tile's rows."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from mx_kernels.device.gemm_scheduler import next_work
from mx_kernels.sm90.config import CONSUMERS, STORE_BUFFER_ROWS, TILE_K
from mx_kernels.sm90.gemm_epilogue import EpilogueRole
from mx_kernels.sm90.gemm_operands import OperandRole


class MmaRole(OperandRole, EpilogueRole):
    """Mixin of GroupedGemm."""

    @cute.jit
    def consume(self, ab_pipe, work_pipe, sWork, sA, sB, sD, mma, store, mD, cta):
        """BF16: sum and store every tile of work."""
        group = self.consumer_group()
        rows = self.key.rows_per_consumer
        thread = mma.get_slice(arch.thread_idx()[0] % 128)
        tCrA = mma.make_fragment_A(thread.partition_A(self.own_rows(sA, group)))
        tCrB = mma.make_fragment_B(thread.partition_B(sB))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, self.key.tile.tile_n)), Float32)
        sSlabs = cute.local_tile(sD, (STORE_BUFFER_ROWS, self.key.store_n), (group, 0))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            acc.fill(0.0)
            state = self.multiply(ab_pipe, state, mma, acc, tCrA, tCrB, work.k_tiles)
            self.store_tile(acc, work, group, sSlabs, store, mD, cta)
            work, work_state = next_work(work_pipe, work_state, sWork)
        arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(self, ab_pipe, state, mma, acc, tCrA, tCrB, k_tiles: Int32):
        """Acc += A · Bᵀ over `k_tiles` stages. A stage is handed back one K tile late, when its wgmmas are done."""
        mma.set(warpgroup.Field.ACCUMULATE, True)
        done = state.clone()
        for k_tile in cutlass.range(k_tiles, unroll=1):
            ab_pipe.consumer_wait(state)
            warpgroup.fence()
            for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(
                    mma, acc, tCrA[(None, None, k, state.index)], tCrB[(None, None, k, state.index)], acc
                )
            warpgroup.commit_group()
            state.advance()
            if k_tile > 0:
                warpgroup.wait_group(1)
                ab_pipe.consumer_release(done)
                done.advance()
        warpgroup.wait_group(0)
        if k_tiles > 0:
            ab_pipe.consumer_release(done)
        return state

    @cute.jit
    def consume_scaled(self, ab_pipe, b_pipe, work_pipe, sWork, sCodes, sScale, sB, sD, mma, store, mD, cta):
        """MXFP8: the same, with A's codes dequantised into registers here and B's by the dequantising warpgroup."""
        group = self.consumer_group()
        rows = self.key.rows_per_consumer
        thread = mma.get_slice(arch.thread_idx()[0] % 128)
        tCrA = mma.make_fragment_A(mma.partition_shape_A((rows, TILE_K)))
        tCrB = mma.make_fragment_B(thread.partition_B(sB))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, self.key.tile.tile_n)), Float32)
        sSlabs = cute.local_tile(sD, (STORE_BUFFER_ROWS, self.key.store_n), (group, 0))
        sOwn = self.own_rows(sCodes, group)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.stages)
        b_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.b_stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        while work.k_tiles >= 0:
            acc.fill(0.0)
            done = b_state.clone()
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                ab_pipe.consumer_wait(state)
                codes = self.a_codes(sOwn[(None, None, state.index)])
                scales = self.a_scales(sScale[(None, None, state.index)], group * rows, k_tile % 2 * 2)
                # ptxas serialises wgmmas if A's registers are written while any are in flight, whichever they read. So
                # this warpgroup converts while the other one's wgmmas run.
                warpgroup.wait_group(0)
                if k_tile > 0:
                    self.release(b_pipe, done)
                    done.advance()
                self.a_fragment(codes, scales, cute.recast_tensor(tCrA, Uint32))
                arch.sync_warp()
                ab_pipe.consumer_release(state)
                b_pipe.consumer_wait(b_state)
                warpgroup.fence()
                for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                    cute.gemm(mma, acc, tCrA[(None, None, k)], tCrB[(None, None, k, b_state.index)], acc)
                warpgroup.commit_group()
                state.advance()
                b_state.advance()
            warpgroup.wait_group(0)
            if work.k_tiles > 0:
                self.release(b_pipe, done)
            self.store_tile(acc, work, group, sSlabs, store, mD, cta)
            work, work_state = next_work(work_pipe, work_state, sWork)
        arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def release(self, pipe, state):
        """One arrival for each warp."""
        with arch.elect_one():
            pipe.consumer_release(state)

    @cute.jit
    def consumer_group(self) -> Int32:
        """Which of the consumer warpgroups this is; they come last in the CTA."""
        return arch.make_warp_uniform(arch.warp_idx()) // 4 - (self.threads // 128 - CONSUMERS)

    @cute.jit
    def own_rows(self, s: cute.Tensor, group: Int32) -> cute.Tensor:
        """This warpgroup's rows of A: (rows, TILE_K, stages)."""
        return cute.local_tile(s, (self.key.rows_per_consumer, TILE_K, self.key.stages), (group, 0, 0))

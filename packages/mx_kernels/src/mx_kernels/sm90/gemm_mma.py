"""The consumer warpgroups: wgmma over the stages of the ring, each for its own half of the tile's rows."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32
from cutlass.cute import arch
from cutlass.cute.nvgpu import warpgroup

from mx_kernels.device.gemm_scheduler import Extent, next_work


class MmaRole:
    """Mixin of GroupedGemm."""

    @cute.jit
    def consume(self, ab_pipe, work_pipe, sWork, sA, sB, sD, mma, store, mD, extent: Extent, cta):
        """Sum and store every tile of work."""
        group = arch.make_warp_uniform(arch.warp_idx()) // 4 - 1
        thread = mma.get_slice(arch.thread_idx()[0] % 128)
        rows = self.key.rows_per_consumer
        sA_half = cute.local_tile(sA, (rows, sA.shape[1], sA.shape[2]), (group, 0, 0))
        tCrA = mma.make_fragment_A(thread.partition_A(sA_half))
        tCrB = mma.make_fragment_B(thread.partition_B(sB))
        acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, self.key.tile.tile_n)), Float32)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            acc.fill(0.0)
            state = self.multiply(ab_pipe, state, mma, acc, tCrA, tCrB, work.k_tiles)
            self.store_tile(acc, work, group, sD, store, mD, extent, cta)
            work, work_state = next_work(work_pipe, work_state, sWork)
        arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply(self, ab_pipe, state, mma, acc, tCrA, tCrB, k_tiles):
        """acc += A · Bᵀ over `k_tiles` stages. A stage is handed back one K tile late, when its wgmmas are done."""
        mma.set(warpgroup.Field.ACCUMULATE, True)
        done = state.clone()
        for k_tile in cutlass.range(k_tiles, unroll=1):
            ab_pipe.consumer_wait(state)
            warpgroup.fence()
            for k in cutlass.range_constexpr(cute.size(tCrA, mode=[2])):
                cute.gemm(mma, acc, tCrA[(None, None, k, state.index)], tCrB[(None, None, k, state.index)], acc)
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

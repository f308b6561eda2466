"""The epilogue warps: accumulator → registers → shared memory → TMA store, each warp for its own 32 rows."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Float32, Int32
from cutlass.cute import arch
from cutlass.cute.nvgpu import cpasync, tcgen05

from mx_kernels.device import tmem_fence
from mx_kernels.device.gemm_scheduler import UNIT, Extent, Work, next_work
from mx_kernels.device.gemm_tensors import ragged_rows
from mx_kernels.sm100.config import STORE_STAGES
from mx_kernels.sm100.layouts import WARP_ROWS, KernelLayouts


class EpilogueRole(KernelLayouts):
    """Mixin of GroupedGemm.

    A warp needs no other warp: it drains its 32 lanes, writes them to its own part of shared memory and issues its own
    TMA store. The descriptor of D clips rows past the group's end and columns past N.
    """

    @cute.jit
    def store(
        self, acc_pipe, work_pipe, sWork, sD: cute.Tensor, tmem, store_d, mD: cute.Tensor, extent: Extent, cta
    ):
        """Drain and store every tile of work. sD: (32, store_n, warp and buffer), swizzled."""
        warp = arch.make_warp_uniform(arch.warp_idx())
        columns = self.key.store_n
        steps = self.key.tile.tile_n // columns
        acc_state = pipeline.make_pipeline_state(
            pipeline.PipelineUserType.Consumer, self.key.memory.acc_stages
        )
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        load = tcgen05.make_tmem_copy(
            cute.make_copy_atom(tcgen05.Ld32x32bOp(tcgen05.Repetition(columns)), Float32),
            self.subtile(tmem, 0, 0),
        )
        thread = load.get_slice(arch.thread_idx()[0])
        rAcc = cute.make_rmem_tensor(
            thread.partition_D(cute.make_identity_tensor((128, columns))).shape, Float32
        )
        buffer = Int32(0)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            slot = self.acc_slot(acc_state, producer=False)
            row = (work.m_tile * self.key.tile.cluster_m + cta.x) * 128 + warp * WARP_ROWS
            n_tile = work.n_tile * self.key.tile.cluster_n + cta.n
            gD = self.d_subtiles(mD, work, extent, row, n_tile * self.key.tile.tile_n)
            if work.k_tiles > 0:
                acc_pipe.consumer_wait(acc_state)
                tmem_fence.after_wait()
            for step in cutlass.range_constexpr(steps):
                # Overlapping accumulators: the columns under the other one first, so that its MMAs can begin.
                index = Int32(step)
                if cutlass.const_expr(self.key.memory.acc_shared):
                    index = step if slot == 1 else steps - 1 - step
                if work.k_tiles > 0:
                    cute.copy(load, thread.partition_S(self.subtile(tmem, slot, index)), rAcc)
                    arch.fence_view_async_tmem_load()
                    if cutlass.const_expr(step == (0 if self.key.memory.acc_shared else steps - 1)):
                        tmem_fence.before_arrive()
                        with arch.elect_one():
                            acc_pipe.consumer_release(acc_state)
                        acc_state.advance()
                if row + arch.lane_idx() >= self.live_rows(work):
                    rAcc.fill(0.0)
                self.store_subtile(
                    rAcc, sD[(None, None, warp * STORE_STAGES + buffer)], store_d, gD[(None, None, index)]
                )
                buffer = (buffer + 1) % STORE_STAGES
            work, work_state = next_work(work_pipe, work_state, sWork)
        arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def store_subtile(self, rAcc: cute.Tensor, sD: cute.Tensor, store_d, gD: cute.Tensor):
        """Registers → one buffer of this warp → global memory. Leaves the store in flight."""
        # The buffer is free once no more than STORE_STAGES - 1 stores are still reading theirs.
        arch.cp_async_bulk_wait_group(STORE_STAGES - 1, read=True)
        arch.sync_warp()
        row = cute.make_rmem_tensor((self.key.store_n,), self.out_type)
        row.store(rAcc.load().to(self.out_type).reshape((self.key.store_n,)))
        cute.autovec_copy(row, sD[(arch.lane_idx(), None)])
        arch.fence_proxy("async.shared", space="cta")
        arch.sync_warp()
        source, target = cpasync.tma_partition(
            store_d, 0, cute.make_layout(1), cute.group_modes(sD, 0, 2), cute.group_modes(gD, 0, 2)
        )
        cute.copy(store_d, source, target)
        arch.cp_async_bulk_commit_group()

    @cute.jit
    def subtile(self, tmem, slot, index) -> cute.Tensor:
        """128 lanes x store_n columns of accumulator `slot`."""
        column = slot * self.key.memory.acc_stride + index * self.key.store_n
        return cute.make_tensor(tmem + column, cute.make_layout((128, self.key.store_n), stride=(1 << 16, 1)))

    @cute.jit
    def live_rows(self, work: Work) -> Int32:
        """Rows of the group that are not zero by definition."""
        rows = work.length
        if cutlass.const_expr(self.key.groups_along_k):
            rows = Int32(1 << 30)
        if work.k_tiles == 0:
            rows = Int32(0)
        return rows

    @cute.jit
    def d_subtiles(
        self, mD: cute.Tensor, work: Work, extent: Extent, row: Int32, column: Int32
    ) -> cute.Tensor:
        """This warp's rows of the output tile: (32, store_n, subtiles)."""
        if cutlass.const_expr(self.key.groups_along_k):
            view = mD[(None, None, work.group)]
        else:
            rows = work.length
            if cutlass.const_expr(self.key.aligned):
                # The padding of a 128-row unit is written, as zeros.
                rows = cutlass.min(cute.ceil_div(rows, UNIT) * UNIT, extent.rows - work.start)
            view = ragged_rows(mD, work.start, rows, 0)
        return cute.local_tile(
            cute.domain_offset((row, column), view), (WARP_ROWS, self.key.store_n), (0, None)
        )

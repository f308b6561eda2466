"""Registers → shared memory → TMA store, slab by slab, each consumer warpgroup for its own rows."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Constexpr, Float32, Int32
from cutlass.cute import arch
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from mx_kernels.device.gemm_scheduler import UNIT, Extent, Work
from mx_kernels.sm90.config import STORE_ROWS, STORE_STAGES

K_MAJOR = OperandMajorMode.K
STORE_BARRIER = 1  # named barriers 1 and 2: one for each consumer warpgroup


class EpilogueRole:
    """Mixin of GroupedGemm.

    A slab is the 64 rows of one wgmma by one swizzle row of columns. The ragged descriptor drops what lies past the
    group's end, the tensor's own edge what lies past N.
    """

    @cute.jit
    def store_tile(self, acc, work: Work, group: Int32, sD, store, mD, extent: Extent, cta):
        """Store one warpgroup's accumulators. Leaves the last stores in flight."""
        columns = self.key.store_n
        blocks, slabs = self.key.rows_per_consumer // STORE_ROWS, self.key.tile.tile_n // columns
        n_tile = work.n_tile * self.key.tile.cluster_n + cta.n
        m_tile = work.m_tile * self.key.tile.cluster_m + cta.m
        gD = self.d_tiles(mD, work, extent)
        values = 2 * 2 * (columns // 8)  # per thread and slab
        for block in cutlass.range_constexpr(blocks):
            for slab in cutlass.range_constexpr(slabs):
                step = block * slabs + slab
                sSlab = sD[(None, None, group * STORE_STAGES + step % STORE_STAGES)]
                first = step * values
                row = (m_tile * 2 + group) * blocks + block
                self.store_slab(acc, first, group, sSlab, store, gD[(None, None, row, n_tile * slabs + slab)])

    @cute.jit
    def store_slab(self, acc, first: Constexpr[int], group: Int32, sSlab, store, gSlab):
        """`acc[first:]` → one buffer → global memory."""
        columns = self.key.store_n
        barrier = pipeline.NamedBarrier(barrier_id=STORE_BARRIER + group, num_threads=128)
        leader = arch.make_warp_uniform(arch.warp_idx()) % 4 == 0
        # The buffer is free once at most STORE_STAGES - 1 later stores are still reading theirs.
        if leader:
            arch.cp_async_bulk_wait_group(STORE_STAGES - 1, read=True)
        barrier.arrive_and_wait()
        values = cute.make_tensor(acc.iterator + first, cute.make_layout(2 * 2 * (columns // 8)))
        rounded = cute.make_rmem_tensor(values.shape, self.out_type)
        rounded.store(values.load().to(self.out_type))
        copy = self.slab_copy()
        target = copy.get_slice(arch.thread_idx()[0] % 128).partition_D(sSlab)
        cute.copy(copy, cute.make_tensor(rounded.iterator, cute.make_layout(target.shape)), target)
        arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        if leader:
            s, g = cpasync.tma_partition(
                store, 0, cute.make_layout(1), cute.group_modes(sSlab, 0, 2), cute.group_modes(gSlab, 0, 2)
            )
            cute.copy(store, s, g)
            arch.cp_async_bulk_commit_group()

    def slab_copy(self) -> cute.TiledCopy:
        """Accumulators of a 64-row slab, as one wgmma leaves them, to shared memory."""
        op = warpgroup.MmaF16BF16Op(
            BFloat16, Float32, (STORE_ROWS, self.key.store_n, 16), warpgroup.OperandSource.SMEM, K_MAJOR, K_MAJOR
        )
        if self.out_type is BFloat16:
            atom = cute.make_copy_atom(StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16)
        else:
            atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
        return cute.make_tiled_copy_C(atom, cute.make_tiled_mma(cute.make_mma_atom(op)))

    @cute.jit
    def d_tiles(self, mD: cute.Tensor, work: Work, extent: Extent) -> cute.Tensor:
        """The group's slabs: (64, columns, slabs along m, slabs along n). ALIGNED groups are written to whole units."""
        if cutlass.const_expr(self.key.groups_along_k):
            view = mD[(None, None, work.group)]
        else:
            length = work.length
            if cutlass.const_expr(self.order.aligned):
                length = cute.ceil_div(length, UNIT) * UNIT
            view = cute.domain_offset((extent.rows - length, 0), mD[(None, None, work.start + length)])
        return cute.local_tile(view, (STORE_ROWS, self.key.store_n), (None, None))

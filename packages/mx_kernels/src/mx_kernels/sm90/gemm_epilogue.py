"""Registers → shared memory → TMA store, slab by slab, each consumer warpgroup for its own rows."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Constexpr, Float32, Int32
from cutlass.cute import arch
from cutlass.cute.nvgpu import CopyUniversalOp, OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warp import StMatrix8x8x16bOp

from mx_kernels.device.gemm_scheduler import UNIT, Work
from mx_kernels.device.gemm_tensors import ragged_rows
from mx_kernels.sm90.config import MMA_ROWS
from mx_kernels.sm90.gemm_role import GemmRole

K_MAJOR = OperandMajorMode.K
STORE_BARRIER = 1  # named barriers 1 and 2: one for each consumer warpgroup


class EpilogueRole(GemmRole):
    """Mixin of GroupedGemm.

    A slab is the 64 rows of one wgmma by one swizzle row of columns. The ragged descriptor drops what lies past the
    group's end, the tensor's own edge what lies past N.
    """

    @cute.jit
    def store_tile(self, acc, work: Work, group: Int32, sD, store, mD, cta):
        """Store one warpgroup's accumulators. Leaves the last stores in flight.

        sD: (128, columns) of this warpgroup.
        """
        key = self.key
        slabs_n = key.tile.tile_n // key.store_n
        slabs_m = key.rows_per_consumer // MMA_ROWS
        m_tile, n_tile = self.tile_of(work, cta)
        gD = self.d_tiles(mD, work)
        columns = self.columns_inside(mD, work, cta)
        for m in cutlass.range_constexpr(slabs_m):
            for n in cutlass.range_constexpr(slabs_n):
                slab = m * slabs_n + n
                buffer = slab % key.store_stages
                # Stores that may still read: not the last, from this buffer, of a tile with an odd number of slabs.
                in_flight = key.store_stages - 1
                if cutlass.const_expr(slab == 0 and slabs_m * slabs_n % key.store_stages):
                    in_flight = 0
                sSlab = cute.local_tile(sD, (MMA_ROWS, key.store_n), (buffer, 0))
                row = (m_tile * 2 + group) * slabs_m + m
                gSlab = gD[(None, None, row, n_tile * slabs_n + n)]
                # What is left out is a part or the whole of the tile, in which every buffer has as many turns.
                if columns > n * key.store_n // self.part_n * self.part_n:
                    self.store_slab(acc, m, n, group, sSlab, store, gSlab, in_flight)

    @cute.jit
    def store_slab(
        self, acc, m: Constexpr[int], n: Constexpr[int], group: Int32, sSlab, store, gSlab, in_flight
    ):
        """Slab (m, n) of the accumulators → one buffer → global memory, once at most `in_flight` stores still read."""
        key = self.key
        barrier = pipeline.NamedBarrier(barrier_id=STORE_BARRIER + group, num_threads=128)
        leader = arch.make_warp_uniform(arch.warp_idx()) % 4 == 0
        if leader:
            arch.cp_async_bulk_wait_group(in_flight, read=True)
        barrier.arrive_and_wait()
        copy = self.slab_copy()
        thread = copy.get_slice(arch.thread_idx()[0] % 128)
        values = 2 * 2 * (key.store_n // 8)  # of a thread
        first = m * (key.tile.tile_n // 2) + n * values
        source = cute.make_tensor(acc.iterator + first, cute.make_layout(values))
        rounded = cute.make_rmem_tensor(source.shape, self.out_type)
        rounded.store(source.load().to(self.out_type))
        target = thread.partition_D(sSlab)
        cute.copy(copy, cute.make_tensor(rounded.iterator, cute.make_layout(target.shape)), target)
        arch.fence_proxy("async.shared", space="cta")
        barrier.arrive_and_wait()
        if leader:
            s, g = cpasync.tma_partition(
                store, 0, cute.make_layout(1), cute.group_modes(sSlab, 0, 2), cute.group_modes(gSlab, 0, 2)
            )
            cute.copy(store, s, g)
            arch.cp_async_bulk_commit_group()

    @property
    def part_n(self) -> int:
        """Columns that are multiplied and stored or, where all of them lie past N, are not: half of the widest tile."""
        tile_n = self.key.tile.tile_n
        return tile_n // 2 if tile_n == 256 else tile_n

    @cute.jit
    def columns_inside(self, mD: cute.Tensor, work: Work, cta) -> Int32:
        """How many of N's columns are left from the first of this CTA's tile on: tile_n or more, fewer, or none (<= 0)."""
        _, n_tile = self.tile_of(work, cta)
        return cute.size(mD, mode=[1]) - n_tile * self.key.tile.tile_n

    def slab_copy(self) -> cute.TiledCopy:
        """The accumulators of 64 rows, as one wgmma leaves them, to shared memory."""
        op = warpgroup.MmaF16BF16Op(
            BFloat16,
            Float32,
            (MMA_ROWS, self.key.store_n, 16),
            warpgroup.OperandSource.SMEM,
            K_MAJOR,
            K_MAJOR,
        )
        if self.out_type is BFloat16:
            atom = cute.make_copy_atom(StMatrix8x8x16bOp(transpose=False, num_matrices=4), BFloat16)
        else:
            atom = cute.make_copy_atom(CopyUniversalOp(), Float32, num_bits_per_copy=64)
        return cute.make_tiled_copy_C(atom, cute.make_tiled_mma(cute.make_mma_atom(op)))

    @cute.jit
    def d_tiles(self, mD: cute.Tensor, work: Work) -> cute.Tensor:
        """The group's slabs: (rows, columns, slabs along m, slabs along n). ALIGNED groups are written to whole units."""
        if cutlass.const_expr(self.key.groups_along_k):
            view = mD[(None, None, work.group)]
        else:
            length = work.length
            if cutlass.const_expr(self.order.aligned):
                length = cute.ceil_div(length, UNIT) * UNIT
            view = ragged_rows(mD, work.start, length, 0)
        return cute.local_tile(view, (MMA_ROWS, self.key.store_n), (None, None))

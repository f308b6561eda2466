"""The consumer warpgroups: wgmma over the stages of the ring, each for its own half of the tile's rows."""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Boolean, Constexpr, Float16, Float32, Int32, Uint32
from cutlass.cute import arch
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from mx_kernels.device.gemm_scheduler import Work, next_work
from mx_kernels.device.wgmma_dequantize import f16_exponent
from mx_kernels.sm90.config import CONSUMERS, MMA_ROWS, STORE_BUFFER_ROWS, TILE_K
from mx_kernels.sm90.gemm_epilogue import EpilogueRole
from mx_kernels.sm90.gemm_operands import OperandRole
from mx_kernels.sm90.gemm_scale_range import next_tops

STEPS = TILE_K // 16  # of a K tile, one wgmma each for 64 rows
MAX_POWER = 126  # 2^±MAX_POWER are normal FP32 numbers


class MmaRole(OperandRole, EpilogueRole):
    """Mixin of GroupedGemm."""

    @cute.jit
    def consume(self, ab_pipe, work_pipe, sWork, sA, sB, sD, mma, store, mD, cta):
        """BF16: sum and store every tile of work. One with columns in its first part alone takes narrower wgmmas."""
        group = self.consumer_group()
        rows, tile_n, part_n = self.key.rows_per_consumer, self.key.tile.tile_n, self.part_n
        sA = self.own_rows(sA, group)
        acc = cute.make_rmem_tensor(mma.partition_shape_C((rows, tile_n)), Float32)
        whole = self.product(mma, acc, sA, sB)
        part = whole
        if cutlass.const_expr(part_n < tile_n):
            part_mma = self.tiled_mma(BFloat16, part_n)
            # A thread holds the same two columns of every eight, so the first part is the first of its registers.
            part_shape = part_mma.partition_shape_C((rows, part_n))
            part_acc = cute.make_tensor(acc.iterator, cute.make_layout(part_shape, stride=acc.stride))
            part_sB = cute.local_tile(sB, (part_n, TILE_K, self.key.stages), (0, 0, 0))
            part = self.product(part_mma, part_acc, sA, part_sB)
        sSlabs = cute.local_tile(sD, (STORE_BUFFER_ROWS, self.key.store_n), (group, 0))
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            acc.fill(0.0)
            busy = self.has_rows(work, group, cta)
            columns = self.columns_inside(mD, work, cta)
            if cutlass.const_expr(part_n < tile_n):
                # Two loops: with a choice inside one, every K tile would pay for it.
                if columns > part_n:
                    state = self.multiply(ab_pipe, state, whole, work.k_tiles, busy)
                else:
                    busy = busy & self.has_columns(columns)
                    state = self.multiply(ab_pipe, state, part, work.k_tiles, busy)
            else:
                busy = busy & self.has_columns(columns)
                state = self.multiply(ab_pipe, state, whole, work.k_tiles, busy)
            self.store_tile(acc, work, group, sSlabs, store, mD, cta)
            work, work_state = next_work(work_pipe, work_state, sWork)
        arch.cp_async_bulk_wait_group(0, read=True)

    def tiled_mma(self, element: type, columns: int) -> cute.TiledMma:
        """One warpgroup's instruction: 64 rows by `columns`."""
        major = {True: OperandMajorMode.K, False: OperandMajorMode.MN}
        op = warpgroup.MmaF16BF16Op(
            element,
            Float32,
            (MMA_ROWS, columns, 16),
            warpgroup.OperandSource.RMEM if self.key.scaled else warpgroup.OperandSource.SMEM,
            major[self.key.a_k_major],
            major[self.key.b_k_major],
        )
        return cute.make_tiled_mma(cute.make_mma_atom(op))

    @cute.jit
    def product(self, mma, acc, sA, sB):
        """What `multiply` takes: (MMA, accumulators, fragments of A and B)."""
        thread = mma.get_slice(arch.thread_idx()[0] % 128)
        mma.set(warpgroup.Field.ACCUMULATE, True)
        tCrA = mma.make_fragment_A(thread.partition_A(sA))
        return mma, acc, tCrA, mma.make_fragment_B(thread.partition_B(sB))

    @cute.jit
    def multiply(self, ab_pipe, state, product, k_tiles: Int32, busy):
        """Acc += A · Bᵀ over `k_tiles` stages, if `busy`. A stage is handed back a K tile late: its wgmmas are then done."""
        mma, acc, tCrA, tCrB = product
        done = state.clone()
        for k_tile in cutlass.range(k_tiles, unroll=1):
            ab_pipe.consumer_wait(state)
            if busy:
                stage = (None, None, None, state.index)
                self.issue(mma, acc, tCrA[stage], tCrB[stage], range(STEPS))
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
    def consume_scaled(self, ab_pipe, b_pipe, work, tops, smem, half, full, store, mD, cta):
        """MXFP8: the same, with A's codes dequantised into registers here and B's by the dequantising warpgroup.

        work, tops: (pipe, smem). smem: (codes of A, scales, slabs). half, full: (MMA, dequantised B) in F16 and BF16.
        """
        (work_pipe, sWork), (top_pipe, sTop) = work, tops
        sCodes, sScale, sD = smem
        group = self.consumer_group()
        acc = cute.make_rmem_tensor(
            full[0].partition_shape_C((self.key.rows_per_consumer, self.key.tile.tile_n)), Float32
        )
        sSlabs = cute.local_tile(sD, (STORE_BUFFER_ROWS, self.key.store_n), (group, 0))
        a = (self.own_rows(sCodes, group), sScale)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.stages)
        b_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.b_stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        top_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, top_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        half[0].set(warpgroup.Field.ACCUMULATE, True)
        full[0].set(warpgroup.Field.ACCUMULATE, True)
        while work.k_tiles >= 0:
            top, top_state = next_tops(top_pipe, top_state, sTop)
            acc.fill(0.0)
            pipes = (ab_pipe, state, b_pipe, b_state)
            busy = self.has_rows(work, group, cta)
            state, b_state = self.multiply_scaled(pipes, half, full, acc, a, work.k_tiles, top, busy)
            if top.near:
                self.scale_sums(acc, top)
            self.store_tile(acc, work, group, sSlabs, store, mD, cta)
            work, work_state = next_work(work_pipe, work_state, sWork)
        arch.cp_async_bulk_wait_group(0, read=True)

    @cute.jit
    def multiply_scaled(self, pipes, half, full, acc, a, k_tiles: Int32, top, busy):
        """Acc += A · Bᵀ over `k_tiles` stages, if `busy`; in F16 where the scales are near, else in BF16.

        Returns the states of both rings. One loop for both types: with two, ptxas runs out of registers.
        """
        ab_pipe, state, b_pipe, b_state = pipes
        sCodes, sScale = a
        (half_mma, sB_half), (mma, sB) = half, full
        rows = self.key.rows_per_consumer
        thread = mma.get_slice(arch.thread_idx()[0] % 128)
        tCrA = mma.make_fragment_A(mma.partition_shape_A((rows, TILE_K)))
        tCrA_half = cute.make_tensor(cute.recast_ptr(tCrA.iterator, dtype=Float16), tCrA.layout)
        tCrA_words = cute.recast_tensor(tCrA, Uint32)
        tCrB = mma.make_fragment_B(thread.partition_B(sB))
        tCrB_half = half_mma.make_fragment_B(thread.partition_B(sB_half))
        first_row = self.consumer_group() * rows
        done = b_state.clone()
        for k_tile in cutlass.range(k_tiles, unroll=1):
            ab_pipe.consumer_wait(state)
            loaded = (
                self.a_codes(sCodes[(None, None, state.index)]),
                self.a_scales(sScale[(None, None, state.index)], first_row, k_tile % 2 * 2),
            )
            arch.sync_warp()
            ab_pipe.consumer_release(state)
            b_pipe.consumer_wait(b_state)
            place = (None, None, None, b_state.index)
            if busy:
                if top.near:
                    self.multiply_tile(half_mma, acc, tCrA_half, tCrB_half[place], tCrA_words, top.a, loaded)
                else:
                    self.multiply_tile(mma, acc, tCrA, tCrB[place], tCrA_words, top.a, loaded)
            if k_tile > 0:
                self.release(b_pipe, done)
                done.advance()
            state.advance()
            b_state.advance()
        warpgroup.wait_group(0)
        if k_tiles > 0:
            self.release(b_pipe, done)
        return state, b_state

    @cute.jit
    def multiply_tile(self, mma, acc, tCrA, tCrB, tCrA_words, top: Int32, loaded):
        """One K tile in two halves, each converted while wgmmas of the half before run.

        ptxas lets them run on as long as nothing but a wait stands between a conversion and its wgmmas: no branch, no
        other loads.
        """
        for half in cutlass.range_constexpr(2):
            steps = range(half * STEPS // 2, (half + 1) * STEPS // 2)
            warpgroup.wait_group(1)  # what reads this half's registers is done; the half before may run
            self.a_fragment(loaded, tCrA_words, top, mma.op.a_dtype, steps)
            self.issue(mma, acc, tCrA, tCrB, steps)

    @cute.jit
    def has_rows(self, work: Work, group: Int32, cta):
        """Whether the group reaches this warpgroup's rows of the tile; else its sums are the zeros they begin as."""
        if cutlass.const_expr(self.key.groups_along_k):
            return Boolean(True)
        m_tile, _ = self.tile_of(work, cta)
        return m_tile * self.key.tile.tile_m + group * self.key.rows_per_consumer < work.length

    @cute.jit
    def has_columns(self, columns: Int32):
        """Whether the tile begins inside N, as every tile does of a CTA that has no neighbour along N."""
        if cutlass.const_expr(self.key.tile.cluster_n == 1 and not self.order.splits_tails):
            return Boolean(True)
        return columns > 0

    @cute.jit
    def issue(self, mma, acc, tCrA, tCrB, steps: Constexpr[range]):
        """The wgmmas of these steps of a K tile, as one group."""
        warpgroup.fence()
        for k in steps:
            cute.gemm(mma, acc, tCrA[(None, None, k)], tCrB[(None, None, k)], acc)
        warpgroup.commit_group()

    @cute.jit
    def scale_sums(self, acc: cute.Tensor, top):
        """Put back the powers of two that F16 operands lack."""
        exponent = f16_exponent(top.a, self.key.fp8("a")) + f16_exponent(top.b, self.key.fp8("b"))
        near = cutlass.max(cutlass.min(exponent, MAX_POWER), -MAX_POWER)
        # What lies past FP32's powers goes first: the other product is then the only one that rounds.
        if exponent != near:
            rest = cutlass.max(exponent - near, -MAX_POWER)
            acc.store(acc.load() * power_of_two(rest))
        acc.store(acc.load() * power_of_two(near))

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


def power_of_two(exponent: Int32) -> Float32:
    """2^exponent, of a normal FP32 number."""
    return Float32(((exponent + 127) << 23).bitcast(Float32))

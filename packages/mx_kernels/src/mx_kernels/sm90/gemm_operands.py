"""MXFP8 operands on their way to wgmma: A into registers, B into shared memory, both as F16 or both as BF16.

`element` is that type, and `top` the largest scale byte of the operand's tile (gemm_scale_range.py).

A needs no order of its own along K as long as B has the same one, so each thread reads what is cheap to read.

K-major A (fprop, dgrad): wgmma wants of thread (i, j) = (lane / 4, lane % 4), for K slot 16s + 8h + 2j + p, the row i.
It reads 16 consecutive codes of the row, those at 16j, and uses code 4s + 2h + p for that slot: `natural` K = 16j + 4s +
2h + p sits in slot 16s + 8h + 2j + p, and the four K steps of a tile share one 16-byte load per row.

MN-major A (wgrad): a word holds 4 consecutive rows at one K. The rows of a tile need no order either, as long as the
epilogue knows it: row 4 (i + 8 warp) + 2t + h of a warpgroup's 128 stands in row (i + 8h) of the warp's part of wgmma t,
so that a thread's four rows are the four codes of a word. K keeps its natural order.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Constexpr, Float16, Int32, Uint8, Uint16, Uint32
from cutlass.cute import arch

from mx_kernels.device.gemm_scheduler import next_work
from mx_kernels.device.wgmma_dequantize import dequantize_fp8x4, interleave_bytes, scale_factor
from mx_kernels.sm90.config import MMA_ROWS, TILE_K
from mx_kernels.sm90.gemm_scale_range import ScaleRangeRole, next_tops

DEQUANTIZE_THREADS = 128


class OperandRole(ScaleRangeRole):
    """Mixin of GroupedGemm."""

    # B: the dequantising warpgroup ------------------------------------------------------------------------------------

    @cute.jit
    def dequantize(
        self, ab_pipe, b_pipe, work, tops, sCodes: cute.Tensor, sScale: cute.Tensor, sB: cute.Tensor
    ):
        """Codes and scales of every stage → 16-bit tiles of B, in the K order of A. work, tops: (pipe, smem)."""
        (work_pipe, sWork), (top_pipe, sTop) = work, tops
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, self.key.stages)
        b_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, self.key.b_stages)
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        top_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, top_pipe.num_stages)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            top, top_state = next_tops(top_pipe, top_state, sTop)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                ab_pipe.consumer_wait(state)
                b_pipe.producer_acquire(b_state)
                codes, scales = sCodes[(None, None, state.index)], sScale[(None, None, state.index)]
                tile = sB[(None, None, b_state.index)]
                first_block = k_tile % 2 * 2  # a tile of scales covers two K tiles
                if top.near:
                    self.dequantize_tile(codes, scales, first_block, tile, top.b, Float16)
                else:
                    self.dequantize_tile(codes, scales, first_block, tile, top.b, BFloat16)
                arch.fence_proxy("async.shared", space="cta")
                arch.sync_warp()
                ab_pipe.consumer_release(state)
                with arch.elect_one():
                    b_pipe.producer_commit(b_state)
                state.advance()
                b_state.advance()
            work, work_state = next_work(work_pipe, work_state, sWork)

    @cute.jit
    def dequantize_tile(self, codes, scales, first_block: Int32, tile, top: Int32, element: Constexpr[type]):
        """One K tile of B. tile: (tile_n, TILE_K) of any 16-bit type."""
        if cutlass.const_expr(self.key.b_k_major):
            self.dequantize_k_major(codes, scales, first_block, tile, top, element)
        else:
            self.dequantize_mn_major(codes, scales, first_block, tile, top, element)

    @cute.jit
    def dequantize_k_major(
        self, codes, scales, first_block: Int32, tile, top: Int32, element: Constexpr[type]
    ):
        """A thread takes whole rows: 64 codes, two scales."""
        fp8 = self.key.fp8("b")
        thread = arch.thread_idx()[0] % DEQUANTIZE_THREADS
        for step in cutlass.range_constexpr(self.key.tile.tile_n // DEQUANTIZE_THREADS):
            row = thread + step * DEQUANTIZE_THREADS
            both_blocks = self.scale_pair(scales, row, first_block)
            scale = [scale_factor(pair_byte(both_blocks, block), top, element, fp8) for block in range(2)]
            words = [self.load_words(self.vector(codes[(row, None)], 16, j), 16) for j in range(4)]
            for s in cutlass.range_constexpr(4):
                pairs = [dequantize_fp8x4(words[j][s], [scale[j // 2]] * 4, element, fp8) for j in range(4)]
                for h in cutlass.range_constexpr(2):
                    self.put_words(
                        [pairs[j][h] for j in range(4)], self.vector(tile[(row, None)], 8, 2 * s + h)
                    )

    @cute.jit
    def dequantize_mn_major(
        self, codes, scales, first_block: Int32, tile, top: Int32, element: Constexpr[type]
    ):
        """A thread takes 8 neighbouring rows at 8 K positions of one block: 8 scales; 16 threads cover 128 rows."""
        fp8 = self.key.fp8("b")
        thread = arch.thread_idx()[0] % DEQUANTIZE_THREADS
        block, quarter = thread // 64, thread // 16 % 4
        for step in cutlass.range_constexpr(self.key.tile.tile_n // 128):
            row = thread % 16 * 8 + step * 128
            scale = [
                scale_factor(self.scale_byte(scales, row + r, first_block + block), top, element, fp8)
                for r in range(8)
            ]
            # All loads first: none may pass a store, whose address could be its own.
            positions = [block * 32 + quarter + 4 * i for i in range(8)]
            words = [self.load_words(self.vector(codes[(None, k)], 8, row // 8), 8) for k in positions]
            for i in cutlass.range_constexpr(8):
                pairs = [
                    pair
                    for half in range(2)
                    for pair in dequantize_fp8x4(words[i][half], scale[4 * half : 4 * half + 4], element, fp8)
                ]
                self.put_words(pairs, self.vector(tile[(None, self.slot(positions[i]))], 8, row // 8))

    @cute.jit
    def slot(self, k: Int32) -> Int32:
        """Where A's order puts position k of a K tile."""
        if cutlass.const_expr(self.key.a_transposed):
            return k
        j, s, h, p = k // 16, k // 4 % 4, k // 2 % 2, k % 2
        return 16 * s + 8 * h + 2 * j + p

    # A: the consumers' own registers ----------------------------------------------------------------------------------

    @cute.jit
    def a_codes(self, codes: cute.Tensor):
        """What a thread reads of a K tile, 16 words. codes: (rows, TILE_K) of this warpgroup.

        K-major: 4 neighbouring words for each (wgmma, row half). MN-major: one for each (K step, K half, K position).
        """
        lane, warp = arch.lane_idx(), arch.warp_idx() % 4
        i, j = lane // 4, lane % 4
        if cutlass.const_expr(self.key.a_transposed):
            return [
                self.load_words(self.vector(codes[(None, 8 * step + 2 * j + p)], 4, i + 8 * warp), 4)[0]
                for step in range(TILE_K // 8)
                for p in range(2)
            ]
        return [
            self.load_words(self.vector(codes[(MMA_ROWS * t + 16 * warp + 8 * half + i, None)], 16, j), 16)
            for t in range(self.key.rows_per_consumer // MMA_ROWS)
            for half in range(2)
        ]

    @cute.jit
    def a_scales(self, scales: cute.Tensor, first_row: Int32, first_block: Int32):
        """The thread's scale bytes of one K tile. K-major: one for each (wgmma, row half), of the block that its codes
        lie in. MN-major: those of both blocks for each of four rows, in pairs.
        """
        lane, warp = arch.lane_idx(), arch.warp_idx() % 4
        i, j = lane // 4, lane % 4
        if cutlass.const_expr(self.key.a_transposed):
            row = first_row + 4 * (i + 8 * warp)
            return [self.scale_pair(scales, row + r, first_block) for r in range(4)]
        return [
            self.scale_byte(scales, first_row + MMA_ROWS * t + 16 * warp + 8 * half + i, first_block + j // 2)
            for t in range(self.key.rows_per_consumer // MMA_ROWS)
            for half in range(2)
        ]

    @cute.jit
    def a_fragment(self, codes, scales, fragment: cute.Tensor, top: Int32, element: Constexpr[type]):
        """Codes and scales → wgmma's A registers. fragment: words ((1, row half, K half), wgmma, K step)."""
        if cutlass.const_expr(self.key.a_transposed):
            self.a_fragment_mn_major(codes, scales, fragment, top, element)
        else:
            self.a_fragment_k_major(codes, scales, fragment, top, element)

    @cute.jit
    def a_fragment_k_major(self, codes, scales, fragment: cute.Tensor, top: Int32, element: Constexpr[type]):
        fp8 = self.key.fp8("a")
        for t in cutlass.range_constexpr(self.key.rows_per_consumer // MMA_ROWS):
            for half in cutlass.range_constexpr(2):
                scale = scale_factor(scales[2 * t + half], top, element, fp8)
                for s in cutlass.range_constexpr(TILE_K // 16):
                    pairs = dequantize_fp8x4(codes[2 * t + half][s], [scale] * 4, element, fp8)
                    for h in cutlass.range_constexpr(2):
                        fragment[((0, half, h), t, s)] = pairs[h]

    @cute.jit
    def a_fragment_mn_major(self, codes, scales, fragment: cute.Tensor, top: Int32, element: Constexpr[type]):
        fp8 = self.key.fp8("a")
        for block in cutlass.range_constexpr(2):
            scale = [scale_factor(pair_byte(scales[r], block), top, element, fp8) for r in range(4)]
            for s in cutlass.range_constexpr(2 * block, 2 * block + 2):
                for h in cutlass.range_constexpr(2):
                    low, high = codes[4 * s + 2 * h], codes[4 * s + 2 * h + 1]
                    for t in cutlass.range_constexpr(2):
                        # Rows 2t and 2t + 1, each with its two K positions side by side.
                        both = interleave_bytes(low, high, upper=t == 1)
                        first, second = scale[2 * t], scale[2 * t + 1]
                        pairs = dequantize_fp8x4(both, [first, first, second, second], element, fp8)
                        for half in cutlass.range_constexpr(2):
                            fragment[((0, half, h), t, s)] = pairs[half]

    # shared memory ----------------------------------------------------------------------------------------------------

    @cute.jit
    def scale_byte(self, scales: cute.Tensor, row: Int32, block: Int32) -> Uint32:
        """scales: (512, tiles) bytes of one stage, blocked 128 x 4."""
        return Uint32(scales[row % 32 * 16 + row % 128 // 32 * 4 + block, row // 128])

    @cute.jit
    def scale_pair(self, scales: cute.Tensor, row: Int32, first_block: Int32) -> Uint32:
        """The scale bytes of a row's blocks `first_block` (even) and the next, in the low 16 bits."""
        pairs = cute.recast_tensor(scales, Uint16)
        return Uint32(pairs[row % 32 * 8 + row % 128 // 32 * 2 + first_block // 2, row // 128])

    @cute.jit
    def vector(self, x: cute.Tensor, count: Constexpr[int], index: Int32) -> cute.Tensor:
        """The index-th `count` neighbouring elements of x."""
        return cute.zipped_divide(x, (count,))[(None, index)]

    @cute.jit
    def load_words(self, source: cute.Tensor, count: Constexpr[int]):
        """`count` neighbouring bytes as one load."""
        copied = cute.make_rmem_tensor((count,), Uint8)
        cute.autovec_copy(source, copied)
        words = cute.recast_tensor(copied, Uint32)
        return [words[i] for i in range(count // 4)]

    @cute.jit
    def put_words(self, words, target: cute.Tensor):
        """Words of two elements each to neighbouring elements, as one store."""
        values = cute.make_rmem_tensor((len(words),), Uint32)
        for i in cutlass.range_constexpr(len(words)):
            values[i] = words[i]
        cute.autovec_copy(cute.recast_tensor(values, BFloat16), target)


def pair_byte(pair: Uint32, block: int) -> Uint32:
    """One byte of a `scale_pair`."""
    return pair >> Uint32(8) if block else pair & Uint32(0xFF)


assert TILE_K == 64, "the K orders above are those of a tile of 64"

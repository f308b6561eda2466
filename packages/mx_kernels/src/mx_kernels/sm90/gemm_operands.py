"""MXFP8 operands on their way to wgmma: A into registers, B into shared memory, both as F16 or both as BF16.

`element` is that type, and `top` the largest scale byte of the operand's tile (gemm_scale_range.py).

A needs no order of its own along K as long as B has the same one, so each thread reads what is cheap to read. wgmma wants of
thread (i, j) = (lane / 4, lane % 4), for K slot 16s + 8h + 2j + p, the row i. It reads 16 consecutive codes of the row, those
at 16j, and uses code 4s + 2h + p for that slot: K = 16j + 4s + 2h + p sits in slot 16s + 8h + 2j + p, and the four K steps of
a tile share one 16-byte load per row.
"""

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import BFloat16, Constexpr, Float16, Int32, Uint8, Uint16, Uint32
from cutlass.cute import arch

from mx_kernels.device.gemm_scheduler import next_work
from mx_kernels.device.wgmma_dequantize import dequantize_fp8x4, scale_factor
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
        codes = cute.make_rmem_tensor((16,), Uint32)
        scales = cute.make_rmem_tensor((1 if self.key.b_k_major else 8,), Uint32)
        loaded = (codes, scales)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            top, top_state = next_tops(top_pipe, top_state, sTop)
            for k_tile in cutlass.range(work.k_tiles, unroll=1):
                ab_pipe.consumer_wait(state)
                # Before the wait for room: by then the codes have come.
                self.load_b(sCodes, sScale[(None, None, state.index)], state.index, k_tile % 2 * 2, loaded)
                arch.sync_warp()
                ab_pipe.consumer_release(state)
                state.advance()
                b_pipe.producer_acquire(b_state)
                if top.near:
                    self.store_b(loaded, sB, b_state.index, top.b, Float16)
                else:
                    self.store_b(loaded, sB, b_state.index, top.b, BFloat16)
                arch.fence_proxy("async.shared", space="cta")
                arch.sync_warp()
                self.commit(b_pipe, b_state)
                b_state.advance()
            work, work_state = next_work(work_pipe, work_state, sWork)

    @cute.jit
    def commit(self, pipe, state):
        """One arrival for each warp."""
        with arch.elect_one():
            pipe.producer_commit(state)

    @cute.jit
    def load_b(self, sCodes: cute.Tensor, scales: cute.Tensor, stage: Int32, first_block: Int32, loaded):
        """A thread's codes and scales of one K tile of B. scales: of one stage; loaded: (16 words, scale bytes or pairs).

        K-major: a row's 64 codes and its two scales. MN-major: 8 neighbouring rows at 8 K positions of one block, and those
        rows' scales; 16 threads cover 128 rows.
        """
        codes, scale = loaded
        thread = arch.thread_idx()[0] % DEQUANTIZE_THREADS
        if cutlass.const_expr(self.key.b_k_major):
            scale[0] = self.scale_pair(scales, thread, first_block)
            row = sCodes[(thread, None, stage)]
            vectors = [self.load_words(self.vector(row, 16, j), 16) for j in range(4)]
        else:
            group = thread % 16
            first = scale_place(8 * group) + first_block + thread // 64
            for r in cutlass.range_constexpr(8):
                scale[r] = Uint32(scales[first + 16 * r, 0])  # 16 bytes to the next of 32 rows
            # A line of shared memory is a K position of 128 rows. Every 8 lines the swizzle is the same again, and the
            # places are constants apart: the compiler, which sees a swizzle in every address, would compute each anew.
            tile = self.unswizzled(sCodes, Uint8)[(None, stage)]
            places = [swizzled(self.position(i), group // 2) * 2 + group % 2 for i in range(2)]
            vectors = [
                self.load_words(self.vector(tile, 8, places[i % 2] + i // 2 * 128), 8) for i in range(8)
            ]
        for i, word in enumerate(word for vector in vectors for word in vector):
            codes[i] = word

    @cute.jit
    def store_b(self, loaded, sB: cute.Tensor, stage: Int32, top: Int32, element: Constexpr[type]):
        """The same, dequantised, to a stage of B. sB: (tile_n, TILE_K, stages) of any 16-bit type."""
        codes, scales = loaded
        fp8 = self.key.fp8("b")
        thread = arch.thread_idx()[0] % DEQUANTIZE_THREADS
        if cutlass.const_expr(self.key.b_k_major):
            row = sB[(thread, None, stage)]
            scale = [scale_factor(pair_byte(scales[0], block), top, element, fp8) for block in range(2)]
            for s in cutlass.range_constexpr(4):
                pairs = [
                    dequantize_fp8x4(codes[4 * j + s], [scale[j // 2]] * 4, element, fp8) for j in range(4)
                ]
                for h in cutlass.range_constexpr(2):
                    self.put_words([pairs[j][h] for j in range(4)], self.vector(row, 8, 2 * s + h))
        else:
            group = thread % 16
            tile = self.unswizzled(sB, BFloat16)[(None, stage)]  # a line: a K position of 64 rows
            scale = [scale_factor(scales[r], top, element, fp8) for r in range(8)]
            for i in cutlass.range_constexpr(8):
                low = dequantize_fp8x4(codes[2 * i], scale[:4], element, fp8)
                high = dequantize_fp8x4(codes[2 * i + 1], scale[4:], element, fp8)
                near, lines = i // 4 * 4, i % 4 * 16
                place = swizzled(self.slot(self.position(near)) + group // 8 * TILE_K, group % 8)
                self.put_words(low + high, self.vector(tile, 8, place + 8 * lines))

    def position(self, i: int) -> Int32:
        """MN-major: the i-th K position of this thread in a K tile."""
        thread = arch.thread_idx()[0] % DEQUANTIZE_THREADS
        return thread // 64 * 32 + thread // 16 % 4 + 4 * i

    def unswizzled(self, s: cute.Tensor, element: type) -> cute.Tensor:
        """The memory of (rows, TILE_K, stages) as (elements, stages), without its swizzle."""
        stages = cute.size(s, mode=[2])
        pointer = cute.recast_ptr(s.iterator, dtype=element)
        return cute.make_tensor(pointer, cute.make_layout((cute.size(s) // stages, stages)))

    @cute.jit
    def slot(self, k: Int32) -> Int32:
        """Where A's order puts position k of a K tile."""
        j, s, h, p = k // 16, k // 4 % 4, k // 2 % 2, k % 2
        return 16 * s + 8 * h + 2 * j + p

    # A: the consumers' own registers ----------------------------------------------------------------------------------

    @cute.jit
    def a_codes(self, codes: cute.Tensor):
        """What a thread reads of a K tile: 4 neighbouring words for each (wgmma, row half).

        codes: (rows, TILE_K) of its warpgroup.
        """
        lane, warp = arch.lane_idx(), arch.warp_idx() % 4
        i, j = lane // 4, lane % 4
        return [
            self.load_words(self.vector(codes[(MMA_ROWS * t + 16 * warp + 8 * half + i, None)], 16, j), 16)
            for t in range(self.key.rows_per_consumer // MMA_ROWS)
            for half in range(2)
        ]

    @cute.jit
    def a_scales(self, scales: cute.Tensor, first_row: Int32, first_block: Int32):
        """The thread's scale bytes of one K tile: one for each (wgmma, row half), of the block that its codes lie in."""
        lane, warp = arch.lane_idx(), arch.warp_idx() % 4
        i, j = lane // 4, lane % 4
        return [
            self.scale_byte(scales, first_row + MMA_ROWS * t + 16 * warp + 8 * half + i, first_block + j // 2)
            for t in range(self.key.rows_per_consumer // MMA_ROWS)
            for half in range(2)
        ]

    @cute.jit
    def a_fragment(
        self, loaded, fragment: cute.Tensor, top: Int32, element: Constexpr[type], steps: Constexpr[range]
    ):
        """Codes and scales → wgmma's A registers of these K steps.

        fragment: words ((1, row half, K half), wgmma, K step).
        """
        codes, scales = loaded
        fp8 = self.key.fp8("a")
        for step in steps:
            for t in cutlass.range_constexpr(self.key.rows_per_consumer // MMA_ROWS):
                for half in cutlass.range_constexpr(2):
                    scale = scale_factor(scales[2 * t + half], top, element, fp8)
                    pairs = dequantize_fp8x4(codes[2 * t + half][step], [scale] * 4, element, fp8)
                    for h in cutlass.range_constexpr(2):
                        fragment[((0, half, h), t, step)] = pairs[h]

    # shared memory ----------------------------------------------------------------------------------------------------

    @cute.jit
    def scale_byte(self, scales: cute.Tensor, row: Int32, block: Int32) -> Uint32:
        """scales: (512, tiles) bytes of one stage, blocked 128 x 4."""
        return Uint32(scales[scale_place(row) + block, row // 128])

    @cute.jit
    def scale_pair(self, scales: cute.Tensor, row: Int32, first_block: Int32) -> Uint32:
        """The scale bytes of a row's blocks `first_block` (even) and the next, in the low 16 bits."""
        pairs = cute.recast_tensor(scales, Uint16)
        return Uint32(pairs[(scale_place(row) + first_block) // 2, row // 128])

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


def scale_place(row: Int32) -> Int32:
    """Where a row's four scales begin in its tile of 128 rows."""
    return row % 32 * 16 + row % 128 // 32 * 4


def swizzled(line: Int32, chunk: Int32) -> Int32:
    """Which 16 bytes of shared memory hold the chunk-th 16 of a line of 128, swizzled over 128 bytes."""
    return line * 8 + (chunk ^ line % 8)


def pair_byte(pair: Uint32, block: int) -> Uint32:
    """One byte of a `scale_pair`."""
    return pair >> Uint32(8) if block else pair & Uint32(0xFF)


assert TILE_K == 64, "the K orders above are those of a tile of 64"

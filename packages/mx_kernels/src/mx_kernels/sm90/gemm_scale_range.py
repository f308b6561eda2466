"""MXFP8: how far the scales of a tile of work lie apart, found by two warps ahead of the tile's multiplication.

Scales close together let both operands be F16, which costs a third of the instructions that BF16 does
(device/wgmma_dequantize.py). One warp looks at all scales of A's rows of the tile, one at those of B's: a 32nd of what the
copy engine loads. Only blocks that hold real values count: not padding, whose scale bytes are 0.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
import cutlass.pipeline as pipeline
from cutlass import Boolean, Constexpr, Int32, Uint32, select_
from cutlass.cute import arch
from mx_core.formats import BLOCK_SIZE, E8M0_NAN

from mx_kernels.device.gemm_scheduler import UNIT, Extent, Work, next_work
from mx_kernels.device.ptx import load_v4, max_u16x2, min_u16x2
from mx_kernels.device.wgmma_dequantize import F16Range
from mx_kernels.sm90.config import TILE_K
from mx_kernels.sm90.gemm_role import GemmRole

FAR = -1  # instead of an operand's largest scale byte: F16 cannot hold the tile
TOP_STAGES = 4
OPERANDS = ("a", "b")
ALL = 0xFFFF_FFFF


class Tops(NamedTuple):
    """The largest scale bytes of a tile's operands, and whether F16 holds both."""

    a: Int32
    b: Int32
    near: Boolean


class ScaleRangeRole(GemmRole):
    """Mixin of GroupedGemm."""

    @cute.jit
    def find_tops(self, operand: Constexpr[str], work, tops, scales: cute.Tensor, extent: Extent, cta):
        """Announce the largest scale byte of every tile of work, or FAR: one warp for "a", one for "b".

        work, tops: (pipe, smem). scales: (512, R tiles, C tiles, groups).
        """
        (work_pipe, sWork), (top_pipe, sTop) = work, tops
        spread = F16Range.of(self.key.fp8(operand)).spread
        work_state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Consumer, work_pipe.num_stages)
        state = pipeline.make_pipeline_state(pipeline.PipelineUserType.Producer, TOP_STAGES)
        work, work_state = next_work(work_pipe, work_state, sWork)
        while work.k_tiles >= 0:
            place, row_tiles, rows, blocks = self.scales_of_tile(operand, work, extent, cta)
            top = self.top_scale(scales, place, row_tiles, rows, blocks, spread)
            top_pipe.producer_acquire(state)
            with arch.elect_one():
                sTop[OPERANDS.index(operand), state.index] = top
                top_pipe.producer_commit(state)
            state.advance()
            work, work_state = next_work(work_pipe, work_state, sWork)
        top_pipe.producer_tail(state)

    @cute.jit
    def scales_of_tile(self, operand: Constexpr[str], work: Work, extent: Extent, cta):
        """Where an operand's scales for a tile of work begin, their R tiles, and how many rows and blocks are real."""
        tile = self.key.tile
        blocks = cutlass.min(cute.ceil_div(extent.k, BLOCK_SIZE), work.k_tiles * (TILE_K // BLOCK_SIZE))
        m_tile, n_tile = self.tile_of(work, cta)
        if cutlass.const_expr(operand == "a"):
            return (
                self.sfa_place(work, m_tile),
                self.key.sfa_tiles,
                work.length - m_tile * tile.tile_m,
                blocks,
            )
        return self.sfb_place(work, n_tile), self.key.sfb_tiles, extent.n - n_tile * tile.tile_n, blocks

    @cute.jit
    def top_scale(
        self, scales, place, row_tiles: Constexpr[int], rows: Int32, blocks: Int32, spread: Constexpr[int]
    ) -> Int32:
        """The largest byte of `rows` rows and `blocks` blocks; FAR if it is NaN or the smallest lies further below it.

        A lane reads 16 bytes of a tile of scales: 4 blocks of each of 4 rows, 32 apart. Bytes are compared as upper halves
        of 16 bits, first those of odd blocks, then those of even ones; what lies below them does not matter.
        """
        row_tile, column, group = place
        lane = arch.lane_idx()
        largest, smallest = Uint32(0), Uint32(ALL)
        for tile in cutlass.range_constexpr(row_tiles):
            real = [
                Uint32(select_(UNIT * tile + 32 * i + lane < rows, Uint32(ALL), Uint32(0))) for i in range(4)
            ]
            row = cutlass.min(row_tile + tile, cute.size(scales, mode=[1]) - 1)
            for c in cutlass.range(cute.ceil_div(blocks, 4), unroll=4):
                source = scales[(None, row, column + c, group)].iterator + 16 * lane
                words = load_v4(source, Boolean(True))
                last = cutlass.min(blocks - 4 * c, 4)  # blocks of this tile
                inside = Uint32(ALL) >> Uint32(32 - 8 * last)
                for i in cutlass.range_constexpr(4):
                    use = inside & real[i]
                    high, low = words[i] & use, words[i] | ~use
                    largest = max_u16x2(max_u16x2(largest, high), high << Uint32(8))
                    smallest = min_u16x2(min_u16x2(smallest, low), low << Uint32(8))
        top = arch.warp_redux_sync(
            cutlass.max(largest >> Uint32(24), largest >> Uint32(8) & Uint32(0xFF)), "umax"
        )
        bottom = arch.warp_redux_sync(
            cutlass.min(smallest >> Uint32(24), smallest >> Uint32(8) & Uint32(0xFF)), "umin"
        )
        top, bottom = Int32(top), Int32(bottom)
        far = (top == E8M0_NAN) | (top - bottom > spread)
        return Int32(select_(far, Int32(FAR), top))


@cute.jit
def next_tops(pipe, state, sTop: cute.Tensor):
    """What is known of the next tile's scales (whole warp); frees its slot. Returns (Tops, advanced state)."""
    pipe.consumer_wait(state)
    a, b = Int32(sTop[0, state.index]), Int32(sTop[1, state.index])
    arch.sync_warp()
    with arch.elect_one():
        pipe.consumer_release(state)
    state.advance()
    return Tops(a, b, (a != FAR) & (b != FAR)), state

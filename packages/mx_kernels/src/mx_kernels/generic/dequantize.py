"""MXFP8 codes and blocked scales → BF16: both operands of a grouped GEMM in one launch, in the layout of their codes.

One CTA takes one tile of 128 rows × 128 columns, whose scales are one 512-byte tile in either orientation, and leaves. A
lane has 8 columns of every second row of 16, so a warp reads 128 and writes 256 consecutive bytes of two rows at a time.
Blocks along the rows: a lane loads one row's scales and shuffles hand them out; blocks down the rows: a lane loads those of
its columns.

Values are what `device/wgmma_dequantize.py` gives BF16 operands: code · 2^(byte - 127) in fp32, rounded once.
"""

import functools
from dataclasses import dataclass
from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
import torch
from cutlass import Boolean, Constexpr, Int32, Int64, Uint8, Uint32
from mx_core import RowMap
from mx_core.groups import aligned_rows
from torch import Tensor

from mx_kernels import arch, jit
from mx_kernels.device import ptx
from mx_kernels.device.gemm_scheduler import place_unit
from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.device.tile import BLOCK, ROWS, SCALE_TILE_BYTES, VECTOR
from mx_kernels.device.wgmma_dequantize import e8m0_to_f32, fp8x4_to_bf16
from mx_kernels.generic.backend import address, contiguous, empty, launch
from mx_kernels.generic.config import DEQUANTIZE_MIN_BLOCKS
from mx_kernels.problem import GemmProblem

COLS = 128  # of a CTA tile: what one tile of row scales covers
STRIDE = 32 * VECTOR // COLS  # rows that a warp reads at a time
STEPS = 8  # rows of a lane
WARP_ROWS = STRIDE * STEPS
THREADS = 32 * ROWS // WARP_ROWS


@dataclass(frozen=True)
class Operand:
    """What a kernel is specialised on for one of its matrices.

    fp8: "e4m3" or "e5m2".
    down_rows: blocks run down the rows, else along them.
    row_map: where groups stand in its rows; None: it has no groups.
    """

    fp8: str
    down_rows: bool
    row_map: RowMap | None

    def units(self, rows: int, groups: int) -> int:
        """Upper bound of its row tiles."""
        return (aligned_rows(rows, groups) if self.row_map is RowMap.COMPACT else rows + ROWS - 1) // ROWS


class Matrix(NamedTuple):
    """An operand's (batch, rows, cols) codes, their scales, the result, and its size in tiles."""

    codes: cute.Pointer
    scales: cute.Pointer
    out: cute.Pointer
    batch: Int32
    rows: Int32
    cols: Int32
    units: Int32

    @property
    def tiles_across(self):
        return cute.ceil_div(self.cols, COLS)

    @property
    def tiles(self):
        return self.batch * self.units * self.tiles_across


@dataclass(frozen=True)
class DequantizeKernel:
    """Rows past a group's end are written as they come, rows past the last group (COMPACT: or unit) are not."""

    a: Operand
    b: Operand
    min_blocks: int

    def build(self):
        """Function and arguments for `jit.compiled`."""
        operand = [fake_pointer(Uint8, 16)] * 3 + [Int32(0)] * 4
        return self, *operand, *operand, fake_pointer(Int32), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        a_codes: cute.Pointer,
        a_scales: cute.Pointer,
        a_out: cute.Pointer,
        a_batch: Int32,
        a_rows: Int32,
        a_cols: Int32,
        a_units: Int32,
        b_codes: cute.Pointer,
        b_scales: cute.Pointer,
        b_out: cute.Pointer,
        b_batch: Int32,
        b_rows: Int32,
        b_cols: Int32,
        b_units: Int32,
        offs: cute.Pointer,
        groups: Int32,
        stream: cuda.CUstream,
    ):
        """Columns are multiples of 16, all pointers but `offs` of 16 bytes."""
        a = Matrix(a_codes, a_scales, a_out, a_batch, a_rows, a_cols, a_units)
        b = Matrix(b_codes, b_scales, b_out, b_batch, b_rows, b_cols, b_units)
        ends = cute.make_tensor(offs, cute.make_layout(groups))
        self.kernel(a, b, ends, groups).launch(
            grid=(a.tiles + b.tiles, 1, 1),
            block=(THREADS, 1, 1),
            min_blocks_per_mp=self.min_blocks,
            preferred_smem_carveout=0,
            stream=stream,
        )

    @cute.kernel
    def kernel(self, a: Matrix, b: Matrix, offs: cute.Tensor, groups: Int32):
        index = ca.block_idx()[0]
        if index < a.tiles:
            self.dequantize(self.a, a, offs, groups, index)
        else:
            self.dequantize(self.b, b, offs, groups, index - a.tiles)

    @cute.jit
    def dequantize(
        self, operand: Constexpr[Operand], x: Matrix, offs: cute.Tensor, groups: Int32, index: Int32
    ):
        """One tile of an operand."""
        column, above = index % x.tiles_across, index // x.tiles_across
        unit, batch = above % x.units, above // x.units
        first, count = unit * ROWS, cutlass.min(x.rows - unit * ROWS, Int32(ROWS))
        if cutlass.const_expr(operand.row_map is not None):
            start, real = place_unit(offs, groups, x.rows, unit)
            if cutlass.const_expr(operand.row_map is RowMap.COMPACT):
                first, count = start, real
            count = Int32(cutlass.select_(real > 0, count, Int32(0)))
        if count > 0:
            if cutlass.const_expr(operand.down_rows):
                scale_tile = (Int64(batch) * x.tiles_across + column) * x.units + unit
            else:
                scale_tile = (Int64(batch) * x.units + unit) * x.tiles_across + column
            scales = x.scales + scale_tile * SCALE_TILE_BYTES
            self.dequantize_rows(operand, x, Int64(batch) * x.rows + first, count, column * COLS, scales)

    @cute.jit
    def dequantize_rows(
        self,
        operand: Constexpr[Operand],
        x: Matrix,
        first: Int64,
        count: Int32,
        column: Int32,
        scales: cute.Pointer,
    ):
        """Rows first … first + count, at most 128, of the 128 columns from `column` on, with their tile of scales."""
        row, local_col = place()
        col = column + local_col
        limit = Int32(cutlass.select_(col < x.cols, count, Int32(0)))
        start = (first + row) * x.cols + col
        codes_of, out = x.codes + start, x.out + 2 * start
        codes = [
            ptx.load_v2(codes_of + step * STRIDE * x.cols, row + step * STRIDE < limit)
            for step in range(STEPS)
        ]
        scale_of = self.scales_down_rows(scales) if operand.down_rows else self.scales_along_rows(scales)
        for step in cutlass.range_constexpr(STEPS):
            factors = scale_of(step)
            words = [
                word
                for half in range(2)
                for word in fp8x4_to_bf16(codes[step][half], factors[4 * half : 4 * half + 4], operand.fp8)
            ]
            ptx.store_words(out + 2 * step * STRIDE * x.cols, words, row + step * STRIDE < limit)

    def scales_down_rows(self, scales: cute.Pointer):
        """The 8 scales of this lane's columns, the same for all its rows."""
        row, col = place()
        mine = scales + ((col % BLOCK) * 16 + (col // BLOCK) * 4 + row // BLOCK)
        factors = [e8m0_to_f32(ptx.load_scalar(mine + 16 * i, 8, Boolean(True))) for i in range(VECTOR)]
        return lambda step: factors

    def scales_along_rows(self, scales: cute.Pointer):
        """The scale of this lane's block of its `step`-th row, 8 times."""
        row, col = place()
        local = ca.lane_idx() % WARP_ROWS  # each lane loads the four scales of one row
        at = row // WARP_ROWS * WARP_ROWS + local
        word = ptx.load_scalar(scales + ((at % BLOCK) * 16 + (at // BLOCK) * 4), 32, Boolean(True))
        shift = Uint32(col // BLOCK * 8)

        def scale_of(step: int) -> list:
            byte = Uint32(ca.shuffle_sync(word, row % WARP_ROWS + step * STRIDE)) >> shift & Uint32(0xFF)
            return [e8m0_to_f32(byte)] * VECTOR

        return scale_of


def place() -> tuple[Int32, Int32]:
    """First row and first column of this lane within the tile: a warp has 16 rows, two at a time."""
    thread = ca.thread_idx()[0]
    lane = thread % 32
    return thread // 32 * WARP_ROWS + lane // (32 // STRIDE), lane % (32 // STRIDE) * VECTOR


# host ----------------------------------------------------------------------------------------------------------------


def dequantize_operands(
    problem: GemmProblem, a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, offs: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Both MXFP8 operands of a grouped GEMM as BF16 tensors, of the shapes of a and b.

    Exact for E4M3 and scale bytes 3 … 246 (E5M2: 10 … 239); below, rounded to multiples of 2^-133; above, Inf where fp32 has
    no such value. Rows that are no unit of a group (COMPACT: that belong to no group) are left as they are. The results come
    from torch's caching allocator, on the current stream; nothing waits for the device.

    Args:
        problem: mode, formats and row map.
        a: codes as the op takes them (ops/gemm.py), rows of a multiple of 16 bytes.
        a_scale: its blocked scales.
        b: codes of the weights (E, N, K), or for wgrad of rows like a's.
        b_scale: its blocked scales.
        offs: int32 (E,), or None for one group.
    """
    device, groups = a.device, 0 if offs is None else offs.shape[0]
    launcher, of_a, of_b = _kernel(problem, arch.target_of(device), arch.active_emulation())
    results = empty(contiguous(((tuple(a.shape), torch.bfloat16), (tuple(b.shape), torch.bfloat16))), device)
    arguments: list[int] = []
    for operand, x, scale, out in ((of_a, a, a_scale, results[0]), (of_b, b, b_scale, results[1])):
        *batch, rows, cols = x.shape
        pointers = x.data_ptr(), scale.data_ptr(), out.data_ptr()
        arguments += (*pointers, batch[0] if batch else 1, rows, cols, operand.units(rows, groups))
    launch(launcher, device, *arguments, address(offs), groups)
    return results[0], results[1]


@functools.cache
def _kernel(problem: GemmProblem, target: str | None, emulation):
    assert target is not None
    row_map = problem.row_map if problem.grouped else None
    wgrad = problem.mode == "wgrad"
    a, b = (
        Operand(format.removeprefix("mxfp8_"), down_rows, rows)
        for format, down_rows, rows in (
            (problem.a_format, wgrad, row_map),
            (problem.b_format, problem.mode != "fprop", row_map if wgrad else None),
        )
    )
    kernel = DequantizeKernel(a, b, DEQUANTIZE_MIN_BLOCKS)
    return jit.compiled(kernel, target, kernel.build), a, b

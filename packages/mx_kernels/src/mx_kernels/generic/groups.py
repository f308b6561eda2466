"""Where the 128-row units of grouped rows come from: one table, made on the device before the kernel that reads it.

A row of the table is (start, real, first, end): rows start … start+real-1 of the compact rows become rows first … of the
output; rows up to `end` are written, with zeros past the real ones. Units past the last group have real = 0.
"""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Int32
from cutlass.memory import SmemAllocator
from mx_core import RowMap

from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.device.scan import exclusive_scan
from mx_kernels.device.tile import ROWS

REAL = 1  # column of the table
THREADS = 512
WARPS = THREADS // 32


@dataclass(frozen=True)
class GroupTable:
    """`row_map` is that of the output rows. One CTA; `groups` may be any number."""

    row_map: RowMap

    def build(self):
        """Function and arguments for `jit.compiled`."""
        return self, fake_pointer(Int32), fake_pointer(Int32, 16), Int32(0), Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        offs: cute.Pointer,
        table: cute.Pointer,
        groups: Int32,
        rows: Int32,
        tiles: Int32,
        stream: cuda.CUstream,
    ):
        """Offs (groups,) → table (tiles, 4); `rows` compact rows in all."""
        self.kernel(
            cute.make_tensor(offs, cute.make_layout(groups)),
            cute.make_tensor(table, cute.make_layout((tiles, 4), stride=(4, 1))),
            groups,
            rows,
            tiles,
        ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, offs: cute.Tensor, table: cute.Tensor, groups: Int32, rows: Int32, tiles: Int32):
        smem = SmemAllocator()
        warp_sums = smem.allocate_tensor(Int32, cute.make_layout(WARPS))
        unit_starts = smem.allocate_tensor(Int32, cute.make_layout(THREADS))
        thread, lane, warp = ca.thread_idx()[0], ca.lane_idx(), ca.warp_idx()
        aligned = self.row_map is RowMap.ALIGNED

        units_before, chunk = Int32(0), Int32(0)
        while chunk < groups:
            group = chunk + thread
            units = Int32(0)
            if group < groups:
                units = cute.ceil_div(offs[group] - previous_end(offs, group), ROWS)
            before, total = exclusive_scan(units, warp_sums, WARPS)
            unit_starts[thread] = units_before + before
            ca.barrier()
            # A warp to a group, a lane to a unit of it.
            i = warp
            while i < cutlass.min(Int32(THREADS), groups - chunk):
                start = previous_end(offs, chunk + i)
                left = offs[chunk + i] - start - lane * ROWS
                unit = unit_starts[i] + lane
                start += lane * ROWS
                while left > 0:
                    real = cutlass.min(left, Int32(ROWS))
                    write_row(
                        table, unit, start, real, unit * ROWS if aligned else start, ROWS if aligned else real
                    )
                    left -= 32 * ROWS
                    start += 32 * ROWS
                    unit += 32
                i += WARPS
            ca.barrier()
            units_before += total
            chunk += THREADS

        end = offs[groups - 1]
        unit = units_before + thread
        while unit < tiles:
            first = unit * ROWS
            count = Int32(ROWS)
            if cutlass.const_expr(not aligned):  # the zeros past the groups
                first = cutlass.min(end + (unit - units_before) * ROWS, rows)
                count = cutlass.min(Int32(ROWS), rows - first)
            write_row(table, unit, Int32(0), Int32(0), first, count)
            unit += THREADS


@cute.jit
def previous_end(offs: cute.Tensor, group: Int32):
    """Where a group starts."""
    start = Int32(0)
    if group > 0:
        start = offs[group - 1]
    return start


@cute.jit
def write_row(table: cute.Tensor, unit: Int32, start: Int32, real: Int32, first: Int32, count: Int32):
    """One row of the table."""
    table[unit, 0] = start
    table[unit, 1] = real
    table[unit, 2] = first
    table[unit, 3] = first + count


@cute.jit
def real_rows(table: cute.Pointer, tile_row: Int32):
    """How many of a 128-row unit's rows are real."""
    return cute.make_tensor(table, cute.make_layout(1 << 30))[tile_row * 4 + REAL]

"""The sum of a token's experts, weighted or not, and its gradients. Every sum has one fixed order."""

from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Float32, Int32, Int64, Uint8, Uint32
from cutlass.memory import SmemAllocator

from mx_kernels.device import ptx
from mx_kernels.device.launch import fake_pointer, fake_stream
from mx_kernels.device.tile import ROWS, VECTOR, RowAccess

THREADS = 128
WARPS = THREADS // 32


@dataclass(frozen=True)
class CombineKernel:
    """y (P, D), slot_of (T, k), weights (T, k) → out (T, D): acc = fma(w_j, y_j, acc) in fp32, j ascending."""

    element_bits: int
    k: int
    weighted: bool

    def build(self):
        """Function and arguments for `jit.compiled`."""
        data = fake_pointer(Uint8, 16)
        return self, data, fake_pointer(Int32), fake_pointer(Float32), data, Int32(0), Int32(0), fake_stream()

    @cute.jit
    def __call__(
        self,
        y: cute.Pointer,
        slot_of: cute.Pointer,
        weights: cute.Pointer,
        out: cute.Pointer,
        tokens: Int32,
        width: Int32,
        stream: cuda.CUstream,
    ):
        """`tokens` T, `width` D; y and out are pointers to bytes."""
        self.kernel(y, slot_of, weights, out, width).launch(
            grid=(tokens, cute.ceil_div(width, VECTOR * THREADS), 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self, y: cute.Pointer, slot_of: cute.Pointer, weights: cute.Pointer, out: cute.Pointer, width: Int32
    ):
        access, size = RowAccess(self.element_bits, True), self.element_bits // 8
        token, block, _ = ca.block_idx()
        col = (block * THREADS + ca.thread_idx()[0]) * VECTOR
        slots, factors = choices(slot_of, weights, token, self.k, self.weighted)
        words = [
            access.load(y + (Int64(s) * width + col) * size, col, width, (s >= 0) & (col < width))
            for s in slots
        ]
        rows = access.as_rows(words)
        acc = [Float32(0)] * VECTOR
        for j in cutlass.range_constexpr(self.k):
            # A dropped choice has read zeros, but its weight may be anything.
            factor = Float32(cutlass.select_(slots[j] >= 0, factors[j], Float32(0)))
            acc = [ptx.fma(factor, v, a) for v, a in zip(rows.values(j), acc, strict=True)]
        access.store_values(out + (Int64(token) * width + col) * size, acc, col < width)


def choices(slot_of: cute.Pointer, weights: cute.Pointer, token: Int32, k: int, weighted: bool = True):
    """Slots and weights (1 without any) of a token's k choices."""
    first = Int64(token) * k
    slots = [Int32(ptx.load_scalar(slot_of + (first + j), 32, cutlass.Boolean(True))) for j in range(k)]
    if not weighted:
        return slots, [Float32(1)] * k
    words = [ptx.load_scalar(weights + (first + j), 32, cutlass.Boolean(True)) for j in range(k)]
    return slots, [w.bitcast(Float32) for w in words]


@dataclass(frozen=True)
class CombineBackwardKernel:
    """dout (T, D), y (P, D), slot_of, weights → dy (P, D) = w·dout, 0 where there is no slot; dweights (T, k) = <dout, y>.

    A CTA takes a token: dout is read once for all its slots. The rows that no slot marked are then filled with zeros.
    """

    element_bits: int
    k: int

    def build(self):
        """Function and arguments for `jit.compiled`."""
        data, marks = fake_pointer(Uint8, 16), fake_pointer(Int32, 16)
        index, weights = fake_pointer(Int32), fake_pointer(Float32)
        return (
            self,
            data,
            data,
            index,
            weights,
            data,
            weights,
            marks,
            Int32(0),
            Int32(0),
            Int32(0),
            fake_stream(),
        )

    @cute.jit
    def __call__(
        self,
        dout: cute.Pointer,
        y: cute.Pointer,
        slot_of: cute.Pointer,
        weights: cute.Pointer,
        dy: cute.Pointer,
        dweights: cute.Pointer,
        marks: cute.Pointer,
        tokens: Int32,
        rows: Int32,
        width: Int32,
        stream: cuda.CUstream,
    ):
        """`tokens` T, `rows` P, `width` D; marks (P,) is scratch."""
        marks_P = cute.make_tensor(marks, cute.make_layout(rows))
        block = (THREADS, 1, 1)
        fill(marks_P, Int32(0), rows).launch(
            grid=(cute.ceil_div(rows, THREADS), 1, 1), block=block, stream=stream
        )
        self.token(dout, y, slot_of, weights, dy, dweights, marks_P, width).launch(
            grid=(tokens, 1, 1), block=block, stream=stream
        )
        self.zero_unmarked(dy, marks_P, rows, width).launch(
            grid=(cute.ceil_div(rows, ROWS), 1, 1), block=block, stream=stream
        )

    @cute.kernel
    def token(
        self,
        dout: cute.Pointer,
        y: cute.Pointer,
        slot_of: cute.Pointer,
        weights: cute.Pointer,
        dy: cute.Pointer,
        dweights: cute.Pointer,
        marks_P: cute.Tensor,
        width: Int32,
    ):
        access, size = RowAccess(self.element_bits, True), self.element_bits // 8
        sums = SmemAllocator().allocate_tensor(Float32, cute.make_layout((WARPS, self.k), stride=(self.k, 1)))
        token, thread, warp, lane = ca.block_idx()[0], ca.thread_idx()[0], ca.warp_idx(), ca.lane_idx()
        slots, factors = choices(slot_of, weights, token, self.k)
        dots = [Float32(0)] * self.k
        col = thread * VECTOR
        while col < width:
            grad = access.as_rows(
                [access.load(dout + (Int64(token) * width + col) * size, col, width, col < width)]
            )
            at = [(Int64(s) * width + col) * size for s in slots]
            values = access.as_rows(
                [
                    access.load(y + a, col, width, (s >= 0) & (col < width))
                    for a, s in zip(at, slots, strict=True)
                ]
            )
            for j in cutlass.range_constexpr(self.k):
                for g, v in zip(grad.values(0), values.values(j), strict=True):
                    dots[j] = ptx.fma(g, v, dots[j])
                access.store_values(dy + at[j], [factors[j] * g for g in grad.values(0)], slots[j] >= 0)
            col += THREADS * VECTOR
        for j in cutlass.range_constexpr(self.k):
            dot = ca.warp_reduction_sum(dots[j])
            if lane == 0:
                sums[warp, j] = dot
        ca.barrier()
        for j in cutlass.range_constexpr(self.k):
            if thread == j:
                total = Float32(0)
                for w in cutlass.range_constexpr(WARPS):
                    total += sums[w, j]
                cute.make_tensor(dweights + Int64(token) * self.k, cute.make_layout(self.k))[j] = total
                if slots[j] >= 0:
                    marks_P[slots[j]] = Int32(1)

    @cute.kernel
    def zero_unmarked(self, dy: cute.Pointer, marks_P: cute.Tensor, rows: Int32, width: Int32):
        row_bytes = Int64(width) * (self.element_bits // 8)
        first = ca.block_idx()[0] * ROWS
        row, end = first + ca.warp_idx(), cutlass.min(first + ROWS, rows)
        while row < end:
            if marks_P[row] == 0:
                at = Int64(ca.lane_idx() * 16)
                while at < row_bytes:
                    ptx.store_words(dy + (row * row_bytes + at), [Uint32(0)] * 4, at < row_bytes)
                    at += 32 * 16
            row += WARPS


@cute.kernel
def fill(x: cute.Tensor, value: cutlass.Numeric, size: Int32):
    """x[:] = value, an element a thread of 128."""
    i = ca.block_idx()[0] * THREADS + ca.thread_idx()[0]
    if i < size:
        x[i] = value

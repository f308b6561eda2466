"""CuTe-DSL kernels for the tests of the host side (the DSL needs them in a file)."""

from __future__ import annotations

import cutlass
from cutlass import cute


@cute.kernel
def scale_add_kernel(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    i = cute.arch.block_idx()[0] * 128 + cute.arch.thread_idx()[0]
    if i < cute.size(a):
        c[i] = a[i] * b[i] + cutlass.Float32(1.5)


@cute.jit
def scale_add(a: cute.Tensor, b: cute.Tensor, c: cute.Tensor):
    scale_add_kernel(a, b, c).launch(grid=(cute.ceil_div(cute.size(a), 128), 1, 1), block=(128, 1, 1))


@cute.kernel
def past_the_end_kernel(c: cute.Tensor, n: cutlass.Int32):
    i = cute.arch.thread_idx()[0]
    if i < n:
        c[i] = cutlass.Float32(1)


@cute.jit
def past_the_end(c: cute.Tensor, n: cutlass.Int32):
    past_the_end_kernel(c, n).launch(grid=(1, 1, 1), block=(128, 1, 1))

"""What the grouped GEMM of every GPU backend does on the host before it launches: sizes, result, alignment."""

from typing import NamedTuple

from torch import Tensor

from mx_kernels.problem import GemmProblem

ALIGN_BYTES = 16  # the copy engine's unit: addresses and row pitches are multiples


class GemmSizes(NamedTuple):
    """Rows over all groups, groups, and the weights' N and K."""

    rows: int
    groups: int
    n: int
    k: int


def gemm_sizes(problem: GemmProblem, a: Tensor, b: Tensor, offs: Tensor | None) -> GemmSizes:
    """Sizes of operands that the op has checked."""
    if problem.mode == "wgrad":
        return GemmSizes(a.shape[0], 1 if offs is None else offs.shape[0], a.shape[1], b.shape[1])
    return GemmSizes(a.shape[0], *b.shape)


def gemm_result(problem: GemmProblem, sizes: GemmSizes, a: Tensor, out: Tensor | None) -> Tensor:
    """`out`, or a new tensor for the result."""
    if out is not None:
        return out
    rows, groups, n, k = sizes
    if problem.mode == "wgrad":
        return a.new_empty((groups, n, k), dtype=problem.out_dtype)
    return a.new_empty((rows, n if problem.mode == "fprop" else k), dtype=problem.out_dtype)


def check_gemm_alignment(backend: str, a: Tensor, b: Tensor, out: Tensor) -> None:
    """ValueError unless every row of a, b and out is a multiple of 16 bytes and starts at one."""
    for name, x in (("a", a), ("b", b), ("out", out)):
        if x.shape[-1] * x.element_size() % ALIGN_BYTES or x.data_ptr() % ALIGN_BYTES:
            raise ValueError(
                f"{name}: expected rows and an address that are multiples of {ALIGN_BYTES} bytes on {backend}, "
                f"got shape {tuple(x.shape)} of {x.dtype} at {x.data_ptr():#x}"
            )

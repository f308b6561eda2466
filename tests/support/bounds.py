"""How far from the float64 sum an fp32-accumulating GEMM may be.

The yardstick is measured, not estimated: the error of a plain sequential fp32 sum of the same products. A
result may be four times as far off, plus half an ulp of its dtype. An a-priori bound such as
K * 2^-24 * sum|ab| is hundreds of times wider for random data, wide enough to let a wrong scale pass.
"""

import torch
from torch import Tensor

_FRACTION_BITS = {torch.float32: 23, torch.bfloat16: 7, torch.float16: 10}
_MIN_EXPONENT = {torch.float32: -126, torch.bfloat16: -126, torch.float16: -14}
SAMPLE = 48


def half_ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Half the distance of neighbouring `dtype` values around float64 x, subnormals included."""
    exponent = torch.where(x == 0, _MIN_EXPONENT[dtype], torch.frexp(x).exponent - 1)
    quantum = exponent.clamp(min=_MIN_EXPONENT[dtype]) - _FRACTION_BITS[dtype]
    return torch.ldexp(torch.ones_like(x), quantum - 1)


def sequential_sum(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """fp32 (M, N): acc = fma(a, b, acc) over K in order."""
    acc = a_MK.new_zeros(a_MK.shape[0], b_NK.shape[0], dtype=torch.float32)
    for k in range(a_MK.shape[1]):
        # float64 products of fp32 values are exact; rounding their sum with acc twice is harmless here.
        acc = torch.addcmul(acc.double(), a_MK[:, k, None], b_NK[:, k]).float()
    return acc


def assert_sum_error(
    got_MN: Tensor, a_MK: Tensor, b_NK: Tensor, *, factor: float = 4.0, initial_MN: Tensor | None = None
) -> None:
    """Check got = a @ b.T against the float64 sum.

    The largest error, less half an ulp of got's dtype, is at most `factor` times the largest error of the
    sequential fp32 sum. Both are taken relative to each result's own size, sqrt(sum (a b)^2): a row that
    is small is held to its own measure, not to that of the largest row.

    Args:
        got_MN: the result to check, float32, bfloat16 or float16.
        a_MK: float64 values of the first operand, exact in fp32.
        b_NK: float64 values of the second operand, exact in fp32.
        factor: how many times the sequential error is allowed.
        initial_MN: what the result was accumulated onto.
    """
    assert got_MN.isfinite().all(), "result: expected finite values"
    exact = a_MK.double() @ b_NK.double().T
    size = (a_MK.double().square() @ b_NK.double().square().T).sqrt()
    if initial_MN is not None:
        exact += initial_MN.double()
        size = torch.hypot(size, initial_MN.double())
    excess = (got_MN.double() - exact).abs() - half_ulp(exact, got_MN.dtype)
    assert (excess[size == 0] <= 0).all(), "result: expected 0 where all products are 0"
    if got_MN.numel() == 0 or not (size > 0).any():
        return
    worst = torch.where(size > 0, excess / size, 0.0)
    allowed = factor * sequential_error(a_MK, b_NK)
    if worst.max().item() > allowed:
        m, n = divmod(int(worst.argmax()), got_MN.shape[1])
        bad = (worst > allowed).sum().item()
        raise AssertionError(
            f"result[{m}, {n}]: expected {exact[m, n].item():.9g}, got {got_MN[m, n].item():.9g}; relative error "
            f"{worst.max().item():.3g} > {allowed:.3g}; {bad} of {got_MN.numel()} elements are off"
        )


def sequential_error(a_MK: Tensor, b_NK: Tensor) -> float:
    """Largest error of the sequential fp32 sum, relative to sqrt(sum (a b)^2), over a sample of the results."""
    a, b = _sample(a_MK.double()), _sample(b_NK.double())
    size = (a.square() @ b.square().T).sqrt()
    error = (sequential_sum(a, b).double() - a @ b.T).abs()
    return torch.where(size > 0, error / size, 0.0).max().item()


def _sample(x: Tensor) -> Tensor:
    """Up to SAMPLE rows, evenly spread."""
    return x[torch.linspace(0, x.shape[0] - 1, min(SAMPLE, x.shape[0])).long()]

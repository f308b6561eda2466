"""Inputs that find faults: every exponent, signed zeros, subnormals, NaN and Inf in blocks of their own; groups and routes."""

import torch
from torch import Tensor


def awkward(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Random values over 60 powers of two with a zero block, a NaN, an Inf and subnormals."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-30, 30, shape).float())
    rows, cols = shape[-2:]
    x[..., : min(rows, 32), : min(cols, 32)] *= 0  # zeros of both signs
    x[..., rows // 2, cols // 2] = float("nan")
    x[..., rows - 1, cols - 1] = -float("inf")
    x[..., rows // 3, :] = 2.0**-130
    return x.to(dtype)


def every_bf16_maximum() -> Tensor:
    """(1024, 1024): each of the 32768 non-negative bf16 patterns is the largest magnitude of one row block."""
    amax = torch.arange(32768, dtype=torch.int32).view(1024, 32)
    below = (torch.rand(1024, 32, 32) * (amax[..., None] + 1)).to(torch.int32)
    below[..., 7] = amax
    sign = torch.randint(0, 2, below.shape, dtype=torch.int32) << 15
    return (below | sign).to(torch.int16).view(torch.bfloat16).view(1024, 1024)


def offsets(*counts: int) -> Tensor:
    return torch.tensor(counts).cumsum(0).to(torch.int32)


def routed(tokens: int, k: int, experts: int, cols: int) -> tuple[Tensor, ...]:
    """x, slot_of, token_of, offs, weights; some choices dropped, an expert without tokens."""
    ids = torch.randint(-1, experts - 1, (tokens, k))
    slot_of, token_of, offs = torch.ops.mx.route(ids, experts, "cpu")
    return torch.randn(tokens, cols).bfloat16(), slot_of, token_of, offs, torch.rand(tokens, k)

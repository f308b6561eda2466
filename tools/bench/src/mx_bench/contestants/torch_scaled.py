"""torch.nn.functional.scaled_grouped_mm with MXFP8 operands (written against torch 2.15; Blackwell only)."""

from importlib import import_module

import torch
from mx_core import MXTensor
from torch import Tensor

from mx_bench.cases import Call
from mx_bench.contestants.inputs import GemmInputs, transposed

NAME = "torch scaled_grouped_mm MXFP8"
PACKAGE = "torch"


def gemm(inputs: GemmInputs) -> dict[str, Call | str]:
    """All three modes: rows ALIGNED, scales blocked, every operand with its reduced axis contiguous."""
    if not inputs.offs.is_cuda:
        return {NAME: "needs a GPU"}
    if torch.cuda.get_device_capability(inputs.offs.device)[0] < 10:
        return {NAME: "needs a Blackwell GPU"}
    functional = import_module("torch.nn.functional")
    recipe, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
    operands = [
        _wgrad(inputs, *pair) if inputs.mode == "wgrad" else _rows(inputs, *pair) for pair in inputs.scaled
    ]

    def call(i: int) -> Tensor:
        a, a_scale, b, b_scale = operands[i % len(operands)]
        return functional.scaled_grouped_mm(
            a, b, a_scale, recipe, b_scale, recipe, swizzle_a=swizzle, swizzle_b=swizzle,
            offs=inputs.aligned_offs, output_dtype=torch.bfloat16,
        )  # fmt: skip

    return {NAME: call}


def _rows(inputs: GemmInputs, a: MXTensor, b: MXTensor) -> tuple[Tensor, ...]:
    """Fprop and dgrad: rows (P, K), weights (E, K, N) with K contiguous, one flat scale for each expert."""
    rows = inputs.aligned_rows
    b_codes = b.data.mT if b.axis == -1 else transposed(b.data)
    a_scale = a.scale.reshape(a.scale.shape[0] * 128, -1)[:rows]
    return a.data[:rows], _e8m0(a_scale), b_codes, _e8m0(b.scale.reshape(b.scale.shape[0], -1))


def _wgrad(inputs: GemmInputs, a: MXTensor, b: MXTensor) -> tuple[Tensor, ...]:
    """(N, P) by (P, K), groups along P; the scale tiles of one group after the other."""
    rows = inputs.aligned_rows
    a_codes, b_codes = (transposed(x.data[:rows]) for x in (a, b))
    return a_codes.mT, _by_group(inputs, a.scale), b_codes, _by_group(inputs, b.scale)


def _by_group(inputs: GemmInputs, scale: Tensor) -> Tensor:
    """Scale tiles (R/128, C/4, 32, 4, 4), a group in 128 rows a tile along C, as one block of tiles a group: (R', C')."""
    tiles = [size // 128 for size in inputs.aligned_sizes]
    parts = [part.reshape(-1) for part in scale[:, : sum(tiles)].split(tiles, dim=1)]
    return _e8m0(torch.cat(parts).view(scale.shape[0] * 128, -1))


def _e8m0(scale: Tensor) -> Tensor:
    return scale.view(torch.float8_e8m0fnu)

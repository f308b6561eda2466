"""QuACK's grouped GEMM in the CuTe DSL: BF16 on Hopper and Blackwell, MXFP8 on Blackwell (written against 0.6.5).

Not tuned unless the run is a full one: its autotuner takes minutes for every shape.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from mx_core import MXTensor
from torch import Tensor

from mx_bench.cases import Call
from mx_bench.contestants.inputs import GemmInputs

NAME = "QuACK"
PACKAGE = "quack"
Gemm = Callable[..., Tensor]


def gemm(inputs: GemmInputs) -> dict[str, Call | str]:
    """BF16 and MXFP8; fprop and dgrad as groups along M, wgrad as groups along K."""
    gemm = import_module("quack.gemm_interface").gemm
    calls: dict[str, Call | str] = {f"{NAME} BF16": bf16(inputs, gemm)}
    if not inputs.offs.is_cuda or torch.cuda.get_device_capability(inputs.offs.device)[0] >= 10:
        calls[f"{NAME} MXFP8"] = mxfp8(inputs, gemm)
    else:
        calls[f"{NAME} MXFP8"] = "needs a Blackwell GPU"
    return calls


def bf16(inputs: GemmInputs, gemm: Gemm) -> Call:
    """COMPACT rows."""

    def call(i: int) -> Tensor:
        a, b = inputs.sets[i % len(inputs.sets)]
        if inputs.mode == "wgrad":
            return gemm(a.mT, b, cu_seqlens_k=inputs.cu_seqlens, tuned=inputs.tuned)
        b = b.mT if inputs.mode == "fprop" else b
        return gemm(a, b, cu_seqlens_m=inputs.cu_seqlens, tuned=inputs.tuned)

    return call


def mxfp8(inputs: GemmInputs, gemm: Gemm) -> Call:
    """ALIGNED rows; a group's scales begin one more tile of 128 rows later than its rows do for each group before it."""
    BlockScaledOperand = import_module("quack.blockscaled").BlockScaledOperand

    def operand(mx: MXTensor, grouped: bool) -> Any:
        data, scale = mx.data, mx.scale
        if grouped:
            data = data[: inputs.aligned_rows]
            scale = _spread(inputs, scale, dim=0 if mx.axis == -1 else 1)[None]
        return BlockScaledOperand(data, scale, "mxfp8_e4m3", quant_dim=mx.axis)

    wgrad = inputs.mode == "wgrad"
    pairs = [(operand(a, True), operand(b, wgrad)) for a, b in inputs.scaled]

    def call(i: int) -> Tensor:
        a, b = pairs[i % len(pairs)]
        if wgrad:
            return gemm(a.mT, b, cu_seqlens_k=inputs.cu_seqlens_aligned, tuned=inputs.tuned)
        b = b.mT if inputs.mode == "fprop" else b
        return gemm(a, b, cu_seqlens_m=inputs.cu_seqlens_aligned, tuned=inputs.tuned)

    return call


def _spread(inputs: GemmInputs, scale: Tensor, dim: int) -> Tensor:
    """Scale tiles with one unused tile along `dim` between groups."""
    tiles = [size // 128 for size in inputs.aligned_sizes]
    empty = scale.narrow(dim, 0, 1).new_zeros(scale.narrow(dim, 0, 1).shape)
    parts = [x for part in scale.narrow(dim, 0, sum(tiles)).split(tiles, dim=dim) for x in (part, empty)]
    return torch.cat(parts[:-1], dim=dim)

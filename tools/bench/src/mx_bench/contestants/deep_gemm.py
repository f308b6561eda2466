"""DeepGEMM's grouped GEMMs: BF16 in all modes, FP8 with its own scales in fprop (written against its README of 2026-09)."""

from importlib import import_module
from typing import Any

import torch
from mx_core.groups import align_rows
from torch import Tensor

from mx_bench.cases import Call
from mx_bench.contestants.inputs import GemmInputs

NAME = "DeepGEMM"
PACKAGE = "deep_gemm"


def gemm(inputs: GemmInputs) -> dict[str, Call | str]:
    """Its "contiguous" layout: groups padded to 128 rows, the group of every row in a tensor."""
    deep_gemm = import_module("deep_gemm")
    sets = [_aligned(inputs, a, b) for a, b in inputs.sets]
    calls: dict[str, Call | str] = {f"{NAME} BF16": _bf16(deep_gemm, inputs, sets)}
    if inputs.mode == "fprop":
        calls[f"{NAME} FP8, 1 x 128 scales, not MX"] = _fp8(deep_gemm, inputs, sets)
    return calls


def _aligned(inputs: GemmInputs, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    rows = inputs.aligned_rows
    a = align_rows(a, inputs.offs)[:rows].contiguous()
    return a, align_rows(b, inputs.offs)[:rows].contiguous() if inputs.mode == "wgrad" else b


def _groups(inputs: GemmInputs) -> Tensor:
    """int32 (rows,): the group of every row."""
    sizes = torch.tensor(inputs.aligned_sizes, device=inputs.offs.device)
    return torch.arange(len(sizes), dtype=torch.int32, device=sizes.device).repeat_interleave(sizes)


def _bf16(deep_gemm: Any, inputs: GemmInputs, sets: list[tuple[Tensor, Tensor]]) -> Call:
    a, b = sets[0]
    if inputs.mode == "wgrad":
        out = a.new_empty(len(inputs.sizes), a.shape[1], b.shape[1], dtype=torch.float32)
        sizes = torch.tensor(inputs.aligned_sizes, dtype=torch.int32, device=a.device)

        def wgrad(i: int) -> Tensor:
            a, b = sets[i % len(sets)]
            deep_gemm.k_grouped_bf16_gemm_tn_contiguous(a, b, out, inputs.aligned_sizes, sizes)
            return out

        return wgrad
    nt = inputs.mode == "fprop"
    function = (
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous if nt else deep_gemm.m_grouped_bf16_gemm_nn_contiguous
    )
    out, groups = a.new_empty(a.shape[0], b.shape[1 if nt else 2]), _groups(inputs)

    def call(i: int) -> Tensor:
        function(*sets[i % len(sets)], out, groups)
        return out

    return call


def _fp8(deep_gemm: Any, inputs: GemmInputs, sets: list[tuple[Tensor, Tensor]]) -> Call:
    utils = import_module("deep_gemm.utils")
    powers_of_two = (
        torch.cuda.get_device_capability(inputs.offs.device)[0] >= 10
    )  # of scales: it wants E8M0 there

    def weights(w: Tensor) -> tuple[Tensor, Tensor]:
        codes, scales = zip(
            *(utils.per_block_cast_to_fp8(e, use_ue8m0=powers_of_two) for e in w), strict=True
        )
        return torch.stack(codes), torch.stack(scales)

    cast = [(utils.per_token_cast_to_fp8(a, use_ue8m0=powers_of_two), weights(b)) for a, b in sets]
    out, groups = sets[0][0].new_empty(sets[0][0].shape[0], sets[0][1].shape[1]), _groups(inputs)

    def call(i: int) -> Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous(*cast[i % len(cast)], out, groups)
        return out

    return call

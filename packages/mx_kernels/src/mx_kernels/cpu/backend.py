"""Every op on CPU tensors, by mx_core's reference; all formats, roundings, layouts and row maps.

Exact where the contract is exact; GEMMs sum in fp32, as on a GPU, unless scales are so large that fp32 would overflow.
Where the contract leaves rows unspecified this backend writes zeros.
"""

import torch
from mx_core import FORMATS, MXTensor, RowMap, ScaleLayout, quantize, reference
from mx_core.groups import align_rows, is_real_row
from mx_core.reference.gemm import float32_holds
from mx_core.scale_layout import to_layout
from torch import Tensor

from mx_kernels.problem import (
    CombineProblem,
    DSwigluProblem,
    GatherProblem,
    GatherQuantizeProblem,
    GemmProblem,
    Problem,
    QuantizeProblem,
    RouteProblem,
    SlotWeightsProblem,
    SwigluProblem,
)

_GEMMS = {
    "fprop": reference.grouped_fprop,
    "dgrad": reference.grouped_dgrad,
    "wgrad": reference.grouped_wgrad,
}


def _quantized(x: Tensor, axis: int, problem) -> tuple[Tensor, Tensor]:
    mx = quantize(x, FORMATS[problem.format], axis=axis, rounding=problem.rounding, layout=problem.layout)
    return mx.data, mx.scale


class CpuBackend:
    """See the module. Without grad: the ops have formulas of their own, or none."""

    name = "cpu"

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """It takes every problem; the registry has seen to it that these are CPU tensors."""
        return None

    @torch.no_grad()
    def quantize(self, problem: QuantizeProblem, x: Tensor, offs: Tensor | None) -> tuple[Tensor, ...]:
        if offs is not None and problem.orientation == "row" and problem.row_map is RowMap.COMPACT:
            return self._quantize_compact(problem, x, offs)
        if offs is not None:
            x = align_rows(x, offs)
        row = _quantized(x, -1, problem) if problem.orientation != "col" else ()
        col = _quantized(x, -2, problem) if problem.orientation != "row" else ()
        return *row, *col

    def _quantize_compact(self, problem: QuantizeProblem, x: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
        """Data keep x's rows; blocked scales have a tile of their own for every group."""
        x = torch.where(is_real_row(offs, x.shape[0], RowMap.COMPACT)[:, None], x, 0)
        mx = quantize(x, FORMATS[problem.format], rounding=problem.rounding)
        scale = mx.scale if problem.layout is ScaleLayout.LINEAR else align_rows(mx.scale, offs)
        return mx.data, to_layout(scale, problem.layout)

    @torch.no_grad()
    def gather_quantize(
        self, problem: GatherQuantizeProblem, x: Tensor, token_of: Tensor, slot_weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        rows = reference.gather(x, token_of)
        row = _quantized(rows, -1, problem) if problem.orientation != "col" else ()
        if problem.orientation == "row":
            return row
        if slot_weights is not None:
            rows = rows.to(torch.float32) * slot_weights[:, None]
        return *row, *_quantized(rows, -2, problem)

    @torch.no_grad()
    def route(self, problem: RouteProblem, topk_ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return reference.route(topk_ids, problem.num_experts)

    @torch.no_grad()
    def slot_weights(
        self, problem: SlotWeightsProblem, weights: Tensor, slot_of: Tensor, rows: int
    ) -> Tensor:
        return reference.slot_weights(weights, slot_of, rows)

    @torch.no_grad()
    def gather(self, problem: GatherProblem, x: Tensor, token_of: Tensor) -> Tensor:
        return reference.gather(x, token_of)

    @torch.no_grad()
    def swiglu(self, problem: SwigluProblem, h: Tensor, offs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        if problem.format is None:
            return reference.swiglu(h, offs)
        return _quantized(reference.swiglu(h, offs, out_dtype=torch.float32), -1, problem)

    @torch.no_grad()
    def dswiglu(
        self, problem: DSwigluProblem, da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor
    ) -> tuple[Tensor, ...]:
        if problem.format is None:
            return reference.dswiglu(da, h, slot_weights, offs)
        dh, _, dw = reference.dswiglu(da, h, slot_weights, offs, out_dtype=torch.float32)
        row = _quantized(dh, -1, problem)
        if not problem.columns:
            return *row, dw
        a = reference.swiglu(h, offs, out_dtype=torch.float32)
        return *row, *_quantized(dh, -2, problem), *_quantized(a, -2, problem), dw

    @torch.no_grad()
    def combine(self, problem: CombineProblem, y: Tensor, slot_of: Tensor, weights: Tensor | None) -> Tensor:
        return reference.combine(y, slot_of, weights)

    @torch.no_grad()
    def combine_backward(
        self, problem: CombineProblem, dout: Tensor, y: Tensor, slot_of: Tensor, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        return reference.combine_backward(dout, y, slot_of, weights)

    @torch.no_grad()
    def grouped_gemm(
        self,
        problem: GemmProblem,
        a: Tensor,
        a_scale: Tensor | None,
        b: Tensor,
        b_scale: Tensor | None,
        offs: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        a_axis = -2 if problem.mode == "wgrad" else -1
        b_axis = -1 if problem.mode == "fprop" else -2
        a_operand = _operand(a, a_scale, problem.a_format, a_axis)
        b_operand = _operand(b, b_scale, problem.b_format, b_axis)
        sum_dtype = torch.float32 if float32_holds(a_operand, b_operand) else torch.float64
        result = _GEMMS[problem.mode](
            a_operand,
            b_operand,
            offs,
            out_dtype=problem.out_dtype,
            row_map=problem.row_map,
            sum_dtype=sum_dtype,
        )
        if out is None:
            return result
        return out.add_(result) if problem.accumulate else out.copy_(result)


def _operand(data: Tensor, scale: Tensor | None, format: str, axis: int) -> Tensor | MXTensor:
    if scale is None:
        return data
    found = FORMATS[format]
    cols = data.shape[-1] * 8 // found.bits
    return MXTensor(data, scale, found, axis, ScaleLayout.BLOCKED_128X4, torch.Size((*data.shape[:-1], cols)))


BACKEND = CpuBackend()

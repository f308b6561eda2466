"""From tokens to the experts' rows and back: route, slot_weights, gather (quantised or not), combine.

Rows are ALIGNED: P = aligned_rows(T·k, E). `slot_of` (T, k) is the row of every choice, -1 where it was dropped;
`token_of` (P,) is the token of every row, -1 on padding. The values of both come from `route` and are trusted: an index
outside [-1, P) or [-1, T) reads or writes outside the tensors.
"""

from typing import NamedTuple

import torch
from mx_core import MXFP8_E4M3, ElementFormat, MXTensor, ScaleLayout, ScaleRounding
from mx_core.checks import check_choice, check_format, expected
from mx_core.groups import aligned_rows
from torch import Tensor

from mx_kernels import registry
from mx_kernels.ops.checks import check_aligned, check_matrix, check_tensor
from mx_kernels.ops.library import define_prepared
from mx_kernels.outputs import as_mx, empty_quantized
from mx_kernels.problem import (
    ID_DTYPES,
    CombineProblem,
    GatherProblem,
    GatherQuantizeProblem,
    RouteProblem,
    SlotWeightsProblem,
)

_INT32, _FLOAT32 = (torch.int32,), (torch.float32,)


# route ---------------------------------------------------------------------------------------------------------------


def _check_route(topk_ids: Tensor, num_experts: int) -> None:
    check_tensor("topk_ids", topk_ids, (None, None), ID_DTYPES, topk_ids.device)
    if num_experts < 1 or topk_ids.shape[1] < 1:
        raise ValueError(
            expected(
                "topk_ids, num_experts", "k >= 1 and E >= 1", f"k = {topk_ids.shape[1]}, E = {num_experts}"
            )
        )


def _route(topk_ids, num_experts, backend="auto"):
    _check_route(topk_ids, num_experts)
    problem = RouteProblem, topk_ids.dtype, topk_ids.shape[1], num_experts
    return registry.prepare("route", backend, (topk_ids,), *problem)


def _route_fake(topk_ids, num_experts, backend="auto"):
    _check_route(topk_ids, num_experts)
    T, k = topk_ids.shape
    return tuple(
        topk_ids.new_empty(shape, dtype=torch.int32)
        for shape in ((T, k), (aligned_rows(T * k, num_experts),), (num_experts,))
    )


define_prepared(
    "route(Tensor topk_ids, int num_experts, str backend='auto') -> (Tensor slot_of, Tensor token_of, Tensor offs)",
    _route,
    _route_fake,
)


# slot_weights --------------------------------------------------------------------------------------------------------


def _check_slots(slot_of: Tensor, device: torch.device) -> None:
    check_tensor("slot_of", slot_of, (None, None), _INT32, device)


def _slot_weights(weights, slot_of, rows, backend="auto"):
    _check_slots(slot_of, slot_of.device)
    check_tensor("weights", weights, slot_of.shape, _FLOAT32, slot_of.device)
    check_aligned("rows", rows)
    args = weights, slot_of, rows
    return registry.prepare("slot_weights", backend, args, SlotWeightsProblem, slot_of.shape[1])


def _slot_weights_fake(weights, slot_of, rows, backend="auto"):
    _check_slots(slot_of, slot_of.device)
    check_tensor("weights", weights, slot_of.shape, _FLOAT32, slot_of.device)
    check_aligned("rows", rows)
    return weights.new_empty(rows)


define_prepared(
    "slot_weights(Tensor weights, Tensor slot_of, SymInt rows, str backend='auto') -> Tensor",
    _slot_weights,
    _slot_weights_fake,
)


# gather, gather_quantize ---------------------------------------------------------------------------------------------


def _check_gather(x: Tensor, token_of: Tensor, slot_weights: Tensor | None = None) -> None:
    check_matrix("x", x)
    check_tensor("token_of", token_of, (None,), _INT32, x.device)
    check_aligned("token_of", token_of.shape[0])
    if slot_weights is not None:
        check_tensor("slot_weights", slot_weights, token_of.shape, _FLOAT32, x.device)


def _gather(x, token_of, backend="auto"):
    _check_gather(x, token_of)
    return registry.prepare("gather", backend, (x, token_of), GatherProblem, x.dtype)


def _gather_fake(x, token_of, backend="auto"):
    _check_gather(x, token_of)
    return x.new_empty(token_of.shape[0], x.shape[1])


def _gather_orientation(axis: int, slot_weights: Tensor | None) -> str:
    if axis != -1 and axis != -2:
        raise ValueError(expected("axis", "-1 or -2", axis))
    if axis == -1 and slot_weights is not None:
        raise ValueError(
            expected("slot_weights", "None with axis -1 (they scale the column copy only)", "a tensor")
        )
    return "row" if axis == -1 else "col"


def _gather_quantize(x, token_of, slot_weights, format, axis, rounding, layout, backend="auto"):
    _check_gather(x, token_of, slot_weights)
    orientation = _gather_orientation(axis, slot_weights)
    return registry.prepare(
        "gather_quantize", backend, (x, token_of, slot_weights), GatherQuantizeProblem,
        x.dtype, format, rounding, layout, orientation, slot_weights is not None,
    )  # fmt: skip


def _gather_quantize_fake(x, token_of, slot_weights, format, axis, rounding, layout, backend="auto"):
    _check_gather(x, token_of, slot_weights)
    GatherQuantizeProblem(x.dtype, format, rounding, layout, _gather_orientation(axis, slot_weights))
    return empty_quantized(x, (token_of.shape[0], x.shape[1]), axis, format, layout)


def _gather_quantize_dual(x, token_of, slot_weights, format, rounding, layout, backend="auto"):
    _check_gather(x, token_of, slot_weights)
    return registry.prepare(
        "gather_quantize", backend, (x, token_of, slot_weights), GatherQuantizeProblem,
        x.dtype, format, rounding, layout, "dual", slot_weights is not None,
    )  # fmt: skip


def _gather_quantize_dual_fake(x, token_of, slot_weights, format, rounding, layout, backend="auto"):
    _check_gather(x, token_of, slot_weights)
    GatherQuantizeProblem(x.dtype, format, rounding, layout, "dual")
    shape = (token_of.shape[0], x.shape[1])
    return *empty_quantized(x, shape, -1, format, layout), *empty_quantized(x, shape, -2, format, layout)


define_prepared("gather(Tensor x, Tensor token_of, str backend='auto') -> Tensor", _gather, _gather_fake)
define_prepared(
    "gather_quantize(Tensor x, Tensor token_of, Tensor? slot_weights, str format, int axis, str rounding, str layout, "
    "str backend='auto') -> (Tensor data, Tensor scale)",
    _gather_quantize,
    _gather_quantize_fake,
)
define_prepared(
    "gather_quantize_dual(Tensor x, Tensor token_of, Tensor? slot_weights, str format, str rounding, str layout, "
    "str backend='auto') -> (Tensor row_data, Tensor row_scale, Tensor col_data, Tensor col_scale)",
    _gather_quantize_dual,
    _gather_quantize_dual_fake,
)


# combine -------------------------------------------------------------------------------------------------------------


def _check_combine(y: Tensor, slot_of: Tensor, weights: Tensor | None) -> None:
    check_matrix("y", y)
    _check_slots(slot_of, y.device)
    if weights is not None:
        check_tensor("weights", weights, slot_of.shape, _FLOAT32, y.device)


def _combine(y, slot_of, weights=None, backend="auto"):
    _check_combine(y, slot_of, weights)
    problem = CombineProblem, y.dtype, slot_of.shape[1], weights is not None
    return registry.prepare("combine", backend, (y, slot_of, weights), *problem)


def _combine_fake(y, slot_of, weights=None, backend="auto"):
    _check_combine(y, slot_of, weights)
    return y.new_empty(slot_of.shape[0], y.shape[1])


def _check_combine_backward(dout: Tensor, y: Tensor, slot_of: Tensor, weights: Tensor) -> None:
    _check_combine(y, slot_of, weights)
    check_tensor("dout", dout, (slot_of.shape[0], y.shape[1]), (y.dtype,), y.device)


def _combine_backward(dout, y, slot_of, weights, backend="auto"):
    _check_combine_backward(dout, y, slot_of, weights)
    problem = CombineProblem, y.dtype, slot_of.shape[1], True, True
    return registry.prepare("combine_backward", backend, (dout, y, slot_of, weights), *problem)


def _combine_backward_fake(dout, y, slot_of, weights, backend="auto"):
    _check_combine_backward(dout, y, slot_of, weights)
    return torch.empty_like(y), torch.empty_like(weights)


define_prepared(
    "combine(Tensor y, Tensor slot_of, Tensor? weights=None, str backend='auto') -> Tensor",
    _combine,
    _combine_fake,
    differentiable=True,
)
define_prepared(
    "combine_backward(Tensor dout, Tensor y, Tensor slot_of, Tensor weights, str backend='auto') "
    "-> (Tensor dy, Tensor dweights)",
    _combine_backward,
    _combine_backward_fake,
)


# what users call -----------------------------------------------------------------------------------------------------


class Routing(NamedTuple):
    """Where every token's choices go: slot_of int32 (T, k), token_of int32 (P,), offs int32 (E,)."""

    slot_of: Tensor
    token_of: Tensor
    offs: Tensor


def route(topk_ids: Tensor, num_experts: int, *, backend: str = "auto") -> Routing:
    """Give every choice its row among the experts' ALIGNED rows; stable inside an expert, all on the device.

    Args:
        topk_ids: int32 or int64 (T, k), contiguous; ids outside [0, num_experts) are dropped.
        num_experts: E.
        backend: "auto", "cpu", "sm90" or "sm100".
    """
    return Routing(*torch.ops.mx.route(topk_ids, num_experts, backend))


def gather(x: Tensor, token_of: Tensor, *, backend: str = "auto") -> Tensor:
    """Rows of x (T, D) by token_of (P,): (P, D), zero on padding. Not differentiable (`combine` is its transpose)."""
    return torch.ops.mx.gather(x, token_of, backend)


def gather_quantize(
    x: Tensor,
    token_of: Tensor,
    slot_weights: Tensor | None = None,
    format: ElementFormat | str = MXFP8_E4M3,
    *,
    axis: int = -1,
    rounding: ScaleRounding = ScaleRounding.RCEIL,
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4,
    backend: str = "auto",
) -> MXTensor:
    """Quantise the gathered rows of x without storing them. Not differentiable.

    Args:
        x: (T, D) bf16 or fp32, contiguous, D a multiple of 32.
        token_of: int32 (P,) from `route`; -1 gives a row of zeros.
        slot_weights: float32 (P,), with axis -2 only: the rows are multiplied by it in fp32 first.
        format: element format, or its name.
        axis: -1, or -2 for blocks that run down the rows.
        rounding: the scale rule.
        layout: of the scales.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        MXTensor (P, D).
    """
    format, layout = check_format("format", format), check_choice("layout", layout, ScaleLayout)
    data, scale = torch.ops.mx.gather_quantize(
        x, token_of, slot_weights, format.name, axis, rounding, layout, backend
    )
    return as_mx((data, scale), format, axis, layout, (token_of.shape[0], x.shape[1]))


def gather_quantize_dual(
    x: Tensor,
    token_of: Tensor,
    slot_weights: Tensor | None = None,
    format: ElementFormat | str = MXFP8_E4M3,
    *,
    rounding: ScaleRounding = ScaleRounding.RCEIL,
    layout: ScaleLayout = ScaleLayout.BLOCKED_128X4,
    backend: str = "auto",
) -> tuple[MXTensor, MXTensor]:
    """Both orientations from one read: `gather_quantize` with axis -1 unweighted, and with axis -2 and the weights."""
    format, layout = check_format("format", format), check_choice("layout", layout, ScaleLayout)
    parts = torch.ops.mx.gather_quantize_dual(
        x, token_of, slot_weights, format.name, rounding, layout, backend
    )
    shape = (token_of.shape[0], x.shape[1])
    return as_mx(parts[:2], format, -1, layout, shape), as_mx(parts[2:], format, -2, layout, shape)


def combine(y: Tensor, slot_of: Tensor, weights: Tensor | None = None, *, backend: str = "auto") -> Tensor:
    """Sum the experts' results of every token, j ascending: acc = fma(w_j, y_j, acc) in fp32. Differentiable.

    Args:
        y: (P, D) bf16 or fp32, contiguous, D a multiple of 32.
        slot_of: int32 (T, k) from `route`; -1 adds nothing.
        weights: float32 (T, k), or None for weights of 1.
        backend: "auto", "cpu", "sm90" or "sm100".

    Returns:
        (T, D) in y's dtype.
    """
    return torch.ops.mx.combine(y, slot_of, weights, backend)

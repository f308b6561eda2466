"""Backward formulas: the MoE layer (steps F1–F5, B1–B7 of docs/kernels.md), grouped linear layers, combine, SwiGLU.

The layer is one autograd.Function over several torch ops, so that selective activation checkpointing can choose among
them. Nothing here is differentiable twice.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mx_kernels.operands import ALIGNED, COMPACT, Operand, Operands, grouped_gemm, operands_of
from mx_kernels.ops.library import LIBRARY
from mx_kernels.recipe import Recipe


def prepared_operand(parts: Sequence[Tensor], first: int, recipe: Recipe) -> Operand | None:
    """The operand whose data is parts[first], its scales next to it; None where nothing was prepared."""
    if first >= len(parts):
        return None
    assert recipe.format is not None
    return Operand(parts[first], parts[first + 1], recipe.format)


def weight_for_dgrad(
    ops: Operands, kept: Sequence[Tensor], index: int, recipe: Recipe, dtype: torch.dtype
) -> Operand:
    """W1 (index 0) or W2 (1) for dgrad: prepared, if `kept` holds (data, scale) of both, else made from the weight."""
    if len(kept) == 2:
        return ops.weight_col(kept[index], dtype)
    operand = prepared_operand(kept, 2 * index, recipe)
    assert operand is not None
    return operand


Make = Callable[[], Operand]
"""Operands are handed over as functions: each is made where it is used and freed right after."""


def forward_experts(
    ops: Operands, x_row: Make, w1_row: Make, w2_row: Make, offs: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Steps F1–F4, from the experts' ALIGNED rows to y (P, D); and h (P, 2H), which the backward pass needs."""
    h = grouped_gemm("fprop", x_row(), w1_row(), offs, dtype, ALIGNED, ops.backend)
    a_row = ops.swiglu(h, offs)
    return grouped_gemm("fprop", a_row, w2_row(), offs, dtype, ALIGNED, ops.backend), h


class ExpertGrads(NamedTuple):
    """What `backward_experts` returns; None where it was not asked for."""

    dx: Tensor | None
    """(P, D), of each row of x."""
    dw: Tensor
    """(P,) fp32, of each row's router weight."""
    dw1: Tensor | None
    dw2: Tensor | None


def backward_experts(
    ops: Operands,
    dout: Callable[[], tuple[Operand, Operand | None]],
    h: Tensor,
    slot_weights: Tensor,
    offs: Tensor,
    w1_col: Make,
    w2_col: Make,
    x_col: Make,
    need_x: bool,
    w_dtypes: tuple[torch.dtype | None, torch.dtype | None],
) -> ExpertGrads:
    """Steps B1–B6 on ALIGNED rows.

    Args:
        ops: of the recipe.
        dout: the gradient of the layer's output at each row: as it is for dgrad, times the router's weight for wgrad
            (`ops.gather_dout`; the second is None where no dw2 is wanted).
        h: (P, 2H), of the forward pass.
        slot_weights: (P,) fp32, the router's weights.
        offs: (E,).
        w1_col: W1 for dgrad.
        w2_col: W2 for dgrad.
        x_col: the rows of x for wgrad.
        need_x: whether dx is wanted.
        w_dtypes: dtypes of dw1 and dw2, None where they are not wanted.
    """
    backend, dtype = ops.backend, h.dtype
    dy_row, dy_col = dout()  # B1
    da = grouped_gemm("dgrad", dy_row, w2_col(), offs, dtype, ALIGNED, backend)  # B2
    del dy_row
    dh_row, dh_col, a_col, dw = ops.dswiglu(da, h, slot_weights, offs, w_dtypes != (None, None))  # B3
    del da
    dx = dw1 = dw2 = None
    if w_dtypes[1]:  # B4
        dw2 = grouped_gemm("wgrad", dy_col, a_col, offs, w_dtypes[1], ALIGNED, backend)
    del dy_col, a_col
    if w_dtypes[0]:  # B6
        dw1 = grouped_gemm("wgrad", dh_col, x_col(), offs, w_dtypes[0], ALIGNED, backend)
    del dh_col
    if need_x:  # B5
        dx = grouped_gemm("dgrad", dh_row, w1_col(), offs, dtype, ALIGNED, backend)
    return ExpertGrads(dx, dw, dw1, dw2)


class MoeMlp(torch.autograd.Function):
    """The experts' part of an MoE layer, from routed tokens to combined outputs.

    `prepared` holds what `prepare_weights` made: nothing, or (data, scale) of W1 and W2 for fprop, then of W1 and W2
    for dgrad.
    """

    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        weights_Tk: Tensor,
        w1: Tensor,
        w2: Tensor,
        slot_of: Tensor,
        token_of: Tensor,
        offs: Tensor,
        recipe: Recipe,
        backend: str,
        *prepared: Tensor,
    ) -> Tensor:
        ops, dtype = operands_of(recipe, backend), x_TD.dtype
        y, h = forward_experts(  # F1–F4
            ops,
            lambda: ops.gather_row(x_TD, token_of),
            lambda: prepared_operand(prepared, 0, recipe) or ops.weight_row(w1, dtype),
            lambda: prepared_operand(prepared, 2, recipe) or ops.weight_row(w2, dtype),
            offs,
            dtype,
        )
        ctx.recipe, ctx.backend, ctx.w_dtypes = recipe, backend, (w1.dtype, w2.dtype)
        x_if_needed = x_TD if ctx.needs_input_grad[2] else None  # for dW1 only
        kept = prepared[4:] or (w1, w2)  # what the dgrads need
        ctx.save_for_backward(x_if_needed, weights_Tk, h, slot_of, token_of, offs, *kept)
        return torch.ops.mx.combine(y, slot_of, weights_Tk, backend)  # F5

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyrefly: ignore[bad-override]
        need_x, need_weights, need_w1, need_w2 = ctx.needs_input_grad[:4]
        recipe, backend, (w1_dtype, w2_dtype) = ctx.recipe, ctx.backend, ctx.w_dtypes
        x_TD, weights_Tk, h, slot_of, token_of, offs, *kept = ctx.saved_tensors
        ops = operands_of(recipe, backend)
        dout_TD = grads[0].contiguous()
        slot_weights = torch.ops.mx.slot_weights(weights_Tk, slot_of, token_of.shape[0], backend)
        dx_P, dw, dw1, dw2 = backward_experts(  # B1–B6
            ops,
            lambda: (
                ops.gather_dout(dout_TD, token_of, slot_weights)
                if need_w2
                else (ops.gather_row(dout_TD, token_of), None)
            ),
            h,
            slot_weights,
            offs,
            lambda: weight_for_dgrad(ops, kept, 0, recipe, h.dtype),
            lambda: weight_for_dgrad(ops, kept, 1, recipe, h.dtype),
            lambda: ops.gather_col(x_TD, token_of),
            need_x,
            (w1_dtype if need_w1 else None, w2_dtype if need_w2 else None),
        )
        dx = torch.ops.mx.combine(dx_P, slot_of, None, backend) if need_x else None  # B7
        dweights = torch.where(slot_of >= 0, dw[slot_of.clamp(min=0)], 0.0) if need_weights else None
        return dx, dweights, dw1, dw2, *(None,) * (len(ctx.needs_input_grad) - 4)


class GroupedLinear(torch.autograd.Function):
    """y = x @ w[g].T over COMPACT rows; `offs` None: one group.

    `prepared`: nothing, or (data, scale) of w for fprop, then for dgrad.
    """

    @staticmethod
    def forward(
        ctx,
        x_MK: Tensor,
        w_ENK: Tensor,
        offs: Tensor | None,
        out_dtype: torch.dtype,
        recipe: Recipe,
        backend: str,
        *prepared: Tensor,
    ) -> Tensor:
        ops = operands_of(recipe, backend)
        w_row = prepared_operand(prepared, 0, recipe) or ops.weight_row(w_ENK, x_MK.dtype)
        ctx.recipe, ctx.backend, ctx.w_dtype = recipe, backend, w_ENK.dtype
        ctx.save_for_backward(x_MK, offs, *(prepared[2:] or (w_ENK,)))
        return grouped_gemm("fprop", ops.rows(x_MK, offs), w_row, offs, out_dtype, COMPACT, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyrefly: ignore[bad-override]
        (dy_MN,) = grads
        need_x, need_w = ctx.needs_input_grad[:2]
        backend = ctx.backend
        x_MK, offs, *kept = ctx.saved_tensors
        ops = operands_of(ctx.recipe, backend)
        dy_MN = dy_MN.to(x_MK.dtype).contiguous()
        dx = dw = dy_row = dy_col = None
        if need_x and need_w:
            dy_row, dy_col = ops.rows_and_cols(dy_MN, offs)
        elif need_x:
            dy_row = ops.rows(dy_MN, offs)
        elif need_w:
            dy_col = ops.cols(dy_MN, offs)
        if need_x:
            w_col = (
                ops.weight_col(kept[0], x_MK.dtype)
                if len(kept) == 1
                else prepared_operand(kept, 0, ctx.recipe)
            )
            dx = grouped_gemm("dgrad", dy_row, w_col, offs, x_MK.dtype, COMPACT, backend)
        if need_w:
            x_col = ops.cols(x_MK, offs)
            dw = grouped_gemm("wgrad", dy_col, x_col, offs, ctx.w_dtype, ops.wgrad_row_map, backend)
        return dx, dw, *(None,) * (len(ctx.needs_input_grad) - 2)


class GroupedOuter(torch.autograd.Function):
    """out[g] = a[g].T @ b[g] for COMPACT rows a (M, N), b (M, K): the GEMM of a weight gradient, as a function."""

    @staticmethod
    def forward(
        ctx, a_MN: Tensor, b_MK: Tensor, offs: Tensor, out_dtype: torch.dtype, recipe: Recipe, backend: str
    ) -> Tensor:
        ops = operands_of(recipe, backend)
        ctx.recipe, ctx.backend = recipe, backend
        ctx.save_for_backward(a_MN, b_MK, offs)
        a_col, b_col = ops.cols(a_MN, offs), ops.cols(b_MK, offs)
        return grouped_gemm("wgrad", a_col, b_col, offs, out_dtype, ops.wgrad_row_map, backend)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyrefly: ignore[bad-override]
        (dout_ENK,) = grads
        need_a, need_b = ctx.needs_input_grad[:2]
        backend = ctx.backend
        a_MN, b_MK, offs = ctx.saved_tensors
        ops = operands_of(ctx.recipe, backend)
        dout_ENK = dout_ENK.contiguous()
        da = db = None
        if need_a:  # da[rows of g] = b[rows of g] @ dout[g].T
            dout_row = ops.weight_row(dout_ENK, b_MK.dtype)
            da = grouped_gemm("fprop", ops.rows(b_MK, offs), dout_row, offs, a_MN.dtype, COMPACT, backend)
        if need_b:  # db[rows of g] = a[rows of g] @ dout[g]
            dout_col = ops.weight_col(dout_ENK, a_MN.dtype)
            db = grouped_gemm("dgrad", ops.rows(a_MN, offs), dout_col, offs, b_MK.dtype, COMPACT, backend)
        return da, db, None, None, None, None


# combine and swiglu: formulas on the ops themselves ------------------------------------------------------------------


def _setup_combine(ctx, inputs, output) -> None:
    y, slot_of, weights, ctx.backend = inputs
    ctx.rows = y.shape[0]
    ctx.save_for_backward(y if weights is not None else None, slot_of, weights)


def _combine_backward(ctx, dout):
    y, slot_of, weights = ctx.saved_tensors
    dout = dout.contiguous()
    if weights is not None:
        dy, dweights = torch.ops.mx.combine_backward(dout, y, slot_of, weights, ctx.backend)
        return dy, None, dweights, None
    ones = torch.ones(slot_of.shape, dtype=torch.float32, device=dout.device)
    y = dout.new_zeros(ctx.rows, dout.shape[1])  # only its shape matters: the weights' gradient is dropped
    return torch.ops.mx.combine_backward(dout, y, slot_of, ones, ctx.backend)[0], None, None, None


def _setup_swiglu(ctx, inputs, output) -> None:
    h, offs, ctx.backend = inputs
    ctx.save_for_backward(h, offs)


def _swiglu_backward(ctx, da):
    h, offs = ctx.saved_tensors
    ones = torch.ones(h.shape[0], dtype=torch.float32, device=h.device)
    return torch.ops.mx.dswiglu(da.contiguous(), h, ones, offs, ctx.backend)[0], None, None


torch.library.register_autograd("mx::combine", _combine_backward, setup_context=_setup_combine, lib=LIBRARY)
torch.library.register_autograd("mx::swiglu", _swiglu_backward, setup_context=_setup_swiglu, lib=LIBRARY)

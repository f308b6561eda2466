"""Backward formulas: the MoE layer (steps F1–F5, B1–B7 of docs/kernels.md), grouped linear layers, combine, SwiGLU.

The layer is one autograd.Function over several torch ops, so that selective activation checkpointing can choose among
them. Nothing here is differentiable twice.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mx_kernels.operands import ALIGNED, COMPACT, Operand, grouped_gemm, operands_of
from mx_kernels.ops.library import LIBRARY
from mx_kernels.recipe import Recipe


def _prepared(parts: Sequence[Tensor], first: int, format: str | None) -> Operand | None:
    """The operand whose data is parts[first], its scales next to it; None where nothing was prepared."""
    if first >= len(parts):
        return None
    assert format is not None
    return Operand(parts[first], parts[first + 1], format)


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
        w1_row = _prepared(prepared, 0, recipe.format) or ops.weight_row(w1, dtype)
        x_row = ops.gather_row(x_TD, token_of)  # F1
        h = grouped_gemm("fprop", x_row, w1_row, offs, dtype, ALIGNED, backend)  # F2
        del x_row, w1_row
        w2_row = _prepared(prepared, 2, recipe.format) or ops.weight_row(w2, dtype)
        a_row = ops.swiglu(h, offs)  # F3
        y = grouped_gemm("fprop", a_row, w2_row, offs, dtype, ALIGNED, backend)  # F4
        del a_row, w2_row
        ctx.recipe, ctx.backend, ctx.w_dtypes = recipe, backend, (w1.dtype, w2.dtype)
        x_if_needed = x_TD if ctx.needs_input_grad[2] else None  # for dW1 only
        kept = prepared[4:] or (w1, w2)  # what the dgrads need
        ctx.save_for_backward(x_if_needed, weights_Tk, h, slot_of, token_of, offs, *kept)
        return torch.ops.mx.combine(y, slot_of, weights_Tk, backend)  # F5

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyrefly: ignore[bad-override]
        need_x, need_weights, need_w1, need_w2 = ctx.needs_input_grad[:4]
        recipe, backend = ctx.recipe, ctx.backend
        x_TD, weights_Tk, h, slot_of, token_of, offs, *kept = ctx.saved_tensors
        ops, dtype = operands_of(recipe, backend), h.dtype
        if len(kept) == 2:
            w1_col, w2_col = None, ops.weight_col(kept[1], dtype)
        else:
            w1_col, w2_col = _prepared(kept, 0, recipe.format), _prepared(kept, 2, recipe.format)

        dout_TD = grads[0].contiguous()
        slot_weights = torch.ops.mx.slot_weights(weights_Tk, slot_of, token_of.shape[0], backend)
        if need_w2:  # B1
            dy_row, dy_col = ops.gather_dout(dout_TD, token_of, slot_weights)
        else:
            dy_row, dy_col = ops.gather_row(dout_TD, token_of), None
        da = grouped_gemm("dgrad", dy_row, w2_col, offs, dtype, ALIGNED, backend)  # B2
        del dy_row, w2_col
        dh_row, dh_col, a_col, dw = ops.dswiglu(da, h, slot_weights, offs, need_w1 or need_w2)  # B3
        del da

        dx = dweights = dw1 = dw2 = None
        if need_w2:  # B4
            dw2 = grouped_gemm("wgrad", dy_col, a_col, offs, ctx.w_dtypes[1], ALIGNED, backend)
        del dy_col, a_col
        if need_w1:  # B6
            x_col = ops.gather_col(x_TD, token_of)
            dw1 = grouped_gemm("wgrad", dh_col, x_col, offs, ctx.w_dtypes[0], ALIGNED, backend)
            del x_col
        del dh_col
        if need_x:  # B5, B7
            w1_col = w1_col or ops.weight_col(kept[0], dtype)
            dx_P = grouped_gemm("dgrad", dh_row, w1_col, offs, dtype, ALIGNED, backend)
            dx = torch.ops.mx.combine(dx_P, slot_of, None, backend)
        if need_weights:
            dweights = torch.where(slot_of >= 0, dw[slot_of.clamp(min=0)], 0.0)
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
        w_row = _prepared(prepared, 0, recipe.format) or ops.weight_row(w_ENK, x_MK.dtype)
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
                else _prepared(kept, 0, ctx.recipe.format)
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

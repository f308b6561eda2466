"""How a recipe turns tensors into GEMM operands: quantised (MxOperands) or as they are (PlainOperands).

Both have the same methods, so that each autograd flow is written once. "row" operands have their blocks along the last
axis (what fprop and dgrad reduce over), "col" operands along the rows (what wgrad reduces over).
"""

from typing import NamedTuple

import torch
from mx_core import RowMap, ScaleLayout
from torch import Tensor

from mx_kernels.problem import plain_format
from mx_kernels.recipe import Recipe

BLOCKED = ScaleLayout.BLOCKED_128X4.value
ALIGNED, COMPACT = RowMap.ALIGNED.value, RowMap.COMPACT.value


class Operand(NamedTuple):
    """What a grouped GEMM takes: data, blocked scales (None if not MX), format name."""

    data: Tensor
    scale: Tensor | None
    format: str


def grouped_gemm(
    mode: str,
    a: Operand | None,
    b: Operand | None,
    offs: Tensor | None,
    out_dtype: torch.dtype,
    row_map: str,
    backend: str,
) -> Tensor:
    """torch.ops.mx.grouped_gemm on operands (None, what a flow did not make, must not get here)."""
    assert a is not None
    assert b is not None
    return torch.ops.mx.grouped_gemm(mode, *a, *b, offs, out_dtype, row_map, backend)


class MxOperands:
    """Operands quantised by an MX recipe."""

    wgrad_row_map = ALIGNED

    def __init__(self, recipe: Recipe, backend: str):
        assert recipe.format is not None
        self.format, self.rounding, self.backend = recipe.format, recipe.rounding.value, backend

    def _operand(self, data: Tensor, scale: Tensor) -> Operand:
        return Operand(data, scale, self.format)

    def _quantize(self, x: Tensor, axis: int, offs: Tensor | None = None, row_map: str = ALIGNED) -> Operand:
        parts = torch.ops.mx.quantize(
            x, self.format, axis, self.rounding, BLOCKED, offs, row_map, self.backend
        )
        return self._operand(*parts)

    def weight_row(self, w: Tensor, dtype: torch.dtype) -> Operand:
        """W (E, N, K) for fprop."""
        return self._quantize(w, -1)

    def weight_col(self, w: Tensor, dtype: torch.dtype) -> Operand:
        """W (E, N, K) for dgrad."""
        return self._quantize(w, -2)

    def rows(self, x: Tensor, offs: Tensor | None) -> Operand:
        """COMPACT x (M, K) for fprop and dgrad."""
        return self._quantize(x, -1, offs, COMPACT)

    def cols(self, x: Tensor, offs: Tensor | None) -> Operand:
        """COMPACT x (M, K) for wgrad, in `wgrad_row_map`."""
        return self._quantize(x, -2, offs)

    def rows_and_cols(self, x: Tensor, offs: Tensor | None) -> tuple[Operand, Operand]:
        """Both; from one read where there are no groups (with groups their row maps differ)."""
        if offs is not None:
            return self.rows(x, offs), self.cols(x, offs)
        row, row_scale, col, col_scale = torch.ops.mx.quantize_dual(
            x, self.format, self.rounding, BLOCKED, None, self.backend
        )
        return self._operand(row, row_scale), self._operand(col, col_scale)

    def gather_row(self, x: Tensor, token_of: Tensor) -> Operand:
        """Rows of x (T, D) by token_of (P,)."""
        return self._gather(x, token_of, -1)

    def gather_col(self, x: Tensor, token_of: Tensor, slot_weights: Tensor | None = None) -> Operand:
        """The same, times the weights (P,) if there are any, for wgrad."""
        return self._gather(x, token_of, -2, slot_weights)

    def _gather(self, x: Tensor, token_of: Tensor, axis: int, slot_weights: Tensor | None = None) -> Operand:
        parts = torch.ops.mx.gather_quantize(
            x, token_of, slot_weights, self.format, axis, self.rounding, BLOCKED, self.backend
        )
        return self._operand(*parts)

    def gather_dout(self, dout: Tensor, token_of: Tensor, slot_weights: Tensor) -> tuple[Operand, Operand]:
        """quantise(dout) for dgrad and quantise(w·dout) for wgrad, from one read."""
        row, row_scale, col, col_scale = torch.ops.mx.gather_quantize_dual(
            dout, token_of, slot_weights, self.format, self.rounding, BLOCKED, self.backend
        )
        return self._operand(row, row_scale), self._operand(col, col_scale)

    def swiglu(self, h: Tensor, offs: Tensor) -> Operand:
        """A (P, H) of h (P, 2H)."""
        parts = torch.ops.mx.swiglu_quantize(h, offs, self.format, self.rounding, BLOCKED, self.backend)
        return self._operand(*parts)

    def dswiglu(
        self, da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor, columns: bool
    ) -> tuple[Operand, Operand | None, Operand | None, Tensor]:
        """Dh for dgrad, dh and a for wgrad (None without `columns`), dw (P,). The weight of w·a sits in gather_dout."""
        args = (da, h, slot_weights, offs, self.format, self.rounding, BLOCKED, self.backend)
        if not columns:
            dh_row, dh_row_scale, dw = torch.ops.mx.dswiglu_quantize_row(*args)
            return self._operand(dh_row, dh_row_scale), None, None, dw
        dh_row, dh_row_scale, dh_col, dh_col_scale, a_col, a_col_scale, dw = torch.ops.mx.dswiglu_quantize(
            *args
        )
        return (
            self._operand(dh_row, dh_row_scale),
            self._operand(dh_col, dh_col_scale),
            self._operand(a_col, a_col_scale),
            dw,
        )


class PlainOperands:
    """Operands in the activations' own dtype, bf16 or fp32."""

    wgrad_row_map = COMPACT

    def __init__(self, backend: str):
        self.backend = backend

    @staticmethod
    def _plain(x: Tensor) -> Operand:
        return Operand(x, None, plain_format(x.dtype))

    def weight_row(self, w: Tensor, dtype: torch.dtype) -> Operand:
        """W (E, N, K), in the activations' dtype."""
        return self._plain(w.to(dtype))

    weight_col = weight_row

    def rows(self, x: Tensor, offs: Tensor | None) -> Operand:
        """COMPACT x (M, K)."""
        return self._plain(x)

    cols = rows

    def rows_and_cols(self, x: Tensor, offs: Tensor | None) -> tuple[Operand, Operand]:
        """The same twice."""
        return self._plain(x), self._plain(x)

    def gather_row(self, x: Tensor, token_of: Tensor) -> Operand:
        """Rows of x (T, D) by token_of (P,)."""
        return self._plain(torch.ops.mx.gather(x, token_of, self.backend))

    gather_col = gather_row

    def gather_dout(self, dout: Tensor, token_of: Tensor, slot_weights: Tensor) -> tuple[Operand, Operand]:
        """The same twice: the weight sits in w·a, see `dswiglu`."""
        dy = self.gather_row(dout, token_of)
        return dy, dy

    def swiglu(self, h: Tensor, offs: Tensor) -> Operand:
        """A (P, H) of h (P, 2H)."""
        return self._plain(torch.ops.mx.swiglu(h, offs, self.backend))

    def dswiglu(
        self, da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor, columns: bool
    ) -> tuple[Operand, Operand, Operand, Tensor]:
        """Dh for dgrad and again for wgrad, w·a for wgrad, dw (P,)."""
        dh, wa, dw = torch.ops.mx.dswiglu(da, h, slot_weights, offs, self.backend)
        return self._plain(dh), self._plain(dh), self._plain(wa), dw


Operands = MxOperands | PlainOperands


def operands_of(recipe: Recipe, backend: str) -> Operands:
    """The operands of a recipe."""
    return MxOperands(recipe, backend) if recipe.is_mx else PlainOperands(backend)

"""SwiGLU, forward and backward, over ALIGNED rows.

Computed in float64 and rounded once to fp32, so that these results are what an fp32 kernel is compared
with, not another fp32 evaluation with errors of its own.
"""

import torch
from torch import Tensor

from mx_core.checks import check_multiple, check_ndim, check_shape
from mx_core.formats import RowMap
from mx_core.groups import is_real_row


def swiglu(h: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """`a = silu(gate) * up`.

    Args:
        h: (P, 2H), gate in the first H columns, up in the others.
        offs: int32 (E,), ends of the groups.
        out_dtype: h's dtype if None; float32 is what `swiglu_quantize` quantises.

    Returns:
        (P, H); 0 in rows that belong to no group, whatever h holds there.
    """
    gate, up, real = _halves(h, offs)
    a = gate * torch.sigmoid(gate) * up
    return _finish(a, real, out_dtype or h.dtype)


def dswiglu(
    da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor, *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of w * swiglu(h), a recomputed from h.

    Args:
        da: (P, H), gradient of the expert's output with respect to a, without the router weight.
        h: (P, 2H), as in `swiglu`.
        slot_weights: float32 (P,), router weight w of every row.
        offs: int32 (E,), ends of the groups.
        out_dtype: dtype of dh and wa; h's dtype if None.

    Returns:
        dh (P, 2H) = w * d<da, a>/dh; wa (P, H) = w * a; dw (P,) float32 = <da, a> per row. All 0 in rows that
        belong to no group.
    """
    gate, up, real = _halves(h, offs)
    check_shape("da", da, *gate.shape)
    check_shape("slot_weights", slot_weights, h.shape[0])
    da64, w64 = da.to(torch.float64), slot_weights.to(torch.float64)[:, None]
    sigmoid = torch.sigmoid(gate)
    silu = gate * sigmoid
    dsilu = sigmoid * (1 + gate * torch.sigmoid(-gate))
    a = silu * up
    dh = torch.cat([w64 * da64 * up * dsilu, w64 * da64 * silu], dim=-1)
    dtype = out_dtype or h.dtype
    dw = (da64 * a).sum(-1, keepdim=True)
    return _finish(dh, real, dtype), _finish(w64 * a, real, dtype), _finish(dw, real, torch.float32)[:, 0]


def _halves(h: Tensor, offs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The halves of h, gate and up, in float64, and which rows are real (P, 1)."""
    check_ndim("h", h, 2)
    check_multiple("h.shape[1]", h.shape[1], 2)
    gate, up = h.to(torch.float64).chunk(2, dim=-1)
    return gate, up, is_real_row(offs, h.shape[0], RowMap.ALIGNED)[:, None]


def _finish(x: Tensor, real: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(real, x.to(torch.float32), 0.0).to(dtype)

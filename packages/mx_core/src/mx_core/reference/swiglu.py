"""SwiGLU, forward and backward, over ALIGNED rows.

Computed in float64 and rounded once to fp32, so that these results are what an fp32 kernel is compared
with, not another fp32 evaluation with errors of its own.
"""

import torch
from torch import Tensor

from mx_core.checks import check_multiple, check_ndim, check_shape
from mx_core.chunks import map_chunks
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
    dtype = out_dtype or h.dtype

    def rows(h: Tensor, real: Tensor) -> tuple[Tensor]:
        gate, up = _halves(h)
        return (_finish(gate * torch.sigmoid(gate) * up, real, dtype),)

    (a,) = map_chunks(rows, h, _real_rows(h, offs), row_elements=h.shape[1])
    return a


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
    dtype = out_dtype or h.dtype
    real = _real_rows(h, offs)
    check_shape("da", da, h.shape[0], h.shape[1] // 2)
    check_shape("slot_weights", slot_weights, h.shape[0])

    def rows(da: Tensor, h: Tensor, w: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = _halves(h)
        da, w = da.to(torch.float64), w.to(torch.float64)[:, None]
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        dsilu = sigmoid * (1 + gate * (1 - sigmoid))
        a, weighted = silu * up, w * da
        dh = torch.cat([weighted * up * dsilu, weighted * silu], dim=1)
        dw = (da * a).sum(1, keepdim=True)
        return _finish(dh, real, dtype), _finish(w * a, real, dtype), _finish(dw, real, torch.float32)

    dh, wa, dw = map_chunks(rows, da, h, slot_weights, real, row_elements=h.shape[1])
    return dh, wa, dw[:, 0]


def _real_rows(h: Tensor, offs: Tensor) -> Tensor:
    """Which rows of h (P, 2H) belong to a group, (P, 1)."""
    check_ndim("h", h, 2)
    check_multiple("h.shape[1]", h.shape[1], 2)
    return is_real_row(offs, h.shape[0], RowMap.ALIGNED)[:, None]


def _halves(h: Tensor) -> tuple[Tensor, ...]:
    """The gate and up halves of h in float64."""
    return h.to(torch.float64).chunk(2, dim=1)


def _finish(x: Tensor, real: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to fp32, then to the output dtype; 0 in padding."""
    return torch.where(real, x.to(torch.float32), 0.0).to(dtype)

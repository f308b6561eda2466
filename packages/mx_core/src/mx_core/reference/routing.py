"""From tokens to the experts' rows and back: route, gather, combine.

Rows are ALIGNED: P = aligned_rows(T * k, E). `slot_of` (T, k) is the row of every choice, -1 where it was
dropped; `token_of` (P,) is the token of every row, -1 on padding.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from mx_core.checks import check_dtype, check_ndim, check_shape
from mx_core.chunks import map_chunks
from mx_core.groups import aligned_offs, aligned_rows, take_rows


def route(topk_ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Give every choice of an expert its row; stable: token order is kept inside an expert.

    Args:
        topk_ids: int32 or int64 (T, k). Ids outside [0, num_experts) are dropped.
        num_experts: E.

    Returns:
        slot_of int32 (T, k), token_of int32 (P,), offs int32 (E,).
    """
    check_dtype("topk_ids", topk_ids, torch.int32, torch.int64)
    check_ndim("topk_ids", topk_ids, 2)
    num_tokens, k = topk_ids.shape
    ids = topk_ids.reshape(-1)
    dropped = (ids < 0) | (ids >= num_experts)
    expert = torch.where(dropped, num_experts, ids).to(
        torch.int64
    )  # the dropped form one more group, at the end
    counts = expert.new_zeros(num_experts + 1).scatter_add_(0, expert, torch.ones_like(expert))
    ends = counts.cumsum(0)
    offs = ends[:-1].to(torch.int32)

    order = expert.argsort(stable=True)  # choices (t * k + j), expert by expert
    rank = torch.arange(order.shape[0], device=ids.device) - (ends - counts)[expert[order]]
    rows = aligned_rows(num_tokens * k, num_experts)
    slot = torch.where(dropped[order], rows, aligned_offs(offs)[expert[order]] + rank)
    slot_of = torch.empty_like(ids, dtype=torch.int32).scatter_(0, order, slot.to(torch.int32))
    token_of = slot_of.new_full((rows + 1,), -1)  # one row more, for the dropped
    token_of = token_of.scatter_(0, slot, (order // k).to(torch.int32))[:rows]
    slot_of = torch.where(dropped, -1, slot_of).reshape(num_tokens, k)
    return slot_of, token_of.contiguous(), offs


def gather(x: Tensor, token_of: Tensor) -> Tensor:
    """The experts' rows of tokens: x (T, D), token_of (P,) -> (P, D), 0 on padding."""
    check_ndim("x", x, 2)
    check_ndim("token_of", token_of, 1)
    return take_rows(x, token_of)


def slot_weights(weights: Tensor, slot_of: Tensor, rows: int) -> Tensor:
    """Router weights by row: weights (T, k), slot_of (T, k) -> float32 (rows,), 0 on padding."""
    check_shape("weights", weights, *slot_of.shape)
    return _scatter(weights.to(torch.float32).reshape(-1), slot_of, rows)


def combine(y: Tensor, slot_of: Tensor, weights: Tensor | None = None) -> Tensor:
    """Sum the experts' results of every token: acc = fma(w_j, y_j, acc) in fp32, from +0, j ascending.

    Args:
        y: (P, D).
        slot_of: int32 (T, k); a dropped choice (-1) adds nothing.
        weights: float32 (T, k); None adds the rows as they are (the same as weights of 1).

    Returns:
        (T, D) in y's dtype, rounded once from fp32.
    """
    check_ndim("y", y, 2)
    check_ndim("slot_of", slot_of, 2)
    if weights is not None:
        check_shape("weights", weights, *slot_of.shape)
    with_zero_row = pad(y, (0, 0, 0, 1))  # where dropped choices point
    slot = torch.where(slot_of < 0, y.shape[0], slot_of)

    def combine_tokens(slot: Tensor, *weights: Tensor) -> tuple[Tensor]:
        acc = y.new_zeros(slot.shape[0], y.shape[1], dtype=torch.float32)
        for j in range(slot.shape[1]):
            y_j = with_zero_row.index_select(0, slot[:, j]).to(torch.float32)
            added = fma(weights[0][:, j, None].to(torch.float32), y_j, acc) if weights else acc + y_j
            acc = torch.where(slot[:, j, None] < y.shape[0], added, acc)
        return (acc.to(y.dtype),)

    tensors = [slot] if weights is None else [slot, weights]
    (out,) = map_chunks(combine_tokens, *tensors, row_elements=y.shape[1])
    return out


def combine_backward(dout: Tensor, y: Tensor, slot_of: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """The backward of `combine`.

    Args:
        dout: (T, D), gradient of the result.
        y: (P, D), as in `combine`.
        slot_of: int32 (T, k).
        weights: float32 (T, k).

    Returns:
        dy (P, D) in y's dtype: w * dout, the product in fp32, 0 on padding; dweights (T, k) float32:
        <dout, y>, summed in float64 and rounded once, 0 where dropped.
    """
    check_shape("dout", dout, slot_of.shape[0], y.shape[1])
    check_shape("weights", weights, *slot_of.shape)
    dy_TkD = weights.to(torch.float32)[:, :, None] * dout.to(torch.float32)[:, None, :]
    dy = _scatter(dy_TkD.to(y.dtype).flatten(0, 1), slot_of, y.shape[0])
    dots = [
        (dout.to(torch.float64) * take_rows(y, slot_of[:, j]).to(torch.float64)).sum(-1)
        for j in range(slot_of.shape[1])
    ]
    dweights = torch.stack(dots, dim=1).to(torch.float32)
    return dy, torch.where(slot_of >= 0, dweights, 0.0)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """`a * b + c` of fp32 tensors, rounded once to fp32: what a fused multiply-add gives.

    The product of two fp32 is exact in float64, but its sum with c is not, and rounding that again to fp32
    can go wrong. The sum is therefore rounded to odd (towards zero, then the last bit set if anything was
    lost), after which a second rounding gives the right result: S. Boldo, G. Melquiond, "Emulation of FMA
    and correctly rounded sums: proved algorithms using rounding to odd", IEEE Trans. Computers 57(4), 2008.
    """
    product, c64 = a.to(torch.float64) * b.to(torch.float64), c.to(torch.float64)
    total = product + c64
    virtual = total - product
    lost = (product - (total - virtual)) + (c64 - virtual)  # total + lost is exact (Knuth's TwoSum)
    bits = total.view(torch.int64)
    # An even last bit becomes odd: up if what was lost has the sign of the total, else down. NaN in `lost`
    # (an infinite or NaN total) compares false.
    step = ((lost.view(torch.int64) ^ bits) >> 63) | 1
    even_and_inexact = (lost.abs() > 0).to(torch.int64) & ~bits
    return (bits + step * even_and_inexact).view(torch.float64).to(torch.float32)


def _scatter(values: Tensor, slot_of: Tensor, rows: int) -> Tensor:
    """Move values (T*k, ...) to their rows of a zero tensor (rows, ...); dropped ones go nowhere."""
    slot = slot_of.reshape(-1).to(torch.int64)
    out = values.new_zeros(rows + 1, *values.shape[1:])
    out = out.index_copy(0, torch.where(slot < 0, rows, slot), values)
    return out[:rows].contiguous()

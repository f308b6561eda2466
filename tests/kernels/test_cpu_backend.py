"""The CPU backend behind the ops: quantisers, GEMMs, SwiGLU and routing against their definitions."""

import mx_kernels as mk
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_core import (
    BLOCK_SIZE,
    FORMATS,
    MXFP4_E2M1,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    MXTensor,
    RowMap,
    ScaleLayout,
    ScaleRounding,
    dequantize,
    from_blocked,
    mx_equal,
    quantize,
    to_blocked,
)
from mx_core.groups import align_rows, aligned_offs, aligned_rows, compact_rows
from support.bounds import assert_sum_error
from support.gemm_data import (
    GROUP_SIZES,
    compact_with_aligned_scales,
    exact_operand,
    grouped_rows,
    offs_of,
    poison,
    random_operand,
    zero_padding_rows,
)
from torch import Tensor

BLOCKED, LINEAR = ScaleLayout.BLOCKED_128X4, ScaleLayout.LINEAR
SIZES = [pytest.param(sizes, id=name) for name, sizes in GROUP_SIZES.items()]


# quantise --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("shape", [(3, 32), (70, 100), (2, 96, 64), (2, 2, 33, 40)])
def test_quantize_is_mx_cores(format, shape) -> None:
    x = torch.randn(shape).to(torch.bfloat16)
    for rounding in ScaleRounding:
        for layout in ScaleLayout:
            how = {"rounding": rounding, "layout": layout}
            for axis in (-1, -2):
                want = quantize(x, format, axis=axis, **how)
                assert mx_equal(mk.quantize_mx(x, format, axis=axis, **how), want)
            if x.ndim < 4:
                row, col = mk.quantize_mx_dual(x, format.name, **how)
                assert mx_equal(row, quantize(x, format, **how))
                assert mx_equal(col, quantize(x, format, axis=-2, **how))


def test_strided_rows_are_taken_as_they_are() -> None:
    x = torch.randn(20, 3, 32)[:, 1]
    assert mx_equal(mk.quantize_mx(x, layout=LINEAR), quantize(x.contiguous(), MXFP8_E4M3))


@pytest.mark.parametrize("sizes", SIZES)
def test_grouped_quantize_is_each_group_alone(sizes) -> None:
    """C11: no block spans two groups; padding and tail are zero; blocked scales start every group on a tile."""
    rows, offs = sum(sizes) + 5, offs_of(sizes)
    x = torch.randn(rows, 96) * torch.logspace(-3, 3, rows)[:, None]
    row, col = mk.quantize_mx_dual(x, offs=offs)
    alone_row = mk.quantize_mx(x, offs=offs)
    compact = mk.quantize_mx(x, offs=offs, row_map=RowMap.COMPACT)
    compact_linear = mk.quantize_mx(x, offs=offs, row_map=RowMap.COMPACT, layout=LINEAR)
    assert mx_equal(row, alone_row)
    assert mx_equal(col, mk.quantize_mx(x, axis=-2, offs=offs))
    rows_P = aligned_rows(rows, len(sizes))
    assert row.shape == col.shape == (rows_P, 96)
    assert compact.shape == (rows, 96)

    starts = aligned_offs(offs).tolist()
    row_scale, col_scale = (
        from_blocked(row.scale, rows_P, 3),
        from_blocked(col.scale, 96, rows_P // BLOCK_SIZE),
    )
    seen, seen_blocks = (
        torch.zeros(rows_P, dtype=torch.bool),
        torch.zeros(rows_P // BLOCK_SIZE, dtype=torch.bool),
    )
    for start, end, at in zip([0, *offs.tolist()], offs.tolist(), starts, strict=False):
        n = end - start
        if n == 0:
            continue
        want_row, want_col = (quantize(x[start:end], MXFP8_E4M3, axis=axis) for axis in (-1, -2))
        blocks = slice(at // BLOCK_SIZE, at // BLOCK_SIZE - (-n // BLOCK_SIZE))
        assert torch.equal(row.data[at : at + n].view(torch.uint8), want_row.data.view(torch.uint8))
        assert torch.equal(row_scale[at : at + n], want_row.scale)
        assert torch.equal(col.data[at : at + n].view(torch.uint8), want_col.data.view(torch.uint8))
        assert torch.equal(col_scale[:, blocks], want_col.scale)
        assert torch.equal(compact.data[start:end].view(torch.uint8), want_row.data.view(torch.uint8))
        assert torch.equal(compact_linear.scale[start:end], want_row.scale)
        seen[at : at + n], seen_blocks[blocks] = True, True
    for mx, scale in ((row, row_scale), (col, col_scale.T[~seen_blocks])):
        assert not mx.data.view(torch.uint8)[~seen].any()
        assert not (scale[~seen] if mx is row else scale).any()
    assert not compact.data.view(torch.uint8)[offs[-1] :].any()
    assert torch.equal(compact.scale, row.scale)


@given(st.lists(st.integers(0, 300), min_size=1, max_size=5), st.integers(0, 50))
def test_row_maps_hold_the_same_rows(sizes, tail) -> None:
    offs, rows = offs_of(sizes), sum(sizes) + tail
    x = torch.randn(rows, 32)
    aligned = mk.quantize_mx(x, offs=offs, layout=LINEAR)
    compact = mk.quantize_mx(x, offs=offs, layout=LINEAR, row_map=RowMap.COMPACT)
    assert torch.equal(compact_rows(aligned.scale, offs, rows), compact.scale)
    assert torch.equal(align_rows(compact.data.view(torch.uint8), offs), aligned.data.view(torch.uint8))


# GEMM ------------------------------------------------------------------------------------------------------------------

N, K = 96, 160


def operands(mode: str, sizes: list[int], row_map: RowMap, make, format) -> tuple[MXTensor, MXTensor, Tensor]:
    """(a, b, offs) of a mode with linear scales."""
    offs, E, rows = offs_of(sizes), len(sizes), grouped_rows(sum(sizes), len(sizes), row_map)
    if mode == "wgrad":
        a, b = make(rows, N, axis=-2, seed=1, format=format), make(rows, K, axis=-2, seed=2, format=format)
        return zero_padding_rows(a, offs), zero_padding_rows(b, offs), offs
    reduced = K if mode == "fprop" else N
    a = make(rows, reduced, seed=1, format=format)
    b = make(E, N, K, axis=-1 if mode == "fprop" else -2, seed=2, format=format)
    return (zero_padding_rows(a, offs) if row_map is RowMap.ALIGNED else a), b, offs


def expected(mode: str, a: MXTensor, b: MXTensor, sizes: list[int], row_map: RowMap) -> list[tuple]:
    """(index of the result, a's, b's float64 values as (M, K), (N, K)) of every group."""
    a64, b64, offs = dequantize(a, torch.float64), dequantize(b, torch.float64), offs_of(sizes)
    starts = (
        aligned_offs(offs) if row_map is RowMap.ALIGNED else torch.cat([offs.new_zeros(1), offs])
    ).tolist()
    groups = []
    for g, size in enumerate(sizes):
        rows = slice(starts[g], starts[g] + size)
        if mode == "wgrad":
            groups.append((g, a64[rows].T, b64[rows].T))
        else:
            groups.append((rows, a64[rows], b64[g] if mode == "fprop" else b64[g].T))
    return groups


GEMM = {"fprop": mk.grouped_gemm_fprop, "dgrad": mk.grouped_gemm_dgrad, "wgrad": mk.grouped_gemm_wgrad}
MODES_AND_MAPS = [
    ("fprop", RowMap.ALIGNED), ("fprop", RowMap.COMPACT), ("dgrad", RowMap.ALIGNED), ("dgrad", RowMap.COMPACT),
    ("wgrad", RowMap.ALIGNED),
]  # fmt: skip


@pytest.mark.parametrize("format", [MXFP8_E4M3, MXFP8_E5M2, MXFP4_E2M1, MXINT8], ids=repr)
@pytest.mark.parametrize(("mode", "row_map"), MODES_AND_MAPS)
@pytest.mark.parametrize("sizes", SIZES)
def test_exact_gemm(mode, row_map, sizes, format) -> None:
    """Bitwise, with scales unlike their neighbours: linear and blocked scales, into poisoned memory."""
    reduction = max(sizes) if mode == "wgrad" else {"fprop": K, "dgrad": N}[mode]

    def make(*shape, **how):
        return exact_operand(*shape, reduction=max(reduction, 1), **how)

    a, b, offs = operands(mode, sizes, row_map, make, format)
    got = GEMM[mode](a, b, offs, row_map=row_map, out_dtype=torch.float32)
    want = torch.zeros_like(got)
    for index, a64, b64 in expected(mode, a, b, sizes, row_map):
        want[index] = (a64 @ b64.T).float()
    assert torch.equal(got, want)

    blocked = compact_with_aligned_scales(a, offs) if row_map is RowMap.COMPACT else as_blocked(a)
    out = poison(*got.shape, dtype=torch.float32)
    assert GEMM[mode](blocked, as_blocked(b), offs, row_map=row_map, out=out) is out
    assert torch.equal(out, want)


def as_blocked(mx: MXTensor) -> MXTensor:
    return MXTensor(mx.data, to_blocked(mx.scale), mx.format, mx.axis, BLOCKED, mx.shape)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("mode", "row_map"), MODES_AND_MAPS)
def test_random_gemm(mode, row_map, out_dtype) -> None:
    sizes = GROUP_SIZES["skewed"]
    a, b, offs = operands(mode, sizes, row_map, random_operand, MXFP8_E4M3)
    got = GEMM[mode](a, b, offs, row_map=row_map, out_dtype=out_dtype)
    for index, a64, b64 in expected(mode, a, b, sizes, row_map):
        assert_sum_error(got[index], a64, b64)


@pytest.mark.parametrize(
    ("base_a", "base_b"), [(0, 125), (1, 125), (120, 125), (249, 125), (249, 2), (100, 100), (199, 199)]
)
def test_scale_bytes_from_end_to_end(base_a, base_b) -> None:
    """Also where an operand's own values, or products, are beyond fp32 while the sums are not; or the sums are Inf."""
    a = exact_operand(40, 64, reduction=64, base_byte=base_a)
    b = exact_operand(1, 32, 64, reduction=64, base_byte=base_b)
    got = mk.grouped_gemm_fprop(a, b, out_dtype=torch.float32)
    want = (dequantize(a, torch.float64) @ dequantize(b, torch.float64)[0].T).float()
    assert torch.equal(got, want)
    assert want.any()


def test_cancelling_products_beyond_fp32() -> None:
    """2^140 - 2^140 + 2^100: fp32 sums would be NaN."""
    a, b = exact_operand(1, 96, reduction=96), exact_operand(1, 1, 96, reduction=96)
    a.data.view(torch.uint8).zero_()
    b.data.view(torch.uint8).zero_()
    a.data.view(torch.uint8)[0, [0, 32, 64]] = torch.tensor([0x38, 0xB8, 0x38], dtype=torch.uint8)  # 1, -1, 1
    b.data.view(torch.uint8)[0, 0, [0, 32, 64]] = 0x38
    a.scale[:] = b.scale[:] = torch.tensor([197, 197, 177], dtype=torch.uint8)
    assert mk.grouped_gemm_fprop(a, b, out_dtype=torch.float32).item() == 2.0**100


@pytest.mark.parametrize("operand", ["a", "b"])
def test_nan_in_one_block_stays_in_its_results(operand) -> None:
    a, b = random_operand(40, 64), random_operand(1, 32, 64)
    bad = a if operand == "a" else b
    bad.scale.view(-1, 2)[3, 1] = 255
    got = mk.grouped_gemm_fprop(a, b, out_dtype=torch.float32)
    nan = got.isnan()
    assert (nan[3].all() and nan.sum() == 32) if operand == "a" else (nan[:, 3].all() and nan.sum() == 40)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("row_map", RowMap)
def test_plain_gemm(dtype, row_map) -> None:
    sizes = GROUP_SIZES["skewed"]
    offs, rows = offs_of(sizes), grouped_rows(sum(sizes), len(sizes), row_map)
    x, dy, w = (torch.randn(*shape).to(dtype) for shape in ((rows, K), (rows, N), (len(sizes), N, K)))
    cases = {"fprop": (x, w), "dgrad": (dy, w), "wgrad": (dy, x)}
    starts = (
        aligned_offs(offs) if row_map is RowMap.ALIGNED else torch.cat([offs.new_zeros(1), offs])
    ).tolist()
    for mode, (a, b) in cases.items():
        got = GEMM[mode](a, b, offs, row_map=row_map, out_dtype=torch.float32)
        assert GEMM[mode](a, b, offs, row_map=row_map).dtype == dtype
        for g, size in enumerate(sizes):
            r = slice(starts[g], starts[g] + size)
            if mode == "wgrad":
                assert_sum_error(got[g], a[r].T.double(), b[r].T.double())
            else:
                assert_sum_error(got[r], a[r].double(), b[g].double() if mode == "fprop" else b[g].T.double())


def test_accumulate_into_fp32() -> None:
    sizes = GROUP_SIZES["empty first"]
    a, b, offs = operands("wgrad", sizes, RowMap.ALIGNED, random_operand, MXFP8_E4M3)
    before = torch.randn(3, N, K)
    out = before.clone()
    mk.grouped_gemm_wgrad(a, b, offs, out=out, accumulate=True)
    assert torch.equal(out, before + mk.grouped_gemm_wgrad(a, b, offs, out_dtype=torch.float32))
    assert torch.equal(out[0], before[0])


# SwiGLU, routing, combine ----------------------------------------------------------------------------------------------


def routed(k: int = 2, E: int = 4, T: int = 50) -> tuple[mk.Routing, Tensor]:
    ids = torch.rand(T, E).argsort(1)[:, :k].contiguous()
    ids[3, 0] = -1
    routing = mk.route(ids, E)
    return routing, torch.rand(T, k)


def test_route_is_stable_and_complete() -> None:
    ids = torch.tensor([[1, 0], [3, 1], [1, 9], [0, 1]])
    slot_of, token_of, offs = mk.route(ids, 4)
    assert offs.tolist() == [2, 6, 6, 7]
    assert slot_of.tolist() == [[128, 0], [256, 129], [130, -1], [1, 131]]
    assert token_of.shape == (aligned_rows(8, 4),)
    want = torch.full_like(token_of, -1)
    want[[0, 1, 128, 129, 130, 131, 256]] = torch.tensor([0, 3, 0, 1, 2, 3, 1], dtype=torch.int32)
    assert torch.equal(token_of, want)
    for a, b in zip(mk.route(ids.int(), 4), (slot_of, token_of, offs), strict=True):
        assert torch.equal(a, b)


def test_gather_quantize_weights_the_columns_only() -> None:
    (slot_of, token_of, _), weights = routed()
    x = torch.randn(50, 64).bfloat16()
    w = torch.ops.mx.slot_weights(weights, slot_of, token_of.shape[0])
    row, col = mk.gather_quantize_dual(x, token_of, w)
    rows = mk.gather(x, token_of)
    assert mx_equal(row, quantize(rows, MXFP8_E4M3, layout=BLOCKED))
    assert mx_equal(row, mk.gather_quantize(x, token_of))
    assert mx_equal(col, quantize(rows.float() * w[:, None], MXFP8_E4M3, axis=-2, layout=BLOCKED))
    assert mx_equal(col, mk.gather_quantize(x, token_of, w, axis=-2))


def test_swiglu_and_its_gradients() -> None:
    (_, token_of, offs), _ = routed()
    real = (token_of >= 0)[:, None]
    P = token_of.shape[0]
    h = torch.where(real, torch.randn(P, 128), 0)
    da, w = torch.where(real, torch.randn(P, 64), 0), torch.where(real[:, 0], torch.rand(P), 0)
    h64 = h.double().requires_grad_()
    a = torch.nn.functional.silu(h64[:, :64]) * h64[:, 64:]
    dots = (a * da.double()).sum(-1)
    (dots * w.double()).sum().backward()
    grads = mk.dswiglu_quantize(da, h, w, offs)
    dh = h64.grad
    torch.testing.assert_close(grads.dw, dots.detach().float())
    lo, hi = 1 - 2.0**-21, 1 + 2.0**-21
    for got, exact, axis in ((grads.dh_row, dh, -1), (grads.dh_col, dh, -2), (grads.a_col, a.detach(), -2),
                             (mk.swiglu_quantize(h, offs), a.detach(), -1)):  # fmt: skip
        ends = [
            dequantize(quantize((exact * f).float(), MXFP8_E4M3, axis=axis, layout=BLOCKED)) for f in (lo, hi)
        ]
        value = dequantize(got)
        assert ((torch.minimum(*ends) <= value) & (value <= torch.maximum(*ends))).all()
    row = torch.ops.mx.dswiglu_quantize_row(da, h, w, offs, "mxfp8_e4m3", "rceil", "blocked_128x4")
    assert torch.equal(row[0].view(torch.uint8), grads.dh_row.data.view(torch.uint8))
    assert torch.equal(row[2], grads.dw)

    leaf = h.clone().requires_grad_()
    mk.swiglu(leaf, offs).backward(da)
    plain = torch.autograd.grad(
        (torch.nn.functional.silu(h64[:, :64]) * h64[:, 64:] * da.double()).sum(), h64
    )[0]
    torch.testing.assert_close(leaf.grad, plain.float())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_and_its_gradients(dtype, weighted) -> None:
    (slot_of, token_of, _), weights = routed(k=3)
    y = torch.where(token_of[:, None] >= 0, torch.randn(token_of.shape[0], 32), 0).to(dtype).requires_grad_()
    weights = weights.requires_grad_() if weighted else None
    out = mk.combine(y, slot_of, weights)
    dout = torch.randn(50, 32).to(dtype)
    out.backward(dout)
    y64 = y.detach().double().requires_grad_()
    w64 = (weights.detach().double() if weighted else torch.ones(50, 3).double()).requires_grad_()
    picked = torch.where(slot_of[..., None] >= 0, y64[slot_of.clamp(min=0)], 0)
    want = (w64[..., None] * picked).sum(1)
    want.backward(dout.double())
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 1e-2, "atol": 1e-2}
    torch.testing.assert_close(out.double(), want, **tolerance)
    torch.testing.assert_close(y.grad.double(), y64.grad, **tolerance)
    if weighted:
        assert weights.grad.dtype == torch.float32
        torch.testing.assert_close(weights.grad.double(), w64.grad, rtol=1e-5, atol=1e-5)
        assert weights.grad[3, 0] == 0

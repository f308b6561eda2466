"""The float64 reference GEMMs: exact sums, both row maps, empty groups, poisoned rows."""

import itertools
import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from mx_core import (
    FORMATS,
    MXFP8_E4M3,
    ElementFormat,
    MXTensor,
    RowMap,
    ScaleLayout,
    dequantize,
    quantize,
    to_blocked,
)
from mx_core.groups import align_rows, aligned_offs, aligned_rows, compact_rows
from mx_core.reference import grouped_dgrad, grouped_fprop, grouped_wgrad
from mx_core.reference.gemm import float32_holds
from support.bounds import assert_sum_error, half_ulp, sequential_sum
from support.gemm_data import (
    GROUP_SIZES,
    compact_with_aligned_scales,
    exact_matrix,
    exact_operand,
    offs_of,
    poison,
    random_matrix,
    random_operand,
    zero_padding_rows,
)

SIZES = pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
FORMAT = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
LAYOUT = pytest.mark.parametrize("layout", ScaleLayout)
COMPACT, ALIGNED = RowMap.COMPACT, RowMap.ALIGNED
N, K = 48, 96


def exact_sum(codes_a: list[float], bytes_a: list[int], codes_b: list[float], bytes_b: list[int]) -> Fraction:
    """The definition, in rationals: sum of codeA * codeB * 2^(a + b - 254)."""
    return sum(
        (
            Fraction(a) * Fraction(b) * Fraction(2) ** (bytes_a[i // 32] + bytes_b[i // 32] - 254)
            for i, (a, b) in enumerate(zip(codes_a, codes_b, strict=True))
        ),
        Fraction(0),
    )


@FORMAT
@LAYOUT
@pytest.mark.parametrize("base", [0, 60, 125, 240])
def test_definition(format: ElementFormat, layout: ScaleLayout, base: int) -> None:
    """Sums whose exact value float64 holds, against rationals; scale bytes from end to end."""
    a = exact_operand(5, 96, reduction=96, format=format, base_byte=base, seed=base)
    b = exact_operand(1, 7, 96, reduction=96, format=format, base_byte=250 - base, seed=base + 1)
    codes_a, codes_b = (dequantize(replace(m, scale=torch.full_like(m.scale, 127))).tolist() for m in (a, b))
    bytes_a, bytes_b = a.scale.tolist(), b.scale.tolist()
    if layout is ScaleLayout.BLOCKED_128X4:
        a, b = (replace(m, scale=to_blocked(m.scale), layout=layout) for m in (a, b))
    got = grouped_fprop(a, b)
    for m, n in itertools.product(range(5), range(7)):
        want = exact_sum(codes_a[m], bytes_a[m], codes_b[0][n], bytes_b[0][n])
        assert Fraction(got[m, n].item()) == want


def aligned_operands(sizes: list[int], format: ElementFormat, layout: ScaleLayout) -> dict[str, MXTensor]:
    offs, longest = offs_of(sizes), max([*sizes, 1])
    rows_P = aligned_rows(sum(sizes), len(sizes))
    kwargs = {"format": format, "layout": layout}
    operands = {
        "x": exact_operand(rows_P, K, reduction=K, seed=1, **kwargs),
        "w": exact_operand(len(sizes), N, K, reduction=K, seed=2, **kwargs),
        "dy": exact_operand(rows_P, N, reduction=N, seed=3, **kwargs),
        "w_t": exact_operand(len(sizes), N, K, reduction=N, axis=-2, seed=4, **kwargs),
        "dy_col": exact_operand(rows_P, N, reduction=longest, axis=-2, seed=5, **kwargs),
        "x_col": exact_operand(rows_P, K, reduction=longest, axis=-2, seed=6, **kwargs),
    }
    return {name: zero_padding_rows(m, offs) if m.ndim == 2 else m for name, m in operands.items()}


@SIZES
@LAYOUT
@pytest.mark.parametrize("format", [MXFP8_E4M3, FORMATS["mxfp4_e2m1"]], ids=repr)
def test_aligned_groups(sizes: list[int], layout: ScaleLayout, format: ElementFormat) -> None:
    """Exact operands: each group's product, bitwise, and 0 in all rows that are not a group's."""
    o = aligned_operands(sizes, format, layout)
    offs, starts = offs_of(sizes), aligned_offs(offs_of(sizes)).tolist()[:-1]
    v = {name: dequantize(m, torch.float64) for name, m in o.items()}
    y, dx = grouped_fprop(o["x"], o["w"], offs), grouped_dgrad(o["dy"], o["w_t"], offs)
    dw = grouped_wgrad(o["dy_col"], o["x_col"], offs)
    want_y, want_dx, want_dw = torch.zeros_like(y), torch.zeros_like(dx), torch.zeros_like(dw)
    for g, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        rows = slice(start, start + size)
        want_y[rows] = v["x"][rows] @ v["w"][g].T
        want_dx[rows] = v["dy"][rows] @ v["w_t"][g]
        want_dw[g] = v["dy_col"][rows].T @ v["x_col"][rows]
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)
    assert torch.equal(dw, want_dw)
    assert torch.equal(
        y, grouped_fprop(o["x"], o["w"], offs, out_dtype=torch.float32).double()
    )  # fp32 holds it


@SIZES
@LAYOUT
def test_compact_rows_give_the_same(sizes: list[int], layout: ScaleLayout) -> None:
    """COMPACT rows, with rows past offs[-1] poisoned; blocked scales still start every group on a tile."""
    offs, rows = offs_of(sizes), sum(sizes)
    compact = exact_operand(rows, K, reduction=K, seed=1)
    w = exact_operand(len(sizes), N, K, reduction=K, seed=2)
    aligned = MXTensor(
        align_rows(compact.data, offs),
        align_rows(compact.scale, offs),
        MXFP8_E4M3,
        -1,
        ScaleLayout.LINEAR,
        torch.Size((aligned_rows(rows, len(sizes)), K)),
    )
    wanted = compact_rows(grouped_fprop(aligned, w, offs), offs, rows)
    given = compact if layout is ScaleLayout.LINEAR else compact_with_aligned_scales(compact, offs)
    assert torch.equal(grouped_fprop(given, w, offs, row_map=COMPACT), wanted)

    plain = torch.cat([dequantize(compact), poison(9, K, dtype=torch.float32)])
    w_plain = dequantize(w)
    got = grouped_fprop(plain, w_plain, offs, row_map=COMPACT)
    assert torch.equal(got[:rows], wanted)
    assert (got[rows:] == 0).all()
    dx = grouped_dgrad(plain, w_plain.mT.contiguous(), offs, row_map=COMPACT)
    assert torch.equal(dx, got)
    dw = grouped_wgrad(plain, plain, offs, row_map=COMPACT)
    assert dw.isfinite().all()


@SIZES
def test_poison_in_padding_does_not_show(sizes: list[int]) -> None:
    """NaN codes and NaN scales in the padding of ALIGNED plain and row-quantised operands."""
    offs = offs_of(sizes)
    x = align_rows(exact_matrix(sum(sizes), K, reduction=K, dtype=torch.float32), offs)
    w = exact_matrix(len(sizes), N, K, reduction=K, dtype=torch.float32, seed=1)
    real = align_rows(torch.ones(sum(sizes), 1), offs) > 0
    poisoned = torch.where(real, x, math.nan)
    assert torch.equal(grouped_fprop(poisoned, w, offs), grouped_fprop(x, w, offs))
    assert torch.equal(grouped_wgrad(poisoned, poisoned, offs), grouped_wgrad(x, x, offs))
    mx = quantize(poisoned, MXFP8_E4M3)
    assert torch.equal(grouped_fprop(mx, w, offs), grouped_fprop(quantize(x, MXFP8_E4M3), w, offs))


@pytest.mark.parametrize(
    ("sizes", "out", "dw"),
    [
        ([2, 0, 4], [32, 32, 96, 96, 96, 96], [2, 0, 4]),
        ([0, 2, 4], [64, 64, 96, 96, 96, 96], [0, 2, 4]),
        ([2, 4, 0], [32, 32, 64, 64, 64, 64], [2, 4, 0]),
        ([0, 6, 0], [64] * 6, [0, 6, 0]),
    ],
)
@pytest.mark.parametrize("mx", [False, True], ids=["plain", "mx"])
def test_c10_empty_experts(sizes: list[int], out: list[int], dw: list[int], mx: bool) -> None:
    """C10: A = ones (6, 32), B[e] = e + 1 everywhere, dY = ones."""
    offs, ones = offs_of(sizes), torch.ones(6, 32)
    b = torch.arange(1.0, 4)[:, None, None].expand(3, 32, 32)
    aligned = align_rows(ones, offs)
    q = (lambda t, axis: quantize(t, MXFP8_E4M3, axis=axis)) if mx else (lambda t, axis: t)
    y = compact_rows(grouped_fprop(q(aligned, -1), q(b, -1), offs), offs, 6)
    assert torch.equal(y, torch.tensor(out, dtype=torch.float64)[:, None].expand(6, 32))
    dx = compact_rows(grouped_dgrad(q(aligned, -1), q(b, -2), offs), offs, 6)
    assert torch.equal(dx, y)
    got = grouped_wgrad(q(aligned, -2), q(aligned, -2), offs)
    assert torch.equal(got, torch.tensor(dw, dtype=torch.float64)[:, None, None].expand(3, 32, 32))
    assert not got[got == 0].signbit().any()


def test_c11_blocks_end_with_the_group() -> None:
    """C11: in ALIGNED rows every expert has scales of its own; rows of padding add nothing."""
    for sizes in ([16, 48], [16, 48, 0, 33]):
        offs = offs_of(sizes)
        x = torch.ones(sum(sizes), 1)
        x[:16] = 448
        mx = quantize(align_rows(x, offs), MXFP8_E4M3, axis=-2)
        blocks = mx.scale[0].tolist()
        assert blocks[0] == 0x7F
        assert blocks[4:6] == [0x77, 0x77]  # expert 1 begins at row 128
        assert mx.data.view(torch.uint8)[:16].unique().tolist() == [0x7E]
        assert mx.data.view(torch.uint8)[128:176].unique().tolist() == [0x78]
        ones = quantize(align_rows(torch.ones(sum(sizes), 1), offs), MXFP8_E4M3, axis=-2)
        wanted = [448.0 * 16, *map(float, sizes[1:])]
        assert grouped_wgrad(mx, ones, offs).flatten().tolist() == wanted


def test_c12_nothing_to_do() -> None:
    w = torch.randn(3, N, 32)
    for offs, rows in ((offs_of([0, 0, 0]), 0), (torch.tensor([4, 6, 6], dtype=torch.int32), 6)):
        x = torch.randn(rows, 32)
        y = grouped_fprop(x, w, offs, row_map=COMPACT)
        assert y.shape == (rows, N)
        dw = grouped_wgrad(y, x, offs, row_map=COMPACT)
        assert dw.shape == (3, N, 32)
        assert (dw[2] == 0).all()
    empty = quantize(torch.zeros(0, 32), MXFP8_E4M3)
    assert grouped_fprop(empty, w[:1]).shape == (0, N)
    no_reduction = grouped_fprop(torch.zeros(4, 0), torch.zeros(1, N, 0))
    assert torch.equal(no_reduction, torch.zeros(4, N, dtype=torch.float64))


def test_dense_is_one_group() -> None:
    x, w = random_operand(70, K), random_operand(1, N, K, seed=1)
    dense = grouped_fprop(x, w)
    for row_map in RowMap:
        rows = aligned_rows(70, 1) if row_map is ALIGNED else 70
        given = quantize(torch.nn.functional.pad(dequantize(x), (0, 0, 0, rows - 70)), MXFP8_E4M3)
        assert torch.equal(grouped_fprop(given, w, offs_of([70]), row_map=row_map)[:70], dense)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_result_dtype_goes_through_fp32(dtype: torch.dtype) -> None:
    """bf16 results are rounded twice, by way of fp32, as those of an fp32 accumulator are."""
    tiny, one = 2.0**-40, 1 + 2.0**-8  # one + tiny: fp32 loses tiny, and one is a tie for bf16
    x = torch.tensor([[one, tiny]], dtype=torch.float64)
    got = grouped_fprop(x, torch.ones(1, 1, 2), out_dtype=dtype)
    assert got.dtype == dtype
    assert got.item() == {torch.float64: one + tiny, torch.float32: one, torch.bfloat16: 1.0}[dtype]


def test_random_operands_meet_the_bound_and_wrong_scales_do_not() -> None:
    """The bound that kernel tests use: an fp32 GEMM passes; one scale byte off by one, anywhere, does not."""
    a, b = random_operand(64, 512), random_operand(80, 512, seed=1)
    a64, b64 = dequantize(a, torch.float64), dequantize(b, torch.float64)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        scaled_a = a64 / 64 if dtype is torch.float16 else a64
        exact = grouped_fprop(scaled_a, b64[None])
        assert_sum_error(exact.to(dtype), scaled_a, b64)
        assert_sum_error((scaled_a.float() @ b64.float().T).to(dtype), scaled_a, b64)
        assert_sum_error(sequential_sum(scaled_a, b64).to(dtype), scaled_a, b64)
    smallest = divmod(int(a.scale.argmin()), a.scale.shape[1])
    for r, c in ((0, 0), (63, 15), smallest):
        wrong = a64.clone()
        wrong[r, 32 * c : 32 * (c + 1)] *= 2
        with pytest.raises(AssertionError, match=r"expected .* got .* relative error"):
            assert_sum_error((wrong.float() @ b64.float().T), a64, b64)
    with pytest.raises(AssertionError, match="finite"):
        assert_sum_error(torch.full((64, 80), math.nan), a64, b64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_ulp(dtype: torch.dtype) -> None:
    values = torch.tensor([1.0, 1.5, 2.0, -3.0, 1e-3, 2.0**-14, 0.0]).to(dtype)
    up = torch.nextafter(values.abs(), torch.tensor(math.inf, dtype=dtype))
    gap = (up.double() - values.abs().double()) / 2
    assert torch.equal(half_ulp(values.double(), dtype), gap)


@FORMAT
def test_exact_operands_are_exact(format: ElementFormat) -> None:
    """fp32 gives the float64 sum, bitwise, forwards and backwards; and no scale is like one around it."""
    a = exact_operand(40, 1024, reduction=1024, format=format)
    b = exact_operand(24, 1024, reduction=1024, format=format, seed=7)
    a64, b64 = dequantize(a, torch.float64), dequantize(b, torch.float64)
    for order in (slice(None), torch.arange(1023, -1, -1)):
        assert torch.equal(sequential_sum(a64[:, order], b64[:, order]).double(), a64 @ b64.T)
    scale = exact_operand(3, 300, 1024, reduction=1024, format=format).scale.int()
    for axis, steps in ((0, (1,)), (1, (1, 32, 64, 96, 128)), (2, (1, 2, 3, 4))):
        for step in steps:
            assert (
                scale.narrow(axis, step, scale.shape[axis] - step)
                != scale.narrow(axis, 0, scale.shape[axis] - step)
            ).all()
    assert a.data.view(torch.uint8).unique().numel() > 2


@pytest.mark.parametrize("format", [MXFP8_E4M3, FORMATS["mxfp8_e5m2"]], ids=repr)
def test_fp32_sums_where_nothing_overflows(format: ElementFormat) -> None:
    """float32_holds: the largest codes with the largest scales that it lets pass stay finite in fp32."""
    top = torch.full((4, 4096), format.max_value)

    def with_byte(byte: int) -> MXTensor:
        mx = quantize(top, format)
        return replace(mx, scale=torch.full_like(mx.scale, byte))

    for a, b in ((200, 114), (157, 157), (114, 200)):
        x, w = with_byte(a), with_byte(b)
        w = MXTensor(w.data[None], w.scale[None], format, -1, ScaleLayout.LINEAR, torch.Size((1, 4, 4096)))
        assert float32_holds(x, w)
        fast = grouped_fprop(x, w, sum_dtype=torch.float32)
        torch.testing.assert_close(fast.double(), grouped_fprop(x, w), rtol=1e-6, atol=0)
    assert not float32_holds(with_byte(201), with_byte(0))
    assert not float32_holds(with_byte(158), with_byte(157))
    assert not float32_holds(with_byte(255), with_byte(0))  # NaN
    assert float32_holds(torch.zeros(1, 1), torch.zeros(1, 1))


def test_mixed_operands() -> None:
    x, w = exact_operand(6, 64, reduction=64), random_matrix(1, N, 64)
    assert torch.equal(grouped_fprop(x, w), dequantize(x, torch.float64) @ w[0].double().T)


def test_errors() -> None:
    x, w = torch.zeros(128, 32), torch.zeros(2, N, 32)
    offs = offs_of([3, 4])
    q = quantize
    for call, error, text in [
        (lambda: grouped_fprop(x[0], w, offs), ValueError, r"x: expected 2 axes, got shape \(32,\)"),
        (
            lambda: grouped_fprop(x.int(), w, offs),
            TypeError,
            r"x: expected an MXTensor or a floating-point tensor",
        ),
        (
            lambda: grouped_fprop(x, w[..., :16], offs),
            ValueError,
            r"x: expected shape \(any, 16\), got shape \(128, 32\)",
        ),
        (lambda: grouped_fprop(x, w, offs_of([3])), ValueError, r"w: expected 1 groups, got 2"),
        (lambda: grouped_fprop(x, w), ValueError, r"w: expected 1 groups, got 2"),
        (
            lambda: grouped_fprop(x, w, offs),
            ValueError,
            r"rows of aligned groups: expected at least 256, got 128",
        ),
        (lambda: grouped_fprop(x, w, offs.long()), TypeError, r"offs: expected torch.int32"),
        (
            lambda: grouped_fprop(x[:5], w, offs, row_map=COMPACT),
            ValueError,
            r"ascending ends in \[0, 5\], got \[3, 7\]",
        ),
        (lambda: grouped_fprop(x, w, offs, row_map="packed"), ValueError, r"row_map: expected one of"),  # type: ignore[arg-type]
        (
            lambda: grouped_fprop(q(x, MXFP8_E4M3, axis=0), w, offs),
            ValueError,
            r"x: expected blocks along axis -1, got axis -2",
        ),
        (
            lambda: grouped_dgrad(x, q(w, MXFP8_E4M3), offs),
            ValueError,
            r"w: expected blocks along axis -2, got axis -1",
        ),
        (
            lambda: grouped_wgrad(q(x, MXFP8_E4M3), x, offs),
            ValueError,
            r"dy: expected blocks along axis -2, got axis -1",
        ),
        (
            lambda: grouped_wgrad(x, x[:9], offs),
            ValueError,
            r"x: expected shape \(128, any\), got shape \(9, 32\)",
        ),
        (
            lambda: grouped_wgrad(q(x, MXFP8_E4M3, axis=0), x, offs, row_map=COMPACT),
            ValueError,
            r"row_map: expected aligned rows with MX operands",
        ),
    ]:
        with pytest.raises(error, match=text):
            call()

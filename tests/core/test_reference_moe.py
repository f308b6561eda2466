"""Route, gather, combine and SwiGLU: against plain loops, rationals and 50-digit decimals."""

import decimal
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from mx_core import RowMap
from mx_core.groups import aligned_offs, aligned_rows, is_real_row
from mx_core.reference import combine, combine_backward, dswiglu, gather, route, slot_weights, swiglu
from mx_core.reference.routing import fma
from support import oracle
from support.gemm_data import GROUP_SIZES, offs_of, poison
from torch import Tensor

SIZES = pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)


def plain_route(topk_ids: list[list[int]], num_experts: int) -> tuple[list[list[int]], list[int], list[int]]:
    """The definition, one choice at a time."""
    counts = [sum(row.count(e) for row in topk_ids) for e in range(num_experts)]
    offs = [sum(counts[: e + 1]) for e in range(num_experts)]
    free = aligned_offs(torch.tensor(offs, dtype=torch.int32)).tolist()
    token_of = [-1] * aligned_rows(sum(map(len, topk_ids)), num_experts)
    slot_of = [[-1] * len(row) for row in topk_ids]
    for t, row in enumerate(topk_ids):
        for j, e in enumerate(row):
            if 0 <= e < num_experts:
                slot_of[t][j], token_of[free[e]] = free[e], t
                free[e] += 1
    return slot_of, token_of, offs


@given(
    num_experts=st.integers(1, 6),
    ids=st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(st.integers(-2, 7), min_size=k, max_size=k), min_size=1, max_size=60)
    ),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
@example(num_experts=3, ids=[[-1, 3]], dtype=torch.int32)
@example(num_experts=1, ids=[[0]] * 300, dtype=torch.int64)
@example(num_experts=2, ids=[[0, 0]] * 70, dtype=torch.int64)
def test_route(num_experts: int, ids: list[list[int]], dtype: torch.dtype) -> None:
    slot_of, token_of, offs = route(torch.tensor(ids, dtype=dtype), num_experts)
    assert (slot_of.tolist(), token_of.tolist(), offs.tolist()) == plain_route(ids, num_experts)
    assert {slot_of.dtype, token_of.dtype, offs.dtype} == {torch.int32}


def test_route_drops_ids_that_int32_would_wrap() -> None:
    slot_of, _, offs = route(torch.tensor([[2**32, 1], [-(2**32) + 1, 2**62]]), 2)
    assert slot_of.tolist() == [[-1, 128 * 0], [-1, -1]]
    assert offs.tolist() == [0, 1]


def test_c12_no_token() -> None:
    slot_of, token_of, offs = route(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert slot_of.shape == (0, 2)
    assert offs.tolist() == [0, 0, 0]
    assert token_of.tolist() == [-1] * 256
    assert combine(poison(256, 8, dtype=torch.bfloat16), slot_of).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather(dtype: torch.dtype) -> None:
    x = torch.randn(7, 16).to(dtype)
    x[3] = math.nan  # no row asks for token 3
    token_of = torch.tensor([5, -1, 0, 5, 6, -1], dtype=torch.int32)
    got = gather(x, token_of)
    assert got.dtype == dtype
    assert torch.equal(got, torch.stack([x[5], x[0] * 0, x[0], x[5], x[6], x[0] * 0]))
    assert gather(x[:0], torch.full((128,), -1)).count_nonzero() == 0


def test_slot_weights() -> None:
    slot_of = torch.tensor([[2, -1], [0, 5]], dtype=torch.int32)
    weights = torch.tensor([[0.25, math.nan], [-1.5, 0.0]])
    assert slot_weights(weights, slot_of, 8).tolist() == [-1.5, 0, 0.25, 0, 0, 0, 0, 0]


def fraction_of(x: float) -> Fraction:
    return Fraction(x)


def nearest_float32(value: Fraction) -> float:
    """Round a rational to fp32, ties to even, subnormals included; no zero, no overflow."""
    magnitude = abs(value)
    quantum = oracle.power_of_two(max(oracle.floor_log2(magnitude), -126) - 23)
    return float(round(magnitude / quantum) * quantum) * (1 if value > 0 else -1)  # round() is half to even


def tricky_triples() -> tuple[Tensor, Tensor, Tensor]:
    """Products and sums that land on, and just beside, ties: where rounding twice goes wrong."""
    a = torch.randn(3000) * torch.randint(-12, 12, (3000,)).exp2()
    b = torch.randn(3000)
    c = torch.randn(3000) * torch.randint(-40, 12, (3000,)).exp2()
    # c is far below half an ulp of the product but decides a tie: product = (1 + 2^-12)(1 + 2^-12 ...) and alike
    odd = 1 + (torch.randint(0, 1 << 11, (3000,)) * 2 + 1) * 2.0**-12
    sign = torch.randint(0, 2, (3000,)) * 2 - 1.0
    tie_a, tie_b, tie_c = odd, 1 + torch.randint(1, 8, (3000,)) * 2.0**-12, sign * 2.0**-80
    # c holds the tie: c = 1 + 2^-23 k, product = 2^-24 (1 + tiny)
    half_a = torch.full((3000,), 2.0**-12)
    half_b = sign * 2.0**-12 * (1 + torch.randint(-1, 2, (3000,)) * 2.0**-23)
    half_c = 1 + torch.randint(0, 1 << 20, (3000,)) * 2.0**-23
    tiny = [torch.randn(3000) * 2.0**-75, torch.randn(3000) * 2.0**-60, torch.randn(3000) * 2.0**-140]
    parts = [(a, b, c), (tie_a, tie_b, tie_c), (half_a, half_b, half_c), tuple(tiny)]
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]


def test_fma_rounds_once() -> None:
    a, b, c = tricky_triples()
    got = fma(a, b, c).tolist()
    exact = [
        Fraction(x) * Fraction(y) + Fraction(z)
        for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)
    ]
    wrong = [i for i, value in enumerate(exact) if value != 0 and nearest_float32(value) != got[i]]
    assert wrong == []
    twice = (a.double() * b.double() + c.double()).float()
    assert (
        twice != torch.tensor(got)
    ).sum() > 10  # plain float64 arithmetic fails on these: the triples are tricky


def test_fma_specials() -> None:
    inf, nan = math.inf, math.nan
    a = torch.tensor([inf, inf, 0.0, nan, 1.0, 3e38, -0.0, 1.0])
    b = torch.tensor([1.0, 1.0, inf, 1.0, 1.0, 3e38, 1.0, -1.0])
    c = torch.tensor([1.0, -inf, 1.0, 1.0, inf, 0.0, -0.0, 1.0])
    want = torch.tensor([inf, nan, nan, nan, inf, inf, -0.0, 0.0])
    got = fma(a, b, c)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got.signbit(), want.signbit() | got.isnan() & got.signbit())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_combine(dtype: torch.dtype, weighted: bool) -> None:
    """acc = fma(w_j, y_j, acc) from +0, j ascending; dropped choices add nothing; long enough for two pieces."""
    tokens, k, width = 700, 3, 100
    ids = torch.randint(-1, 5, (tokens, k))
    slot_of, token_of, _ = route(ids, 5)
    y = torch.randn(token_of.shape[0], width).to(dtype)
    y[token_of < 0] = math.nan
    weights = torch.rand(tokens, k)
    weights[ids < 0] = math.nan  # of dropped choices: never read
    weights[5, 0] = 0.0
    got = combine(y, slot_of, weights if weighted else None)
    assert got.dtype == dtype
    for t in range(0, tokens, 37):
        acc = torch.zeros(width)
        for j in range(k):
            if (slot := slot_of[t, j].item()) >= 0:
                w = weights[t, j] if weighted else torch.tensor(1.0)
                exact = [
                    Fraction(w.item()) * Fraction(v) + Fraction(s)
                    for v, s in zip(y[slot].tolist(), acc.tolist(), strict=True)
                ]
                acc = torch.tensor([nearest_float32(v) if v else 0.0 for v in exact])
        assert torch.equal(got[t], acc.to(dtype))
    dropped = (slot_of < 0).all(1)
    assert dropped.any()
    assert not got[dropped].signbit().any()
    assert got[dropped].count_nonzero() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_backward(dtype: torch.dtype) -> None:
    tokens, k, width = 50, 2, 40
    ids = torch.randint(-1, 4, (tokens, k))
    slot_of, token_of, _ = route(ids, 4)
    y = torch.randn(token_of.shape[0], width).to(dtype)
    y[token_of < 0] = math.nan
    weights, dout = torch.rand(tokens, k), torch.randn(tokens, width).to(dtype)
    weights[0] = torch.tensor([0.0, 1e-30])
    dy, dweights = combine_backward(dout, y, slot_of, weights)
    assert dy.dtype == dtype
    want_dy, want_dw = torch.zeros_like(dy), torch.zeros(tokens, k)
    for t in range(tokens):
        for j in range(k):
            if (slot := slot_of[t, j].item()) >= 0:
                want_dy[slot] = (weights[t, j] * dout[t].float()).to(dtype)
                want_dw[t, j] = (dout[t].double() * y[slot].double()).sum().float()
    assert torch.equal(dy, want_dy)
    assert torch.equal(dweights, want_dw)


def silu_exactly(gate: float) -> decimal.Decimal:
    g = decimal.Decimal(gate)
    return g / (1 + (-g).exp())


@pytest.fixture
def _precise() -> object:
    with decimal.localcontext(decimal.Context(prec=50)):
        yield


@pytest.mark.usefixtures("_precise")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_swiglu_is_fp32s_nearest(dtype: torch.dtype) -> None:
    """Against 50 digits, over the whole range of gates, subnormal results included."""
    gate = torch.cat(
        [torch.linspace(-105, 105, 900), torch.randn(100), torch.tensor([-0.0, 0.0, 1e-30, -500.0, 1e38])]
    )
    up = torch.randn(gate.shape[0])
    h = torch.stack([gate, up], 1).to(dtype)
    h = torch.nn.functional.pad(h, (0, 0, 0, -h.shape[0] % 128))
    offs = offs_of([gate.shape[0]])
    got = swiglu(h, offs, out_dtype=torch.float32)[: gate.shape[0], 0]
    exact = [silu_exactly(g) * decimal.Decimal(u) for g, u in h[: gate.shape[0]].tolist()]
    for value, want in zip(got.tolist(), exact, strict=True):
        ulp = (
            decimal.Decimal(2) ** max(oracle.floor_log2(abs(Fraction(want))) - 23, -149)
            if want
            else decimal.Decimal(0)
        )
        assert abs(decimal.Decimal(value) - want) <= ulp * decimal.Decimal("0.500001")


def test_swiglu_is_torchs() -> None:
    h = torch.randn(256, 128).bfloat16()
    eager = torch.nn.functional.silu(h[:, :64].float()) * h[:, 64:].float()
    torch.testing.assert_close(
        swiglu(h, offs_of([256]), out_dtype=torch.float32), eager, rtol=2.0**-20, atol=0
    )
    assert torch.equal(
        swiglu(h, offs_of([256])), swiglu(h, offs_of([256]), out_dtype=torch.float32).bfloat16()
    )


@pytest.mark.parametrize("rows", [127, 128, 129])
def test_c14_gate_comes_first(rows: int) -> None:
    """C14: gate 1, up 2 everywhere. silu(2) * 1 would be 1.76."""
    P = aligned_rows(rows, 1)
    h = poison(P, 64, dtype=torch.float32)
    h[:rows, :32], h[:rows, 32:] = 1.0, 2.0
    a = swiglu(h, offs_of([rows]))
    assert a[:rows].unique().tolist() == [torch.tensor(1.4621171572600098).item()]
    assert torch.equal(a[rows:], torch.zeros(P - rows, 32))


@SIZES
def test_dswiglu_is_the_gradient(sizes: list[int]) -> None:
    """Against autograd in float64; padding, poisoned, comes out as 0."""
    offs = offs_of(sizes)
    P, H = aligned_rows(sum(sizes), len(sizes)), 40
    real = is_real_row(offs, P, RowMap.ALIGNED)[:, None]
    h, da, w = torch.randn(P, 2 * H), torch.randn(P, H), torch.rand(P)
    h64, w64 = h.double().requires_grad_(), w.double().requires_grad_()
    a64 = torch.nn.functional.silu(h64[:, :H]) * h64[:, H:]
    ((w64[:, None] * a64) * da).sum().backward()
    nan = torch.where(real, 0.0, math.nan)
    dh, wa, dw = dswiglu(da + nan, h + nan, w, offs)
    zero = torch.zeros(())
    for got, want in ((dh, h64.grad), (wa, w64[:, None] * a64), (dw[:, None], w64.grad[:, None])):
        want = torch.where(real, want.detach(), zero.double()).float()
        torch.testing.assert_close(got, want, rtol=2.0**-23, atol=2.0**-45)
        assert (got[~real[:, 0]] == 0).all()
    assert dw.dtype == torch.float32
    assert dswiglu(da.bfloat16(), h.bfloat16(), w, offs)[0].dtype == torch.bfloat16


@pytest.mark.parametrize("gate", [-3e38, -200.0, -88.0, 0.0, 88.0, 200.0, 3e38])
def test_dswiglu_of_extreme_gates(gate: float) -> None:
    h = torch.full((128, 64), gate)
    h[:, 32:] = 1.0
    dh, wa, dw = dswiglu(torch.full((128, 32), 2.0**-20), h, torch.ones(128), offs_of([128]))
    assert all(t.isfinite().all() for t in (dh, wa, dw))
    slope = 1.0 if gate > 80 else (0.5 if gate == 0 else 0.0)
    torch.testing.assert_close(dh[0, 0].item(), slope * 2.0**-20, rtol=1e-6, atol=1e-40)


def test_c22_router_weight_0() -> None:
    """C22: w = 0, w = 1e-30, a token with all weights 0: finite gradients, dw right at w = 0."""
    slot_of, token_of, offs = route(torch.tensor([[0, 1], [1, 0], [0, 1]]), 2)
    weights = torch.tensor([[0.0, 1.0], [1e-30, 0.5], [0.0, 0.0]])
    w = slot_weights(weights, slot_of, token_of.shape[0])
    h, da = torch.randn(token_of.shape[0], 64), torch.randn(token_of.shape[0], 32)
    dh, wa, dw = dswiglu(da, h, w, offs)
    a = swiglu(h, offs, out_dtype=torch.float32)
    for t, j in ((0, 0), (1, 0), (2, 0), (2, 1)):
        slot = slot_of[t, j]
        assert dw[slot].item() == pytest.approx((da[slot].double() * a[slot].double()).sum().item(), rel=1e-6)
        assert dh[slot].isfinite().all()
        torch.testing.assert_close(
            wa[slot].double(), weights[t, j].double() * a[slot].double(), rtol=2.0**-22, atol=0
        )
    assert dh[slot_of[0, 0]].count_nonzero() == 0
    assert dh[slot_of[1, 0]].abs().max() > 0  # 1e-30 does not underflow
    _, dweights = combine_backward(torch.randn(3, 32), da, slot_of, weights)
    assert dweights.isfinite().all()


def test_errors() -> None:
    with pytest.raises(TypeError, match=r"topk_ids: expected torch.int32 or torch.int64, got torch.float32"):
        route(torch.zeros(3, 2), 2)
    with pytest.raises(ValueError, match=r"topk_ids: expected 2 axes, got shape \(3,\)"):
        route(torch.zeros(3, dtype=torch.int64), 2)
    with pytest.raises(ValueError, match=r"weights: expected shape \(3, 2\), got shape \(3, 1\)"):
        combine(torch.zeros(128, 4), torch.zeros(3, 2, dtype=torch.int32), torch.zeros(3, 1))
    with pytest.raises(ValueError, match=r"h.shape\[1\]: expected a multiple of 2, got 3"):
        swiglu(torch.zeros(128, 3), offs_of([1]))
    with pytest.raises(ValueError, match=r"da: expected shape \(128, 2\), got shape \(128, 4\)"):
        dswiglu(torch.zeros(128, 4), torch.zeros(128, 4), torch.zeros(128), offs_of([1]))

"""mx_grouped_mm and mx_linear: every rank of torch.nn.functional.grouped_mm, gradients, strides, refusals."""

import mx_kernels as mk
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_core import FORMATS, dequantize, quantize
from mx_kernels.recipe import RECIPES
from support.gemm_data import GROUP_SIZES, offs_of
from torch import Tensor

from kernels.layer import relative_error

pytestmark = pytest.mark.usefixtures("float64_sums")

RECIPES_TRIED = ("bf16", "mxfp8", "mxfp8_e5m2", "mxfp4")


def q(x: Tensor, axis: int, recipe: str) -> Tensor:
    """float64 values of x as the recipe multiplies them; the whole of `axis` is reduced."""
    if recipe == "bf16":
        return x.double()
    how = RECIPES[recipe]
    return dequantize(quantize(x, FORMATS[how.format], axis=axis, rounding=how.rounding), torch.float64)


def product(a: Tensor, b: Tensor, recipe: str) -> Tensor:
    """a (M, K) @ b (K, N)."""
    return q(a, -1, recipe) @ q(b, -2, recipe)


def expected(
    a: Tensor, b: Tensor, dout: Tensor, ends: list[int] | None, recipe: str
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, da, db) of every rank combination, group by group, from the definition of the product alone."""
    out = torch.zeros_like(dout, dtype=torch.float64)
    da, db = torch.zeros_like(a, dtype=torch.float64), torch.zeros_like(b, dtype=torch.float64)
    groups = a.shape[0] if ends is None else len(ends)
    starts = [None] * groups if ends is None else [0, *ends[:-1]]
    for g in range(groups):
        s = slice(None) if ends is None else slice(starts[g], ends[g])
        if (a.ndim, b.ndim) == (2, 3):
            ia, ib, io = s, g, s
        elif (a.ndim, b.ndim) == (2, 2):
            ia, ib, io = (slice(None), s), s, g
        elif (a.ndim, b.ndim) == (3, 2):
            ia, ib, io = g, (slice(None), s), (slice(None), s)
        else:
            ia = ib = io = g
        if a[ia].numel() == 0 or b[ib].numel() == 0:
            continue
        out[io] = product(a[ia], b[ib], recipe)
        da[ia] = product(dout[io], b[ib].T, recipe)
        db[ib] = product(a[ia].T, dout[io], recipe)
    return out, da, db


def run(a: Tensor, b: Tensor, dout: Tensor, **arguments) -> tuple[Tensor, Tensor, Tensor]:
    a, b = a.detach().requires_grad_(), b.detach().requires_grad_()
    out = mk.mx_grouped_mm(a, b, **arguments)
    assert out.shape == dout.shape
    out.backward(dout)
    return out.detach(), a.grad, b.grad


def operands(ranks: tuple[int, int], sizes: list[int], tail: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and dout of these ranks; `tail` more rows (or columns) than the groups have."""
    E, n = len(sizes), sum(sizes) + tail
    if ranks == (2, 3):
        return torch.randn(n, 64), torch.randn(E, 96, 64).transpose(1, 2), torch.randn(n, 96)
    if ranks == (2, 2):
        return torch.randn(n, 64).T, torch.randn(n, 96), torch.randn(E, 64, 96)
    return torch.randn(E, 64, 32), torch.randn(n, 32).T, torch.randn(64, n)


@pytest.mark.parametrize("recipe", RECIPES_TRIED)
@pytest.mark.parametrize("ranks", [(2, 3), (2, 2), (3, 2)])
@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
def test_groups(ranks, sizes, recipe) -> None:
    a, b, dout = operands(ranks, sizes, tail=5)
    offs = offs_of(sizes)
    got = run(a, b, dout, offs=offs, recipe=recipe)
    for x, want in zip(got, expected(a, b, dout, offs.tolist(), recipe), strict=True):
        assert relative_error(x, want) <= 3e-7
        assert not x[want == 0].any()  # empty groups, and what lies at and past offs[-1]


@pytest.mark.parametrize("recipe", RECIPES_TRIED)
def test_without_groups(recipe) -> None:
    a, b, dout = torch.randn(3, 37, 64), torch.randn(3, 64, 96), torch.randn(3, 37, 96)
    for x, want in zip(run(a, b, dout, recipe=recipe), expected(a, b, dout, None, recipe), strict=True):
        assert relative_error(x, want) <= 3e-7


@given(st.lists(st.integers(0, 140), min_size=1, max_size=5), st.integers(0, 40), st.booleans())
def test_any_groups(sizes, tail, wgrad) -> None:
    a, b, dout = operands((2, 2) if wgrad else (2, 3), sizes, tail)
    offs = offs_of(sizes)
    got = run(a, b, dout, offs=offs)
    for x, want in zip(got, expected(a, b, dout, offs.tolist(), "mxfp8"), strict=True):
        assert relative_error(x, want) <= 3e-7


@pytest.mark.parametrize("ranks", [(2, 3), (2, 2), (3, 2)])
def test_rows_past_the_groups_are_never_read(ranks) -> None:
    sizes = [3, 0, 40]
    a, b, dout = operands(ranks, sizes, tail=7)
    offs = offs_of(sizes)
    want = run(a, b, dout, offs=offs)
    if ranks == (2, 3):
        a[43:], dout[43:] = torch.nan, torch.nan
    elif ranks == (2, 2):
        a[:, 43:], b[43:] = torch.nan, torch.nan
    else:
        b[:, 43:], dout[:, 43:] = torch.nan, torch.nan
    for x, y in zip(run(a, b, dout, offs=offs), want, strict=True):
        assert torch.equal(x, y)


def test_empty_experts_gradient() -> None:
    """C10: A = ones (6, 32), B[e] = e + 1, offs [2, 2, 6], dY = ones."""
    a = torch.ones(6, 32, dtype=torch.bfloat16)
    b = torch.arange(1.0, 4.0).to(torch.bfloat16)[:, None, None].expand(3, 32, 32).contiguous()
    dout = torch.ones(6, 32, dtype=torch.bfloat16)
    for recipe in ("bf16", "mxfp8"):
        out, da, db = run(a, b, dout, offs=offs_of([2, 0, 4]), recipe=recipe)
        assert out[:, 0].tolist() == [32, 32, 96, 96, 96, 96]
        assert da[:, 0].tolist() == [32, 32, 96, 96, 96, 96]
        for e, value in enumerate((2, 0, 4)):
            assert (db[e] == value).all()


def test_nothing_to_do() -> None:
    """C12."""
    w = torch.randn(3, 64, 32)
    out, da, db = run(torch.randn(0, 32), w.transpose(1, 2), torch.randn(0, 64), offs=offs_of([0, 0, 0]))
    assert out.shape == (0, 64)
    assert da.shape == (0, 32)
    assert db.shape == (3, 32, 64)
    assert not db.any()


@pytest.mark.parametrize("ranks", [(2, 3), (2, 2), (3, 2)])
def test_strides_do_not_matter(ranks) -> None:
    a, b, dout = operands(ranks, [40, 0, 33])
    offs = offs_of([40, 0, 33])
    want = run(a, b, dout, offs=offs)
    for x, y in zip(run(a.contiguous(), b.contiguous(), dout, offs=offs), want, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize("ranks", [(2, 3), (2, 2), (3, 2), (3, 3)])
def test_it_is_torchs_grouped_mm(ranks) -> None:
    """The bf16 recipe against torch's own, where it runs on this machine's CPU."""
    function = getattr(torch.nn.functional, "grouped_mm", None)
    if function is None:
        pytest.skip("this torch has no grouped_mm")
    sizes = [16, 48, 8, 24]
    if ranks == (3, 3):
        a, b, offs = torch.randn(4, 32, 64), torch.randn(4, 96, 64).transpose(1, 2), None
    else:
        (a, b, _), offs = operands(ranks, sizes), offs_of(sizes)
    a, b = a.bfloat16().requires_grad_(), b.bfloat16().requires_grad_()
    want = function(a, b, offs=offs)
    dout = torch.randn(want.shape).bfloat16()
    want_grads = torch.autograd.grad(want, (a, b), dout)
    got = mk.mx_grouped_mm(a, b, offs=offs, recipe="bf16")
    assert got.dtype == want.dtype
    for x, y in zip((got, *torch.autograd.grad(got, (a, b), dout)), (want, *want_grads), strict=True):
        assert x.shape == y.shape
        assert relative_error(x, y) < 4e-3


def test_out_dtype() -> None:
    a, b, dout = operands((2, 3), [20, 30])
    a, b = a.bfloat16(), b.bfloat16()
    out, da, db = run(a, b, dout, offs=offs_of([20, 30]), out_dtype=torch.float32, recipe="bf16")
    assert (out.dtype, da.dtype, db.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)
    assert relative_error(out, expected(a, b, dout, [20, 50], "bf16")[0]) < 3e-7


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"bias": torch.ones(64)}, ValueError, "bias: expected None"),
        ({"offs": None}, ValueError, "offs: expected a tensor where an operand is 2-D"),
        ({"offs": torch.tensor([10])}, TypeError, "offs: expected torch.int32"),
        ({"offs": offs_of([10])}, ValueError, "offs: expected 2 groups"),
        ({"mat_a": torch.ones(10, 64)}, ValueError, "mat_a and mat_b: expected the same K"),
        ({"mat_a": torch.ones(10, 32).half()}, TypeError, "mat_a: expected torch.bfloat16 or torch.float32"),
        ({"mat_a": torch.ones(32)}, ValueError, "mat_a, mat_b: expected 2 or 3 axes"),
        ({"mat_b": torch.ones(2, 32, 40)}, ValueError, "N: expected a multiple of 32, got 40"),
        ({"out_dtype": torch.float16}, TypeError, "out_dtype: expected torch.bfloat16 or torch.float32"),
        ({"mat_a": torch.ones(2, 5, 32)}, ValueError, "None where both are 3-D"),
        ({"mat_a": torch.ones(3, 5, 32), "offs": None}, ValueError, "the same first size"),
        ({"recipe": "int4"}, ValueError, "recipe: expected one of"),
    ],
)
def test_refusals(arguments, error, text) -> None:
    good = {"mat_a": torch.ones(10, 32), "mat_b": torch.ones(2, 32, 64), "offs": offs_of([4, 6])}
    mk.mx_grouped_mm(**good)
    with pytest.raises(error, match=text):
        mk.mx_grouped_mm(**good | arguments)


def test_bf16_takes_smaller_sizes() -> None:
    a, b = torch.randn(10, 24).bfloat16(), torch.randn(2, 24, 40).bfloat16()
    assert mk.mx_grouped_mm(a, b, offs=offs_of([4, 6]), recipe="bf16").shape == (10, 40)
    with pytest.raises(ValueError, match="N: expected a multiple of 8, got 41"):
        mk.mx_grouped_mm(a, torch.randn(2, 24, 41).bfloat16(), offs=offs_of([4, 6]), recipe="bf16")


# mx_linear -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES_TRIED)
@pytest.mark.parametrize("rows", [0, 1, 31, 200])
def test_linear(recipe, rows) -> None:
    x, w = torch.randn(rows, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
    dy = torch.randn(rows, 96)
    y = mk.mx_linear(x, w, recipe=recipe)
    y.backward(dy)
    out, da, db = expected(x.detach(), w.detach().T[None], dy, [rows], recipe)
    assert relative_error(y, out) <= 3e-7
    assert relative_error(x.grad, da) <= 3e-7
    assert relative_error(w.grad, db[0].T) <= 3e-7


def test_linear_with_leading_axes_and_expanded_gradient() -> None:
    x, w = torch.randn(2, 3, 64, requires_grad=True), torch.randn(96, 64, requires_grad=True)
    y = mk.mx_linear(x, w)
    assert y.shape == (2, 3, 96)
    y.sum().backward()
    assert x.grad.shape == x.shape
    assert torch.equal(mk.mx_linear(x[0, 0], w), mk.mx_linear(x, w)[0, 0])


@pytest.mark.parametrize("needs", ["x", "w", ""])
def test_linear_with_frozen_inputs(needs) -> None:
    x, w = torch.randn(50, 64), torch.randn(96, 64)
    full = [t.clone().requires_grad_() for t in (x, w)]
    mk.mx_linear(*full).sum().backward()
    some = [x.clone().requires_grad_("x" in needs), w.clone().requires_grad_("w" in needs)]
    y = mk.mx_linear(*some)
    assert y.requires_grad is bool(needs)
    if needs:
        y.sum().backward()
        for a, b, name in zip(some, full, "xw", strict=True):
            assert (a.grad is None) if name not in needs else torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("orientations", ["both", "row_only"])
def test_prepared_weights(orientations) -> None:
    w = torch.randn(3, 96, 64)
    wq = mk.prepare_weights(w, w[0], orientations=orientations)
    a, b, dout = operands((2, 3), [20, 0, 30])
    offs = offs_of([20, 0, 30])
    b = w.transpose(1, 2)
    for x, y in zip(run(a, b, dout, offs=offs, wq=wq[0]), run(a, b, dout, offs=offs), strict=True):
        assert torch.equal(x, y)
    x, w0 = a.clone().requires_grad_(), w[0].clone().requires_grad_()
    one = torch.autograd.grad(mk.mx_linear(x, w0, wq=wq[1]).sum(), (x, w0))
    two = torch.autograd.grad(mk.mx_linear(x, w0).sum(), (x, w0))
    for p, r in zip(one, two, strict=True):
        assert torch.equal(p, r)


@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
def test_nothing_to_sum_over(recipe):
    """K = 0: zeros, and gradients of the operands' shapes."""
    offs = torch.tensor([3, 3, 7], dtype=torch.int32)
    cases = (
        (torch.randn(7, 0), torch.randn(3, 0, 32), offs),
        (torch.randn(3, 5, 0), torch.randn(3, 0, 32), None),
    )
    for a, b, ends in cases:
        a, b = a.bfloat16().requires_grad_(), b.bfloat16().requires_grad_()
        out = mk.mx_grouped_mm(a, b, offs=ends, recipe=recipe)
        out.sum().backward()
        assert out.shape == (*a.shape[:-1], 32)
        assert not out.any()
        assert a.grad.shape == a.shape
        assert b.grad.shape == b.shape
    x, w = torch.randn(2, 4, 0).bfloat16(), torch.randn(32, 0).bfloat16()
    out = mk.mx_linear(x, w, recipe=recipe)
    assert out.shape == (2, 4, 32)
    assert not out.any()

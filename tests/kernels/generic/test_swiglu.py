"""SwiGLU and its backward against float64: codes lie between those of a·(1 - 2^-21) and a·(1 + 2^-21)."""

import pytest
import torch
from mx_core import FORMATS, MXTensor, dequantize, from_blocked, quantize
from mx_core.formats import RowMap
from mx_core.groups import aligned_offs, aligned_rows, is_real_row

from .inputs import offsets

EPSILON = 2.0**-21


def gates_and_ups(counts, width, dtype):
    """h (P, 2H) with zero padding, NaN past the last unit; offs; which rows are real; the end of the last unit."""
    offs = offsets(*counts)
    rows, end = aligned_rows(int(offs[-1]), len(counts)), int(aligned_offs(offs)[-1])
    real = is_real_row(offs, rows, RowMap.ALIGNED)
    h = (torch.randn(rows, 2 * width) * 3).to(dtype)
    h[~real] = 0
    h[end:] = float("nan")
    return h, offs, real, end


def float64_swiglu(h):
    g, u = h.double().chunk(2, dim=1)
    return g * torch.sigmoid(g) * u


def float64_dswiglu(da, h, w):
    """dh, a, dw; and for each of dh the size of the terms whose sum it is."""
    g, u = h.double().chunk(2, dim=1)
    sigmoid, wda = torch.sigmoid(g), da.double() * w.double()[:, None]
    dsilu, terms = sigmoid * (1 + g * (1 - sigmoid)), sigmoid * (1 + g.abs() * (1 - sigmoid))
    a = g * sigmoid * u
    dh = torch.cat([wda * u * dsilu, wda * g * sigmoid], 1)
    return dh, a, (da.double() * a).sum(1), torch.cat([(wda * u * terms).abs(), dh[:, g.shape[1] :].abs()], 1)


def assert_between(data, scale, want, error, axis, format="mxfp8_e4m3", layout="linear"):
    """Dequantised values within [quantise(want - error), quantise(want + error)]."""
    if layout != "linear":
        rows, cols = want.shape if axis == -1 else want.T.shape
        scale = from_blocked(scale, rows, -(-cols // 32))
    got = dequantize(MXTensor(data, scale, FORMATS[format], axis, "linear", want.shape))
    low, high = (
        dequantize(quantize((want + sign * error).float(), FORMATS[format], axis=axis)) for sign in (-1, 1)
    )
    # Near a power of two the two bounds may have different scales, and either rounding is allowed.
    slack = torch.where(low <= high, 0.0, (low - high).abs())
    inside = (got >= torch.minimum(low, high) - slack) & (got <= torch.maximum(low, high) + slack)
    assert inside.all(), f"{int((~inside).sum())} codes outside"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward(gpu, dtype):
    cases = [((100, 0, 129), 96), ((127, 128, 129), 2048), ((1, 0, 3), 32), ((700,), 160)]
    for counts, width in gpu.pick([((100, 0, 29), 96)], cases):
        h, offs, real, end = gates_and_ups(counts, width, dtype)
        want = torch.where(real[:end, None], float64_swiglu(h[:end]), 0)
        (a,) = gpu.run("swiglu", h, offs)
        assert not a[:end][~real[:end]].any()
        half_ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23
        assert ((a[:end] - want).abs() <= (EPSILON + half_ulp) * want.abs()).all()
        for layout in ("linear", "blocked_128x4")[gpu.pick(1, 0) :]:
            data, scale = gpu.run("swiglu_quantize", h, offs, "mxfp8_e4m3", "rceil", layout)
            if layout == "linear":
                assert_between(data[:end], scale[:end], want, EPSILON * want.abs(), -1)
            else:
                assert_between(data[:end], scale[: end // 128], want, EPSILON * want.abs(), -1, layout=layout)


def test_every_gate(gpu):
    """All finite bf16 gates with up = 1, at and below where exp(-g) leaves fp32's range too."""
    g = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    g = g[g.isfinite() & (g > -131) & (g < 1e37)]
    g = g[:: gpu.pick(16, 1)]
    g = torch.nn.functional.pad(g, (0, -len(g) % (64 * 128))).view(-1, 64).float()
    h = torch.cat([g, torch.ones_like(g)], 1)
    (a,) = gpu.run("swiglu", h, offsets(h.shape[0]))
    want = float64_swiglu(h)
    normal = want.abs() >= 2.0**-126
    relative = ((a - want).abs() / want.abs())[normal].max()
    assert relative <= EPSILON, f"largest relative error 2^{relative.log2():.2f}"
    assert ((a - want).abs() <= 2.0**-149)[~normal].all()


@pytest.mark.parametrize("rows", [127, 128, 129])
def test_gate_and_up_are_not_swapped(gpu, rows):  # C14
    if not gpu.is_real and rows != 129:
        pytest.skip("emulated: one of them")
    h = torch.zeros(aligned_rows(rows, 1), 128)
    h[:rows, :64], h[:rows, 64:] = 1.0, 2.0
    (a,) = gpu.run("swiglu", h, offsets(rows))
    assert (a[:rows] / 1.4621171572600098 - 1).abs().max() < EPSILON


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward(gpu, dtype):
    cases = [((100, 0, 129), 96), ((127, 128, 129), 2048), ((1, 0, 3), 32), ((700,), 160)]
    for counts, width in gpu.pick([((100, 0, 29), 96)], cases):
        h, offs, real, end = gates_and_ups(counts, width, dtype)
        da = torch.randn(h.shape[0], width).to(dtype)
        w = torch.where(real, torch.rand(h.shape[0]), 0.0)
        w[real.nonzero()[0]] = 0.0  # C22
        dh, a, dw, size = (
            torch.where(real[:end, None] if t.ndim == 2 else real[:end], t, 0)
            for t in float64_dswiglu(da[:end], h[:end], w[:end])
        )
        dw_size = (da[:end].double() * a).norm(dim=1)
        half_ulp = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-23

        got_dh, got_wa, got_dw = (t[:end] for t in gpu.run("dswiglu", da, h, w, offs))
        assert ((got_dh - dh).abs() <= 2 * EPSILON * size + half_ulp * dh.abs()).all()
        wa = w[:end, None].double() * a
        assert ((got_wa - wa).abs() <= (2 * EPSILON + half_ulp) * wa.abs()).all()
        assert ((got_dw - dw).abs() <= 2e-6 * dw_size).all()

        *parts, got_dw = gpu.run("dswiglu_quantize", da, h, w, offs, "mxfp8_e4m3", "rceil", "linear")
        assert ((got_dw[:end] - dw).abs() <= 2e-6 * dw_size).all()
        blocks = end // 32
        assert_between(parts[0][:end], parts[1][:end], dh, 2 * EPSILON * size, -1)
        assert_between(parts[2][:end], parts[3][:, :blocks], dh, 2 * EPSILON * size, -2)
        assert_between(parts[4][:end], parts[5][:, :blocks], a, EPSILON * a.abs(), -2)
        row = gpu.run("dswiglu_quantize_row", da, h, w, offs, "mxfp8_e4m3", "rceil", "linear")
        assert all(
            torch.equal(x[:end].view(torch.uint8), y[:end].view(torch.uint8))
            for x, y in zip(row[:2], parts[:2], strict=True)
        )
        assert torch.equal(row[2][:end], got_dw[:end])


@pytest.mark.parametrize("width", [96, 128])  # tiles of blocked scales that are not whole, and such that are
def test_backward_with_blocked_scales(gpu, width):
    h, offs, real, end = gates_and_ups(gpu.pick((33, 0, 129), (100, 0, 129, 700)), width, torch.bfloat16)
    rows, da = h.shape[0], torch.randn(h.shape[0], width).bfloat16()
    w = torch.where(real, torch.rand(rows), 0.0)
    for op in ("dswiglu_quantize", "dswiglu_quantize_row"):
        linear, blocked = (
            gpu.run(op, da, h, w, offs, "mxfp8_e4m3", "rceil", layout)[:-1]
            for layout in ("linear", "blocked_128x4")
        )
        for i in range(0, len(linear), 2):
            assert torch.equal(linear[i][:end].view(torch.uint8), blocked[i][:end].view(torch.uint8))
            want = linear[i + 1][:end] if i == 0 else linear[i + 1][:, : end // 32]
            got = from_blocked(blocked[i + 1], *linear[i + 1].shape)
            assert torch.equal(got[:end] if i == 0 else got[:, : end // 32], want)

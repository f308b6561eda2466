"""FP6 and FP4 on GPU backends: rounded in the kernels, carried as E4M3 codes, equal to the CPU backend."""

import pytest
import torch
from mx_core import FORMATS, ScaleLayout, decode, pack
from mx_core.groups import aligned_rows
from mx_kernels import NoBackendError, moe_mlp, prepare_weights
from mx_kernels.generic.narrow import NARROW_FORMATS, pack_e4m3, unpack_e4m3
from support.gemm_data import exact_operand, offs_of, zero_padding_rows

from kernels.layer import make_layer

BLOCKED = ScaleLayout.BLOCKED_128X4


@pytest.mark.parametrize("name", NARROW_FORMATS)
def test_every_code_has_its_e4m3_value(name):
    format = FORMATS[name]
    codes = torch.arange(1 << format.bits, dtype=torch.uint8).repeat(3, 1)
    data = unpack_e4m3(pack(codes, format), name)
    assert data.dtype is torch.float8_e4m3fn
    want = decode(codes, format)
    assert torch.equal(data.float(), want)
    assert torch.equal(data.float().signbit(), want.signbit())
    assert torch.equal(pack_e4m3(data.view(torch.uint8), name), pack(codes, format))


@pytest.mark.parametrize(
    ("mode", "name"), [("fprop", "mxfp4_e2m1"), ("dgrad", "mxfp6_e3m2"), ("wgrad", "mxfp6_e2m3")]
)
def test_gemm(gpu, mode, name):
    """Bitwise on exact operands; a NaN block shows; groups end inside a tile, one is empty."""
    format, sizes, N, K = FORMATS[name], [40, 0, 130], 96, 64
    offs, rows = offs_of(sizes), aligned_rows(sum(sizes), len(sizes))

    def operand(*shape: int, axis: int, seed: int):
        return exact_operand(
            *shape, reduction=max(130, N), axis=axis, format=format, layout=BLOCKED, seed=seed
        )

    if mode == "wgrad":
        a, b = operand(rows, N, axis=-2, seed=1), operand(rows, K, axis=-2, seed=2)
        a, b = zero_padding_rows(a, offs), zero_padding_rows(b, offs)
    else:
        a = zero_padding_rows(operand(rows, K if mode == "fprop" else N, axis=-1, seed=1), offs)
        b = operand(3, N, K, axis=-1 if mode == "fprop" else -2, seed=2)
    a.scale[0, 0, 0, 0, 0] = 255
    args = (mode, a.data, a.scale, name, b.data, b.scale, name, offs, torch.float32, "aligned")
    (got,) = gpu.run("grouped_gemm", *args)
    want = torch.ops.mx.grouped_gemm(*args, "cpu")
    if mode != "wgrad":
        used = torch.arange(rows) < 128 + 256  # past the last unit nothing is promised
        got, want = got[used], want[used]
    assert want.isnan().any()
    assert torch.equal(got.nan_to_num(nan=-1.25), want.nan_to_num(nan=-1.25))


@pytest.mark.parametrize(
    "name", [n if "fp4" in n else pytest.param(n, marks=pytest.mark.slow) for n in NARROW_FORMATS]
)
def test_what_is_quantised(gpu, name):
    """The CPU backend's bytes: quantise both ways, gather with weights, SwiGLU and its backward; NaN and Inf blocks."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(50, 64, generator=g).bfloat16()
    x[3, 5], x[7, 40] = torch.nan, -torch.inf
    x[9] *= 2.0**-120
    x[10] *= 2.0**120
    token_of = torch.randint(-1, 50, (256,), generator=g, dtype=torch.int32)
    how = (name, "rceil", "blocked_128x4")
    gpu.check("quantize", x, name, -1, "rceil", "blocked_128x4", offs_of([20, 0, 30]), "compact")
    gpu.check("quantize_dual", x, name, "floor", "blocked_128x4", offs_of([20, 0, 30]))
    gpu.check("gather_quantize_dual", x, token_of, torch.rand(256, generator=g), *how)
    h, da = (torch.randn(128, n, generator=g).bfloat16() for n in (128, 64))
    swiglu = gpu.check if not gpu.is_real else gpu.run  # sigmoid's last bit is the device's own
    swiglu("swiglu_quantize", h, offs_of([50]), *how)
    args = (da, h, torch.rand(128, generator=g), offs_of([50]), *how)
    *got, _ = gpu.run("dswiglu_quantize", *args)
    *want, _ = torch.ops.mx.dswiglu_quantize(*args, "cpu")  # dw is summed in another order
    for i, (g_i, w_i) in enumerate(zip(got, want, strict=True)):
        differ = (g_i.view(torch.uint8) != w_i.view(torch.uint8)).float().mean()
        assert differ <= (0.01 if gpu.is_real else 0), f"result {i}: {differ:.2%} of the bytes"


@pytest.mark.slow
def test_a_layer(gpu):
    layer = make_layer(T=20, D=32, H=32, E=2, k=1, dtype=torch.bfloat16)

    def run(backend, device):
        moved = type(layer)(*(t.to(device) for t in vars(layer).values()))
        wq = prepare_weights(moved.w1, moved.w2, recipe="mxfp4", backend=backend)
        return [t.cpu() for t in moved.run(lambda *a: moe_mlp(*a, wq=wq, recipe="mxfp4", backend=backend))]

    got, want = run(gpu.backend, gpu.device), run("cpu", "cpu")
    for g, w in zip(got, want, strict=True):
        assert g.isfinite().all()
        assert (g.double() - w.double()).norm() <= 5e-3 * w.double().norm()  # a last bit can move a code


def test_int8_is_refused(gpu):
    x = torch.randn(32, 64, device=gpu.device).bfloat16()
    with pytest.raises(NoBackendError, match="mxint8"):
        torch.ops.mx.quantize(x, "mxint8", -1, "rceil", "blocked_128x4", None, "aligned", gpu.backend)

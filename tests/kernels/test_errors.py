"""Bad input is refused with `name: expected X, got Y` before anything runs: every op, every kind of fault."""

import mx_kernels as mk
import pytest
import torch
from mx_core import MXFP8_E4M3, RowMap, quantize
from mx_kernels.problem import GemmProblem, QuantizeProblem, RouteProblem

from kernels.layer import make_layer
from kernels.test_opcheck import SAMPLES

META = torch.device("meta")


def transposed(x: torch.Tensor) -> torch.Tensor:
    """The same values, no longer contiguous in the last axis."""
    return x.transpose(-1, -2).contiguous().transpose(-1, -2)


def faults(x: torch.Tensor):
    """(what is wrong, tensor) for one tensor argument."""
    yield "dtype", x.to(torch.float64)
    yield "rank", x[None, None]
    if x.ndim > 1:
        yield "strides", transposed(x)
    else:
        yield "strides", x.repeat_interleave(2)[::2]


def cases():
    for op, many in SAMPLES.items():
        arguments = next(a for a in many if all(t is not None for t in a[:1]))
        for i, argument in enumerate(arguments):
            if isinstance(argument, torch.Tensor):
                for kind, bad in faults(argument):
                    yield pytest.param(op, (*arguments[:i], bad, *arguments[i + 1 :]), id=f"{op}-{i}-{kind}")


@pytest.mark.parametrize(("op", "arguments"), list(cases()))
def test_bad_tensor(op: str, arguments: tuple) -> None:
    with pytest.raises((TypeError, ValueError), match=r"expected .*, got "):
        getattr(torch.ops.mx, op)(*arguments)


def is_mx_name(argument: object) -> bool:
    return isinstance(argument, str) and argument.startswith("mx")


@pytest.mark.parametrize(
    "op", [op for op, many in SAMPLES.items() if any(is_mx_name(a) for arguments in many for a in arguments)]
)
def test_bad_name_is_refused_by_op_and_by_fake(op: str) -> None:
    arguments = list(next(arguments for arguments in SAMPLES[op] if any(map(is_mx_name, arguments))))
    arguments[next(i for i, a in enumerate(arguments) if is_mx_name(a))] = "mxfp3"
    with pytest.raises(ValueError, match=r"expected one of .*mxfp8_e4m3.*, got 'mxfp3'"):
        getattr(torch.ops.mx, op)(*arguments)
    meta = [a.to(META) if isinstance(a, torch.Tensor) else a for a in arguments]
    with pytest.raises(ValueError, match=r"expected one of .*mxfp8_e4m3.*, got 'mxfp3'"):
        getattr(torch.ops.mx, op)(*meta)


def test_tensors_on_two_devices() -> None:
    with torch._subclasses.FakeTensorMode() as mode:
        x = torch.empty(8, 32, device="cuda")
        ids = torch.empty(8, 2, dtype=torch.int64)
        token_of = torch.empty(256, dtype=torch.int32)
        offs = torch.empty(2, dtype=torch.int32)
        w1, w2 = torch.empty(2, 64, 32, device="cuda"), torch.empty(2, 32, 32, device="cuda")
    with mode, pytest.raises(ValueError, match="offs: expected a tensor on cuda:0, got cpu"):
        mk.quantize_mx(x, offs=offs)
    with mode, pytest.raises(ValueError, match="token_of: expected a tensor on cuda:0, got cpu"):
        mk.gather(x, token_of)
    with mode, pytest.raises(ValueError, match="topk_ids: expected x's device"):
        mk.moe_mlp(x, ids, ids.float(), w1, w2)


W = torch.randn(3, 64, 32)
X, OFFS = torch.randn(10, 32), torch.tensor([2, 2, 10], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: mk.quantize_mx(X, axis=0), ValueError, "axis: expected -1 or -2, got 0"),
        (lambda: mk.quantize_mx(X, "mxfp8"), ValueError, "format: expected one of"),
        (lambda: mk.quantize_mx(X, rounding="up"), ValueError, "rounding: expected one of"),
        (lambda: mk.quantize_mx(X, layout="tiled"), ValueError, "layout: expected one of"),
        (lambda: mk.quantize_mx(X, axis=-2, offs=OFFS, row_map="compact"), ValueError, "row_map: expected aligned"),
        (lambda: mk.quantize_mx(X, offs=OFFS[:0]), ValueError, "offs: expected at least one group"),
        (lambda: mk.mx_grouped_mm(X, W.transpose(-2, -1), offs=[1, 2]), TypeError, "offs: expected a torch.Tensor, got list"),
        (lambda: mk.quantize_mx(X, offs=OFFS.long()), TypeError, "offs: expected torch.int32, got torch.int64"),
        (lambda: mk.quantize_mx(X, backend="gpu"), ValueError, "backend: expected one of auto, sm100, sm90, cpu"),
        (lambda: mk.quantize_mx(W, offs=OFFS), ValueError, r"x: expected \(M, K\) with offs"),
        (lambda: mk.route(torch.zeros(3, 2), 4), TypeError, "topk_ids: expected torch.int32 or torch.int64"),
        (lambda: mk.route(torch.zeros(3, 2, dtype=torch.int64), 0), ValueError, "E >= 1"),
        (lambda: mk.combine(X, OFFS[None], torch.zeros(1, 2)), ValueError, r"weights: expected shape \(1, 3\), got shape"),
        (lambda: mk.swiglu(torch.zeros(128, 96), OFFS), ValueError, "multiple of 64"),
        (lambda: mk.swiglu(torch.zeros(100, 64), OFFS), ValueError, r"multiple of 128 \(aligned\) rows"),
        (lambda: mk.grouped_gemm_fprop(X, W, OFFS[:2], row_map="compact"), ValueError, "the same number of groups"),
        (lambda: mk.grouped_gemm_fprop(X, W, row_map="compact"), ValueError, "groups .1 without offs"),
        (lambda: mk.grouped_gemm_dgrad(X, W, OFFS, row_map="compact"), ValueError, "the same number of N"),
        (lambda: mk.grouped_gemm_fprop(X, W, OFFS), ValueError, r"a: expected a multiple of 128 \(aligned\) rows, got 10"),
        (lambda: mk.grouped_gemm_fprop(X.bfloat16(), W, OFFS), ValueError, "the same plain dtype"),
        (lambda: mk.grouped_gemm_fprop(quantize(X, MXFP8_E4M3), W, OFFS), ValueError, "both MX or the same plain"),
        (lambda: mk.grouped_gemm_fprop(X, W, OFFS, out_dtype=torch.float16), ValueError, "out_dtype: expected"),
        (lambda: mk.grouped_gemm_wgrad(X, X, OFFS, accumulate=True), ValueError, "out: expected a float32 tensor"),
        (
            lambda: mk.grouped_gemm_wgrad(X, X, OFFS, out=torch.zeros(3, 32, 32).bfloat16(), accumulate=True),
            ValueError,
            "accumulate: expected mode wgrad and out torch.float32",
        ),
        (lambda: mk.grouped_gemm_wgrad(X, X, OFFS, out=torch.zeros(2, 32, 32), row_map="compact"), ValueError, "out: expected shape"),
        (
            lambda: mk.grouped_gemm_fprop(quantize(X, MXFP8_E4M3, axis=-2), quantize(W, MXFP8_E4M3), OFFS),
            ValueError,
            "x: expected blocks along axis -1, got axis -2",
        ),
        (
            lambda: mk.grouped_gemm_wgrad(
                quantize(X, MXFP8_E4M3, axis=-2), quantize(X, MXFP8_E4M3, axis=-2), OFFS, row_map=RowMap.COMPACT
            ),
            ValueError,
            "an MX wgrad takes aligned rows only",
        ),
        (lambda: mk.grouped_gemm_fprop([1], W, OFFS), TypeError, "x: expected an MXTensor or a torch.Tensor, got list"),
        (lambda: mk.mx_linear(X, W), ValueError, r"x, w: expected \(…, K\) and \(N, K\)"),
        (lambda: mk.mx_linear(X, torch.zeros(30, 32)), ValueError, "N: expected a multiple of 32, got 30"),
        (lambda: mk.mx_linear(X.half(), W[0]), TypeError, "x: expected torch.bfloat16 or torch.float32"),
        (lambda: mk.mx_linear(X, W[0], recipe="fp8"), ValueError, "recipe: expected one of bf16, mxfp8"),
        (lambda: mk.mx_linear(X, W[0], wq=W), TypeError, r"wq: expected one weight of prepare_weights"),
        (lambda: mk.mx_linear(X, W[0], wq=mk.prepare_weights(W)[0]), ValueError, r"wq: expected prepared \(64, 32\)"),
        (lambda: mk.prepare_weights(W, orientations="col"), ValueError, "orientations: expected one of both"),
        (lambda: mk.prepare_weights(W, recipe="bf16"), ValueError, "recipe: expected an MX recipe"),
        (lambda: mk.prepare_weights(W.half()), TypeError, r"weights\[0\]: expected a bf16 or fp32"),
        (lambda: mk.prepare_weights(W[:, :30]), ValueError, r"weights\[0\]: expected \(E, N, K\)"),
        (lambda: mk.prepare_weights(W).refresh(W, W), ValueError, "weights: expected 1 tensors, got 2"),
        (lambda: mk.prepare_weights(W).refresh(W[:1]), ValueError, "weight: expected shape"),
        (lambda: mk.prepare_weights(W).attach(3), TypeError, "target: expected an optimiser or a module"),
        (lambda: mk.prepare_weights(W).attach(torch.nn.Linear(2, 2)), ValueError, "target: expected a module with"),
        (lambda: mk.MXExperts(4, 32, 48), ValueError, "multiples of 32"),
        (lambda: mk.MXExperts(4, 32, 64, dtype=torch.float16), TypeError, "dtype: expected torch.bfloat16 or torch.float32"),
        (lambda: mk.prepare_weights(), ValueError, "weights: expected at least one tensor"),
        (lambda: mk.prepare_weights(W).refresh([1]), TypeError, "weight: expected a torch.Tensor, got list"),
        (lambda: mk.mx_grouped_mm(W[:0], W[:0].mT), ValueError, "the same first size, at least 1"),
    ],
)  # fmt: skip
def test_bad_call(call, error, text) -> None:
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"x": lambda layer: layer.x[:, :32]}, ValueError, "x: expected shape"),
        ({"x": lambda layer: layer.x.half()}, TypeError, "x: expected torch.bfloat16 or torch.float32"),
        ({"ids": lambda layer: layer.ids.float()}, TypeError, "topk_ids: expected torch.int32 or torch.int64"),
        ({"ids": lambda layer: layer.ids[:5]}, ValueError, "topk_ids: expected shape"),
        ({"weights": lambda layer: layer.weights[:, :1]}, ValueError, "topk_weights: expected topk_ids' shape"),
        ({"weights": lambda layer: layer.ids}, TypeError, "topk_weights: expected a floating-point tensor"),
        ({"w1": lambda layer: layer.w1[:, :-2]}, ValueError, "w1: expected shape"),
        ({"w2": lambda layer: layer.w2[0]}, ValueError, "w1, w2: expected"),
        ({"w1": lambda layer: layer.w1[:, :160], "w2": lambda layer: layer.w2[..., :80]}, ValueError, "multiples of 32"),
        ({"wq": lambda layer: mk.prepare_weights(layer.w1)}, TypeError, "wq: expected prepare_weights"),
        ({"wq": lambda layer: mk.prepare_weights(layer.w2, layer.w1)}, ValueError, r"wq\[0\]: expected prepared"),
        ({"wq": lambda layer: mk.prepare_weights(layer.w1, layer.w2, recipe="mxfp4")}, ValueError, "wq: expected weights prepared"),
    ],
)  # fmt: skip
def test_bad_layer(change, error, text) -> None:
    layer = make_layer()
    names = {
        "x": layer.x,
        "ids": layer.ids,
        "weights": layer.weights,
        "w1": layer.w1,
        "w2": layer.w2,
        "wq": None,
    }
    names |= {name: bad(layer) for name, bad in change.items()}
    wq = names.pop("wq")
    with pytest.raises(error, match=text):
        mk.moe_mlp(*names.values(), wq=wq)


def test_problems_check_themselves() -> None:
    with pytest.raises(ValueError, match="orientation: expected one of row, col, dual, got 'both'"):
        QuantizeProblem(torch.bfloat16, "mxfp8_e4m3", orientation="both")
    with pytest.raises(ValueError, match=r"dtype: expected one of torch.bfloat16, torch.float32"):
        QuantizeProblem(torch.float16, "mxfp8_e4m3")
    with pytest.raises(ValueError, match="mode: expected one of fprop, dgrad, wgrad"):
        GemmProblem("forward", "bf16", "bf16", torch.bfloat16)
    with pytest.raises(ValueError, match="topk_ids dtype"):
        RouteProblem(torch.int16, 1, 4)
    a = QuantizeProblem(torch.bfloat16, "mxfp8_e4m3", "rceil", "linear")
    assert a == QuantizeProblem(torch.bfloat16, "mxfp8_e4m3", layout="linear")
    assert hash(a) == hash(QuantizeProblem(torch.bfloat16, "mxfp8_e4m3", layout="linear"))

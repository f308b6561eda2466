"""Other libraries' contestants with fake modules in their place: right operands, right layouts, and no failure that spreads."""

import dataclasses
import importlib.util
import sys
from itertools import accumulate, pairwise
from types import ModuleType, SimpleNamespace

import pytest
import torch
from mx_bench import baselines, contestants
from mx_bench.cases import run_case
from mx_bench.contestants import (
    GemmInputs,
    LayerInputs,
    QuantizeInputs,
    gemm_contestants,
    layer_contestants,
    quantize_contestants,
)
from mx_bench.gemm import GemmShape, checker, gemm_case, plain_products, quantized
from mx_bench.layer import layer_cases, routed_inputs
from mx_bench.shapes import SMOKE_SHAPES
from mx_core import MXTensor, ScaleLayout, dequantize, from_blocked
from torch import Tensor

SIZES = [96, 0, 130]
MODES = ("fprop", "dgrad", "wgrad")


def gemm_inputs(mode: str, sizes: list[int] = SIZES, n: int = 64, k: int = 160) -> GemmInputs:
    rows, groups = sum(sizes), len(sizes)
    offs = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    a = torch.randn(rows, k if mode == "fprop" else n).bfloat16()
    b = (torch.randn(rows, k) if mode == "wgrad" else torch.randn(groups, n, k)).bfloat16()
    return GemmInputs(mode, [(a, b)], [quantized(mode, a, b, offs)], offs, sizes)


@pytest.fixture
def install(monkeypatch):
    """Put fake modules where libraries would be: name → attributes."""

    def put(**modules: dict) -> None:
        for dotted, attributes in modules.items():
            name = dotted.replace("__", ".")
            module = ModuleType(name)
            module.__path__ = []
            module.__spec__ = SimpleNamespace(name=name, origin="fake")
            vars(module).update(attributes)
            monkeypatch.setitem(sys.modules, name, module)

    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: sys.modules[name] if name in sys.modules else real(name)
    )
    return put


def checked(inputs: GemmInputs, call) -> str | None:
    """What the run's own check says of a contestant."""
    return checker(inputs.mode, *inputs.sets[0], inputs.offs, list(inputs.sizes))("contestant", call(0))


# QuACK ---------------------------------------------------------------------------------------------------------------


class Operand(SimpleNamespace):
    """As quack.blockscaled.BlockScaledOperand: codes, blocked scales, the axis they run along."""

    def __init__(self, qdata, scale, format, quant_dim):
        assert format == "mxfp8_e4m3"
        super().__init__(qdata=qdata, scale=scale, quant_dim=quant_dim)

    @property
    def mT(self):
        return Operand(self.qdata.mT, self.scale, "mxfp8_e4m3", -3 - self.quant_dim)


def spread_operand(operand: Operand, cu: list[int], axis: int) -> list[Tensor]:
    """Each group of an operand dequantised, its scales taken from tile start // 128 + group, as QuACK's kernel does.

    axis 0: groups along the rows; 1: groups along the reduced columns. The operand is (rows, reduced).
    """
    groups = []
    for g, (start, end) in enumerate(pairwise(cu)):
        tile, tiles = start // 128 + g, -(-(end - start) // 128)
        codes = operand.qdata[start:end] if axis == 0 else operand.qdata[:, start:end]
        scale = operand.scale[0].narrow(axis, tile, tiles) if tiles else None
        if scale is None:
            groups.append(codes.float())
            continue
        rows, reduced = codes.shape
        linear = from_blocked(scale, rows, -(-reduced // 32)).float()
        groups.append(codes.float() * torch.exp2(linear - 127).repeat_interleave(32, 1)[:, :reduced])
    return groups


def quack_gemm(a, b, cu_seqlens_m=None, cu_seqlens_k=None, tuned=True):
    """quack.gemm_interface.gemm's contract for groups along M (a (M, K), b (E, K, N)) or K (a (M, K), b (K, N))."""
    assert not tuned
    cu = (cu_seqlens_m if cu_seqlens_k is None else cu_seqlens_k).tolist()
    if isinstance(a, Operand):
        assert (a.quant_dim, b.quant_dim) == (-1, -2)
        axis = 0 if cu_seqlens_k is None else 1
        a_groups = spread_operand(a, cu, axis)
        if axis == 1:
            return torch.stack([x @ y.mT for x, y in zip(a_groups, spread_operand(b.mT, cu, 1), strict=True)])
        weights = b.mT  # (E, N, K), scales along K
        linear = from_blocked(weights.scale, weights.qdata.shape[1], -(-weights.qdata.shape[2] // 32)).float()
        scale = torch.exp2(linear - 127).repeat_interleave(32, -1)[..., : weights.qdata.shape[2]]
        b_groups = list((weights.qdata.float() * scale).mT)
    elif cu_seqlens_k is not None:
        return torch.stack([a[:, s:e] @ b[s:e] for s, e in pairwise(cu)])
    else:
        a_groups, b_groups = [a[s:e] for s, e in pairwise(cu)], list(b)
    return torch.cat([x @ y for x, y in zip(a_groups, b_groups, strict=True)])


@pytest.mark.parametrize("mode", MODES)
def test_quack(mode, install):
    install(
        quack={},
        quack__gemm_interface={"gemm": quack_gemm},
        quack__blockscaled={"BlockScaledOperand": Operand},
    )
    inputs = gemm_inputs(mode)
    calls = gemm_contestants(inputs)
    for name in ("QuACK BF16", "QuACK MXFP8"):
        assert callable(calls[name]), calls[name]
        assert checked(inputs, calls[name]) is None


# DeepGEMM ------------------------------------------------------------------------------------------------------------


def deep_gemm_module() -> dict:
    def rows(a, b, out, groups, transposed):
        for g in range(b.shape[0]):
            mine = groups == g
            out[mine] = (a[mine].float() @ (b[g].mT if transposed else b[g]).float()).to(out.dtype)

    def along_k(a, b, out, sizes, sizes_tensor):
        assert sizes == sizes_tensor.tolist()
        parts = zip(a.float().split(sizes), b.float().split(sizes), strict=True)
        out.copy_(torch.stack([x.mT @ y for x, y in parts]))

    def fp8(a, b, out, groups):
        rows(a[0] * a[1], b[0] * b[1], out, groups, True)

    return {
        "m_grouped_bf16_gemm_nt_contiguous": lambda a, b, out, groups: rows(a, b, out, groups, True),
        "m_grouped_bf16_gemm_nn_contiguous": lambda a, b, out, groups: rows(a, b, out, groups, False),
        "k_grouped_bf16_gemm_tn_contiguous": along_k,
        "m_grouped_fp8_gemm_nt_contiguous": fp8,
    }


@pytest.mark.parametrize("mode", MODES)
def test_deep_gemm(mode, install, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    one = torch.ones(1, 1)
    install(
        deep_gemm=deep_gemm_module(),
        deep_gemm__utils={
            "per_token_cast_to_fp8": lambda x, use_ue8m0: (x.float(), one),
            "per_block_cast_to_fp8": lambda x, use_ue8m0: (x.float(), one),
        },
    )
    inputs = gemm_inputs(mode)
    calls = {name: call for name, call in gemm_contestants(inputs).items() if name.startswith("DeepGEMM")}
    assert len(calls) == (2 if mode == "fprop" else 1)
    for call in calls.values():
        assert callable(call), call
        assert checked(inputs, call) is None


# torch ---------------------------------------------------------------------------------------------------------------


def scaled_grouped_mm(
    a, b, a_scale, recipe_a, b_scale, recipe_b, *, swizzle_a, swizzle_b, offs, output_dtype
):
    """torch.nn.functional.scaled_grouped_mm's contract for blocked MXFP8 operands: each group of scales blocked alone."""
    assert a.stride(-1) == 1
    assert b.stride(-2) == 1
    ends = [0, *offs.tolist()]

    def real(codes: Tensor, tiles: Tensor) -> Tensor:
        rows, reduced = codes.shape
        blocks = -(-reduced // 32)
        blocked = tiles.view(torch.uint8).view(-(-rows // 128), -(-blocks // 4), 32, 4, 4)
        scale = torch.exp2(from_blocked(blocked, rows, blocks).float() - 127)
        return codes.float() * scale.repeat_interleave(32, 1)[:, :reduced]

    def bytes_of(scale: Tensor, rows: int, start: int, end: int) -> Tensor:
        """A group's scales in a buffer of (R', C') whose groups lie one after the other along C'."""
        per_column = -(-rows // 128) * 128
        return scale.reshape(-1)[per_column * (start // 32) : per_column * (end // 32)]

    parts = []
    for g, (start, end) in enumerate(pairwise(ends)):
        if b.ndim == 3:
            columns = a_scale.shape[1]
            x = real(a[start:end], a_scale.reshape(-1)[start * columns : end * columns])
            parts.append(x @ real(b[g].mT, b_scale[g]).mT)
        else:
            x = real(a[:, start:end], bytes_of(a_scale, a.shape[0], start, end))
            y = real(b[start:end].mT, bytes_of(b_scale, b.shape[1], start, end))
            parts.append(x @ y.mT)
    out = torch.cat(parts) if b.ndim == 3 else torch.stack(parts)
    return out.to(output_dtype)


@pytest.mark.parametrize("mode", MODES)
def test_torch_scaled_grouped_mm(mode, monkeypatch):
    from mx_bench.contestants import torch_scaled

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", scaled_grouped_mm, raising=False)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    inputs = gemm_inputs(mode)
    on_gpu = GemmInputs(mode, inputs.sets, inputs.scaled, inputs.offs.as_subclass(OnGpu), inputs.sizes)
    (call,) = torch_scaled.gemm(on_gpu).values()
    assert checked(inputs, call) is None


class OnGpu(Tensor):
    """A CPU tensor that says it is on a GPU."""

    is_cuda = True


@pytest.mark.parametrize("mode", MODES)
def test_torch_accepts_these_operands(mode, monkeypatch):
    """The real function's checks of shapes, strides and dtypes, on tensors without memory."""
    from mx_bench.contestants import torch_scaled
    from torch._subclasses.fake_tensor import FakeTensorMode

    if not hasattr(torch.nn.functional, "scaled_grouped_mm"):
        pytest.skip("this torch has no scaled_grouped_mm")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    inputs = gemm_inputs(mode, [128, 256])
    with FakeTensorMode(allow_non_fake_inputs=True):
        scaled = [
            tuple(
                MXTensor(x.data.to("cuda"), x.scale.to("cuda"), x.format, x.axis, x.layout, x.shape)
                for x in pair
            )
            for pair in inputs.scaled
        ]
        fake = GemmInputs(mode, inputs.sets, scaled, inputs.offs.to("cuda"), inputs.sizes)
        (call,) = torch_scaled.gemm(fake).values()
        assert tuple(call(0).shape) == (
            (2, 64, 160) if mode == "wgrad" else (384, 64 if mode == "fprop" else 160)
        )


def test_torch_says_what_it_needs():
    assert gemm_contestants(gemm_inputs("fprop"))["torch scaled_grouped_mm MXFP8"] == "needs a GPU"


# torchao and Transformer Engine --------------------------------------------------------------------------------------


def layer_inputs() -> LayerInputs:
    x, ids, weights, w1, w2, _ = routed_inputs(SMOKE_SHAPES[0], "cpu")
    return LayerInputs(x, ids, weights, w1, w2)


def reference(inputs: LayerInputs) -> Tensor:
    return baselines.torch_moe(inputs.x, inputs.topk_ids, inputs.topk_weights, inputs.w1, inputs.w2)


def fake_torchao(**attributes) -> dict[str, dict]:
    def grouped_mm(a, b_t, offs, pad_token_groups_for_grouped_mm):
        assert pad_token_groups_for_grouped_mm
        assert b_t.stride(-2) == 1  # its documented layout: column-major for each group
        return torch._grouped_mm(a, b_t, offs=offs)

    base = "torchao__prototype__moe_training"
    return {
        "torchao": {},
        "torchao__prototype": {},
        base: {"_to_mxfp8_then_scaled_grouped_mm": grouped_mm},
        f"{base}__kernels": {},
        f"{base}__kernels__mxfp8": attributes,
    }


def test_torchao_layer(install):
    install(**fake_torchao())
    inputs = layer_inputs()
    forward, leaves = layer_contestants(inputs)["torchao MXFP8"]
    torch.testing.assert_close(forward(), reference(inputs))
    assert all(g is not None for g in torch.autograd.grad(forward().sum(), leaves))


def test_torchao_quantisers(install):
    seen = []

    def quantiser(name):
        return lambda x, scaling_mode: seen.append((name, tuple(x.shape), scaling_mode))

    install(
        **fake_torchao(
            mxfp8_quantize_2d_1x32_cutedsl=quantiser("row"),
            mxfp8_quantize_2d_32x1_cutedsl=quantiser("column"),
        )
    )
    for orientation in ("row", "column"):
        quantize_contestants(QuantizeInputs(orientation, [torch.zeros(64, 32)]))["torchao MXFP8"](3)
    assert seen == [("row", (64, 32), "rceil"), ("column", (64, 32), "rceil")]
    both = quantize_contestants(QuantizeInputs("both", [torch.zeros(64, 32)]))
    assert both["torchao MXFP8"] == "has no kernel for both orientations"


class GroupedLinear(torch.nn.Module):
    """As transformer_engine.pytorch.GroupedLinear: parameters weight0, weight1, …, group sizes as a host list."""

    def __init__(self, num_gemms, in_features, out_features, bias, params_dtype, device):
        super().__init__()
        assert not bias
        for i in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(out_features, in_features, dtype=params_dtype, device=device)
            )
            self.register_parameter(f"weight{i}", weight)

    def forward(self, x, m_splits):
        assert isinstance(m_splits, list)
        return torch.cat([part @ w.mT for part, w in zip(x.split(m_splits), self.parameters(), strict=True)])


class Padding(torch.nn.Module):
    """As Fp8Padding: groups padded to 32 rows."""

    def __init__(self, num_gemms):
        super().__init__()

    def forward(self, x, m_splits):
        padded = [-(-m // 32) * 32 for m in m_splits]
        parts = [
            torch.nn.functional.pad(part, (0, 0, 0, n - part.shape[0]))
            for part, n in zip(x.split(m_splits), padded, strict=True)
        ]
        return torch.cat(parts), padded


class Unpadding(Padding):
    """As Fp8Unpadding, which takes the real sizes."""

    def forward(self, x, m_splits):
        padded = [-(-m // 32) * 32 for m in m_splits]
        return torch.cat([part[:m] for part, m in zip(x.split(padded), m_splits, strict=True)])


def fake_transformer_engine(entered: list, autocast: str) -> dict[str, dict]:
    class Autocast:
        def __init__(self, enabled, **recipe):
            entered.append((enabled, *recipe))

        __enter__ = __exit__ = lambda self, *args: None

    class Quantizer:
        def __init__(self, dtype, rowwise, columnwise):
            self.orientations = rowwise, columnwise

        def __call__(self, x):
            return self.orientations

    return {
        "transformer_engine": {},
        "transformer_engine__pytorch": {
            "GroupedLinear": GroupedLinear,
            "Fp8Padding": Padding,
            "Fp8Unpadding": Unpadding,
            "MXFP8Quantizer": Quantizer,
            autocast: Autocast,
        },
        "transformer_engine__common": {},
        "transformer_engine__common__recipe": {"MXFP8BlockScaling": object},
        "transformer_engine_torch": {"DType": SimpleNamespace(kFloat8E4M3=0)},
    }


@pytest.mark.parametrize(("autocast", "argument"), [("autocast", "recipe"), ("fp8_autocast", "fp8_recipe")])
def test_transformer_engine_layer(autocast, argument, install):
    entered = []
    install(**fake_transformer_engine(entered, autocast))
    inputs = layer_inputs()
    layers = layer_contestants(inputs)
    for name in ("Transformer Engine BF16", "Transformer Engine MXFP8"):
        forward, leaves = layers[name]
        torch.testing.assert_close(forward(), reference(inputs), rtol=0.05, atol=0.05)
        grads = torch.autograd.grad(forward().sum(), leaves)
        assert len(grads) == 2 + 2 * SMOKE_SHAPES[0].experts
    assert entered == [(True, argument)] * 2


@pytest.mark.parametrize(
    ("orientation", "expected"), [("row", (True, False)), ("column", (False, True)), ("both", (True, True))]
)
def test_transformer_engine_quantiser(orientation, expected, install):
    install(**fake_transformer_engine([], "autocast"))
    calls = quantize_contestants(QuantizeInputs(orientation, [torch.zeros(32, 32)]))
    assert calls["Transformer Engine MXFP8"](0) == expected


# what goes wrong -----------------------------------------------------------------------------------------------------


def test_libraries_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    absent = gemm_contestants(gemm_inputs("fprop"))
    assert absent == dict.fromkeys(["torch scaled_grouped_mm MXFP8", "DeepGEMM", "QuACK"], "not installed")
    assert layer_contestants(layer_inputs()) == dict.fromkeys(
        ["torchao MXFP8", "Transformer Engine"], "not installed"
    )


def test_an_import_error_and_a_changed_interface_are_reported(install):
    install(quack={}, quack__gemm_interface={}, deep_gemm={})
    install(**fake_torchao())
    found = gemm_contestants(gemm_inputs("fprop"))
    assert found["QuACK"] == "failed: AttributeError: module 'quack.gemm_interface' has no attribute 'gemm'"
    assert found["DeepGEMM"].startswith("failed: AttributeError")
    quantisers = quantize_contestants(QuantizeInputs("row", [torch.zeros(32, 32)]))
    assert quantisers["torchao MXFP8"].startswith("failed: AttributeError")
    del sys.modules["quack.gemm_interface"]
    assert gemm_contestants(gemm_inputs("fprop"))["QuACK"].startswith("failed: ModuleNotFoundError")


def test_every_library_has_a_name_and_a_job():
    for library in contestants.LIBRARIES:
        assert library.NAME
        assert library.PACKAGE
        assert any(hasattr(library, kind) for kind in ("gemm", "quantize", "layer"))


def test_a_wrong_result_is_a_failure(install):
    """A layout that a library reads otherwise would be a fast wrong answer: it is reported, and not timed."""
    install(
        quack={},
        quack__gemm_interface={"gemm": lambda *a, **k: quack_gemm(*a, **k).flip(0)},
        quack__blockscaled={"BlockScaledOperand": Operand},
    )
    case = gemm_case(GemmShape(192, 3, 64, 96), "fprop", 0.0, "cpu")
    measured = {m.contestant: m for m in run_case("grouped GEMM", case, rounds=2, calls=1)}
    for name in ("QuACK BF16", "QuACK MXFP8"):
        assert measured[name].seconds is None
        assert measured[name].note.startswith("failed: wrong result, relative error 1.")
    for name in ("ours BF16", "ours MXFP8", "torch.bmm, equal groups"):
        assert measured[name].seconds is not None, measured[name].note


def test_a_result_of_another_shape_is_a_failure(install):
    install(
        quack={}, quack__gemm_interface={"gemm": lambda *a, **k: torch.zeros(7, 5, 3)}, quack__blockscaled={}
    )
    case = gemm_case(GemmShape(192, 3, 64, 96), "wgrad", 0.0, "cpu")
    measured = {m.contestant: m for m in run_case("grouped GEMM", case, rounds=2, calls=1)}
    assert measured["QuACK"].note.startswith("failed: AttributeError")  # no BlockScaledOperand in its place
    assert measured["ours BF16"].seconds is not None


@pytest.mark.parametrize("mode", MODES)
def test_the_check_knows_right_from_wrong(mode):
    inputs = gemm_inputs(mode)
    a, b = inputs.sets[0]
    check = checker(mode, a, b, inputs.offs, SIZES)
    right = plain_products(mode, a, b, SIZES)
    assert check("x", right) is None
    assert "wrong result" in (check("x", 1.2 * right) or "")
    assert "wrong result" in (check("x", right * float("nan")) or "")
    assert check("torch.bmm, equal groups", 2 * right) is None  # another problem than these skewed groups


def test_a_layer_that_is_wrong_is_reported(install):
    install(**fake_torchao())
    sys.modules["torchao.prototype.moe_training"]._to_mxfp8_then_scaled_grouped_mm = (
        lambda a, b_t, offs, pad_token_groups_for_grouped_mm: 2 * torch._grouped_mm(a, b_t, offs=offs)
    )
    forward, _ = layer_cases(SMOKE_SHAPES, "cpu")
    quick = {name: call for name, call in forward.contestants.items() if name != "torch.compile"}
    case = dataclasses.replace(forward, contestants=quick)
    measured = {m.contestant: m for m in run_case("MoE layer", case, rounds=2, calls=1)}
    assert measured["torchao MXFP8"].note.startswith("failed: wrong result")
    assert measured["ours MXFP8"].seconds is not None


def test_blocked_scales_here_are_those_of_mx_core():
    """The helper above reads the same layout as `mx_core`: dequantising through it gives mx_core's values."""
    inputs = gemm_inputs("fprop", [128, 128])
    a, _ = inputs.scaled[0]
    assert a.layout is ScaleLayout.BLOCKED_128X4
    scale = torch.exp2(from_blocked(a.scale, a.data.shape[0], 5).float() - 127).repeat_interleave(32, 1)
    real = dequantize(a)
    torch.testing.assert_close(a.data.float()[: real.shape[0]] * scale[: real.shape[0]], real)

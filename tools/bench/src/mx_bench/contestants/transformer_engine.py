"""NVIDIA Transformer Engine: GroupedLinear in BF16 and MXFP8, and its MXFP8 quantiser (written against 2.20's tests)."""

from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from mx_bench.cases import Call
from mx_bench.contestants.inputs import LayerCall, LayerInputs, QuantizeInputs

NAME = "Transformer Engine"
PACKAGE = "transformer_engine"


def quantize(inputs: QuantizeInputs) -> dict[str, Call | str]:
    """Rows, columns or both; scales in its own layout, which its GEMM re-lays."""
    tex, te = import_module("transformer_engine_torch"), import_module("transformer_engine.pytorch")
    quantizer = te.MXFP8Quantizer(
        tex.DType.kFloat8E4M3, rowwise=inputs.orientation != "column", columnwise=inputs.orientation != "row"
    )
    return {f"{NAME} MXFP8": lambda i: quantizer(inputs.sets[i % len(inputs.sets)])}


def layer(inputs: LayerInputs) -> dict[str, LayerCall | str]:
    """Sort, two GroupedLinear modules, weighted sum; group sizes are read back to the host, as the module wants them."""
    te = import_module("transformer_engine.pytorch")
    recipe = import_module("transformer_engine.common.recipe").MXFP8BlockScaling()
    experts = inputs.w2.shape[0]
    up, down = (_grouped_linear(te, w) for w in (inputs.w1.detach(), inputs.w2.detach()))
    weights = (*up.parameters(), *down.parameters())
    pad, unpad = te.Fp8Padding(experts), te.Fp8Unpadding(experts)

    def autocast(enabled: bool) -> AbstractContextManager:
        if not enabled:
            return nullcontext()
        if hasattr(te, "autocast"):
            return te.autocast(enabled=True, recipe=recipe)
        return te.fp8_autocast(enabled=True, fp8_recipe=recipe)

    def forward(mxfp8: bool) -> Tensor:
        flat = inputs.topk_ids.flatten()
        order = flat.argsort(stable=True)
        sizes = torch.bincount(flat, minlength=experts).tolist()
        token, weight = order // inputs.topk_ids.shape[1], inputs.topk_weights.flatten()[order, None]
        rows, splits = inputs.x[token], sizes
        with autocast(mxfp8):
            if mxfp8:
                rows, splits = pad(rows, sizes)
            gate, linear = up(rows, splits).chunk(2, dim=-1)
            y = down(silu(gate) * linear, splits)
            if mxfp8:
                y = unpad(y, sizes)
        return torch.zeros_like(inputs.x).index_add(0, token, y * weight.to(y.dtype))

    leaves = (inputs.x, inputs.topk_weights, *weights)
    return {
        f"{NAME} {label}": ((lambda mxfp8=mxfp8: forward(mxfp8)), leaves)
        for label, mxfp8 in (("BF16", False), ("MXFP8", True))
    }


def _grouped_linear(te: Any, w: Tensor) -> Any:
    """A module with these weights (E, out, in)."""
    experts, out_features, in_features = w.shape
    module = te.GroupedLinear(
        experts, in_features, out_features, bias=False, params_dtype=w.dtype, device=w.device
    )
    with torch.no_grad():
        for i in range(experts):
            getattr(module, f"weight{i}").copy_(w[i])
    return module

"""torchao's MXFP8 MoE training prototype (written against 0.18.0; its kernels need Blackwell)."""

from importlib import import_module

from torch import Tensor

from mx_bench.baselines import torch_moe
from mx_bench.cases import Call
from mx_bench.contestants.inputs import LayerCall, LayerInputs, QuantizeInputs

NAME = "torchao MXFP8"
PACKAGE = "torchao"


def quantize(inputs: QuantizeInputs) -> dict[str, Call | str]:
    """Rows or columns; scales in the tensor core's layout."""
    if inputs.orientation == "both":
        return {NAME: "has no kernel for both orientations"}
    mxfp8 = import_module("torchao.prototype.moe_training.kernels.mxfp8")
    function = {
        "row": mxfp8.mxfp8_quantize_2d_1x32_cutedsl,
        "column": mxfp8.mxfp8_quantize_2d_32x1_cutedsl,
    }[inputs.orientation]
    return {NAME: lambda i: function(inputs.sets[i % len(inputs.sets)], scaling_mode="rceil")}


def layer(inputs: LayerInputs) -> dict[str, LayerCall | str]:
    """The plain PyTorch layer with torchao's differentiable grouped product, which quantises in the call."""
    moe_training = import_module("torchao.prototype.moe_training")

    def grouped_mm(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        return moe_training._to_mxfp8_then_scaled_grouped_mm(a, b, offs, pad_token_groups_for_grouped_mm=True)

    def forward() -> Tensor:
        return torch_moe(
            inputs.x, inputs.topk_ids, inputs.topk_weights, inputs.w1, inputs.w2, grouped_mm=grouped_mm
        )

    return {NAME: (forward, inputs.leaves)}

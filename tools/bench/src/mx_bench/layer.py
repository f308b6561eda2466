"""Section "MoE layer": forward and backward, this project in BF16 and MXFP8 against plain PyTorch."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from mx_kernels import moe_mlp, prepare_weights
from torch import Tensor

from mx_bench.baselines import torch_moe
from mx_bench.cases import Call, Case, relative_error
from mx_bench.contestants import LayerCall, LayerInputs, layer_contestants
from mx_bench.shapes import MoEShape

SECTION = "MoE layer"
WRONG = 0.15
"""A relative error that no rounding explains: 8-bit operands give 0.06 through the layer."""
IN_CALL = "ours MXFP8, weights quantised in the call"


def routed_inputs(shape: MoEShape, device: str, *, skew: float = 0.0, seed: int = 0) -> tuple[Tensor, ...]:
    """Random x (T, D), distinct expert ids (T, k), weights (T, k), w1, w2 and dout; leaves that require grad.

    `skew` 0 spreads tokens evenly over the experts in expectation; above it, expert popularity falls like
    rank^-skew.
    """
    generator = torch.Generator(device).manual_seed(seed)
    t, d, h, e = shape.tokens, shape.width, shape.expert_width, shape.experts

    def normal(*size: int, std: float = 1.0) -> Tensor:
        return torch.randn(size, device=device, dtype=torch.bfloat16, generator=generator) * std

    popularity = torch.arange(1, e + 1, device=device, dtype=torch.float32).pow(-skew)
    ids = torch.multinomial(popularity.expand(t, e), shape.top_k, generator=generator)
    weights = torch.rand(t, shape.top_k, device=device, generator=generator).softmax(-1)
    leaves = (normal(t, d), weights, normal(e, 2 * h, d, std=d**-0.5), normal(e, d, h, std=h**-0.5))
    x, weights, w1, w2 = (leaf.requires_grad_() for leaf in leaves)
    return x, ids, weights, w1, w2, normal(t, d)


def layer_cases(shapes: tuple[MoEShape, ...], device: str) -> Iterator[Case]:
    """Forward, and forward plus backward, of each shape."""
    for shape in shapes:
        x, ids, weights, w1, w2, dout = routed_inputs(shape, device)
        arguments, inputs = (x, ids, weights, w1, w2), LayerInputs(x, ids, weights, w1, w2)
        prepared = prepare_weights(w1.detach(), w2.detach())
        functions: dict[str, Callable[..., Tensor]] = {
            "ours BF16": lambda *a: moe_mlp(*a, recipe="bf16"),
            "ours MXFP8": lambda *a, wq=prepared: moe_mlp(*a, recipe="mxfp8", wq=wq),
            IN_CALL: lambda *a: moe_mlp(*a, recipe="mxfp8"),
            "torch eager": torch_moe,
            "torch.compile": torch.compile(torch_moe),
        }
        layers: dict[str, LayerCall | str] = {
            name: (partial(function, *arguments), inputs.leaves) for name, function in functions.items()
        } | layer_contestants(inputs)
        yield Case(
            f"{shape.case_name} forward",
            {n: c if isinstance(c, str) else _forward(c) for n, c in layers.items()},
            flop=shape.forward_flop,
            check=_checker(inputs),
        )
        yield Case(
            f"{shape.case_name} forward + backward",
            {n: c if isinstance(c, str) else _forward_backward(c, dout) for n, c in layers.items()},
            flop=3 * shape.forward_flop,
        )


def _forward(layer: LayerCall) -> Call:
    def call(_number: int) -> Tensor:
        with torch.no_grad():
            return layer[0]()

    return call


def _forward_backward(layer: LayerCall, dout: Tensor) -> Call:
    forward, leaves = layer

    def call(_number: int) -> object:
        return torch.autograd.grad(forward(), leaves, dout)

    return call


def _checker(inputs: LayerInputs) -> Callable[[str, object], str | None]:
    """Compares a forward with the plain PyTorch layer."""
    reference: list[Tensor] = []

    def check(_name: str, result: object) -> str | None:
        if not isinstance(result, Tensor):
            return None
        if not reference:
            with torch.no_grad():
                reference.append(
                    torch_moe(inputs.x, inputs.topk_ids, inputs.topk_weights, inputs.w1, inputs.w2)
                )
        error = relative_error(result, reference[0])
        return None if error < WRONG else f"wrong result, relative error {error:.2f}"

    return check

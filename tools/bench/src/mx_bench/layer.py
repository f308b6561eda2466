"""Section "MoE layer": forward and backward, this project in BF16 and MXFP8 against plain PyTorch."""

from collections.abc import Callable, Iterator

import torch
from mx_kernels import moe_mlp, prepare_weights
from torch import Tensor

from mx_bench.baselines import torch_moe
from mx_bench.cases import Call, Case
from mx_bench.shapes import MoEShape

SECTION = "MoE layer"
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
        inputs = routed_inputs(shape, device)
        x, ids, weights, w1, w2, dout = inputs
        prepared = prepare_weights(w1.detach(), w2.detach())
        functions: dict[str, Callable[..., Tensor]] = {
            "ours BF16": lambda *a: moe_mlp(*a, recipe="bf16"),
            "ours MXFP8": lambda *a, wq=prepared: moe_mlp(*a, recipe="mxfp8", wq=wq),
            IN_CALL: lambda *a: moe_mlp(*a, recipe="mxfp8"),
            "torch eager": torch_moe,
            "torch.compile": torch.compile(torch_moe),
        }
        name = shape.case_name
        arguments = (x, ids, weights, w1, w2)
        forward: dict[str, Call] = {n: _forward(f, arguments) for n, f in functions.items()}
        both: dict[str, Call] = {n: _forward_backward(f, arguments, dout) for n, f in functions.items()}
        yield Case(f"{name} forward", forward, flop=shape.forward_flop)
        yield Case(f"{name} forward + backward", both, flop=3 * shape.forward_flop)


def _forward(function: Callable[..., Tensor], arguments: tuple[Tensor, ...]) -> Call:
    def call(_number: int) -> Tensor:
        with torch.no_grad():
            return function(*arguments)

    return call


def _forward_backward(function: Callable[..., Tensor], arguments: tuple[Tensor, ...], dout: Tensor) -> Call:
    leaves = [a for a in arguments if a.requires_grad]

    def call(_number: int) -> object:
        return torch.autograd.grad(function(*arguments), leaves, dout)

    return call

"""How much each kind of tensor in the expert layers loses by quantisation, measured on a real batch of a real model."""

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from mx_core import FORMATS, quantize
from mx_core.metrics import QuantizationError, quantization_error
from mx_kernels import MXExperts, Recipe
from torch import Tensor

from mx_trainer.model import GPT

KINDS = {
    "w1": "gate and up weights",
    "w2": "down weights",
    "x": "expert input",
    "a": "SwiGLU output",
    "dy": "gradient of the expert output",
    "dh": "gradient of the SwiGLU input",
}


@dataclass(frozen=True)
class KindError:
    """Errors of one kind of tensor, averaged over layers and experts, along both axes it is quantised on."""

    row: QuantizationError
    """Blocks along the features (of a weight: along its input)."""
    column: QuantizationError
    """Blocks along the tokens (of a weight: along its output)."""


def measure_quantization(model: GPT, tokens: Tensor, targets: Tensor, recipe: Recipe) -> dict[str, KindError]:
    """Quantise what the expert GEMMs of one training batch read; keys are those of `KINDS`.

    The model's gradients are discarded. dy here is the combined gradient of the layer's output times the router
    weight, row by row, as dgrad and wgrad read it.
    """
    assert recipe.format is not None
    format = FORMATS[recipe.format]
    samples: dict[str, list[tuple[QuantizationError, QuantizationError]]] = {kind: [] for kind in KINDS}
    training = model.training
    model.train()
    with _capture(model) as captured:
        out = model(tokens, targets)
        assert out.loss is not None
        out.loss.backward()
    for router in model.routers():  # this batch is no training step
        router.tokens_since_update.zero_()
    for experts, calls in captured.items():
        for kind, tensor in _tensors(experts, *calls):
            row, column = (
                quantization_error(tensor, quantize(tensor, format, axis=axis, rounding=recipe.rounding))
                for axis in (-1, -2)
            )
            samples[kind].append((row, column))
    model.zero_grad(set_to_none=True)
    model.train(training)
    return {
        kind: KindError(_mean([row for row, _ in pairs]), _mean([column for _, column in pairs]))
        for kind, pairs in samples.items()
    }


@contextmanager
def _capture(model: GPT) -> Generator[dict[MXExperts, list[Tensor]]]:
    """Input, ids, weights and output gradient of every `MXExperts` in one forward and backward pass."""
    captured: dict[MXExperts, list[Tensor]] = {}

    def on_forward(module: MXExperts, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        captured[module] = [t.detach() for t in inputs]
        output.register_hook(lambda grad: captured[module].append(grad.detach()))

    layers = [module for module in model.modules() if isinstance(module, MXExperts)]
    handles = [module.register_forward_hook(on_forward) for module in layers]
    try:
        yield captured
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def _tensors(
    experts: MXExperts, x_TD: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, dout_TD: Tensor
) -> Iterator[tuple[str, Tensor]]:
    """(kind, tensor) of every expert that got a token."""
    for e in range(experts.w1.shape[0]):
        w1, w2 = experts.w1[e].float(), experts.w2[e].float()
        yield "w1", w1
        yield "w2", w2
        token, choice = (ids_Tk == e).nonzero(as_tuple=True)
        if len(token) == 0:
            continue
        x = x_TD[token].float()
        gate, up = (x @ w1.T).chunk(2, dim=-1)
        dy = dout_TD[token].float() * weights_Tk[token, choice, None]
        da = dy @ w2
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        yield "x", x
        yield "a", silu * up
        yield "dy", dy
        yield "dh", torch.cat((da * up * sigmoid * (1 + gate * (1 - sigmoid)), da * silu), dim=-1)


def _mean(errors: list[QuantizationError]) -> QuantizationError:
    def mean(name: str) -> float:
        return sum(getattr(e, name) for e in errors) / max(len(errors), 1)

    return QuantizationError(mean("sqnr_db"), mean("underflow"), mean("saturation"))

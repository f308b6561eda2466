"""One MoE layer's inputs, and two float64 references of it that share no code with the layer.

Neither knows slots, aligned rows or blocked scales: each expert's rows are picked with a mask and quantised alone.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from mx_core import FORMATS, dequantize, quantize
from mx_kernels import MXExperts, moe_mlp
from mx_kernels.recipe import RECIPES
from mx_kernels.weights import PreparedWeights
from torch import Tensor


@dataclass
class Layer:
    """x (T, D), topk_ids (T, k), weights (T, k) fp32, w1 (E, 2H, D), w2 (E, D, H), dout (T, D)."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    w1: Tensor
    w2: Tensor
    dout: Tensor

    @property
    def leaves(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.x, self.weights, self.w1, self.w2

    def run(self, function: Callable[..., Tensor], **arguments) -> tuple[Tensor, ...]:
        """(out, dx, dweights, dw1, dw2) of function(x, ids, weights, w1, w2)."""
        leaves = [t.detach().clone().requires_grad_() for t in self.leaves]
        x, weights, w1, w2 = leaves
        out = function(x, self.ids, weights, w1, w2, **arguments)
        out.backward(self.dout.to(out.dtype))
        return out.detach(), *(t.grad for t in leaves)


def make_layer(T=70, D=64, H=96, E=4, k=2, dtype=torch.float32, ids: Tensor | None = None, seed=0) -> Layer:
    """A random layer; every token's k experts differ unless `ids` are given."""
    g = torch.Generator().manual_seed(seed)
    if ids is None:
        ids = torch.rand(T, E, generator=g).argsort(1)[:, :k].contiguous()
    T, k = ids.shape
    return Layer(
        x=torch.randn(T, D, generator=g).to(dtype),
        ids=ids,
        weights=torch.rand(T, k, generator=g),
        w1=(torch.randn(E, 2 * H, D, generator=g) / D**0.5).to(dtype),
        w2=(torch.randn(E, D, H, generator=g) / H**0.5).to(dtype),
        dout=torch.randn(T, D, generator=g).to(dtype),
    )


def ids_of_sizes(sizes: list[int], seed: int = 0) -> Tensor:
    """topk_ids (T, 1) that give each expert this many tokens, in a random order."""
    ids = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return ids[torch.randperm(len(ids), generator=torch.Generator().manual_seed(seed))][:, None]


def exact_layer(layer: Layer) -> tuple[Tensor, ...]:
    """(out, dx, dweights, dw1, dw2) in float64 by autograd, nothing quantised."""

    def forward(x, ids, weights, w1, w2):
        out = torch.zeros_like(x)
        for e in range(w1.shape[0]):
            for j in range(ids.shape[1]):
                token = (ids[:, j] == e).nonzero()[:, 0]
                gate, up = (x[token] @ w1[e].T).chunk(2, -1)
                y = (torch.nn.functional.silu(gate) * up) @ w2[e].T
                out = out.index_add(0, token, weights[token, j, None] * y)
        return out

    return Layer(
        layer.x.double(), layer.ids, *(t.double() for t in layer.leaves[1:]), layer.dout.double()
    ).run(forward)


def quantised_layer(layer: Layer, recipe: str) -> tuple[Tensor, ...]:
    """The same results by the contract's flow, expert by expert: every operand quantised, every sum in float64.

    Results of GEMMs are rounded to fp32 and to x's dtype, as the layer stores them.
    """
    format, rounding = FORMATS[RECIPES[recipe].format], RECIPES[recipe].rounding
    dtype = layer.x.dtype

    def q(x: Tensor, axis: int) -> Tensor:
        return dequantize(quantize(x, format, axis=axis, rounding=rounding), torch.float64)

    def stored(x: Tensor) -> Tensor:
        return x.float().to(dtype)

    x, weights, w1, w2 = layer.leaves
    out, dx = torch.zeros_like(x, dtype=torch.float64), torch.zeros_like(x, dtype=torch.float64)
    dweights = torch.zeros_like(weights, dtype=torch.float64)
    dw1, dw2 = torch.zeros_like(w1, dtype=torch.float64), torch.zeros_like(w2, dtype=torch.float64)
    for e in range(w1.shape[0]):
        token, j = (layer.ids == e).nonzero().T
        if len(token) == 0:
            continue
        w = weights[token, j].double()[:, None]
        h = stored(q(x[token], -1) @ q(w1[e], -1).T).double()
        gate, up = h.chunk(2, -1)
        sigmoid = torch.sigmoid(gate)
        a = gate * sigmoid * up
        y = stored(q(a.float(), -1) @ q(w2[e], -1).T).double()
        out.index_add_(0, token, w * y)

        dout = layer.dout[token]
        da = stored(q(dout, -1) @ q(w2[e], -2)).double()
        dweights[token, j] = (da * a).sum(-1)
        dgate = w * da * up * sigmoid * (1 + gate * torch.sigmoid(-gate))
        dh = torch.cat([dgate, w * da * gate * sigmoid], -1).float()
        dw2[e] = q(w.float() * dout.float(), -2).T @ q(a.float(), -2)
        dw1[e] = q(dh, -2).T @ q(x[token], -2)
        dx.index_add_(0, token, stored(q(dh, -1) @ q(w1[e], -2)).double())
    return out, dx, dweights, dw1, dw2


def relative_error(got: Tensor, want: Tensor) -> float:
    """Norm of the difference over the norm of what was wanted; 0/0 is 0."""
    difference, size = (got.double() - want.double()).norm().item(), want.double().norm().item()
    return difference / size if size else difference


def weight_changes(
    experts: MXExperts, optimizer: torch.optim.Optimizer, wq: PreparedWeights, steps: int
) -> Iterator[None]:
    """What makes quantised weights stale: optimiser steps, an edit and a refresh, load_state_dict; one at a time (C21)."""
    for _ in range(steps):
        optimizer.step()
        yield
    experts.w1.data.mul_(2)
    wq.refresh()
    yield
    experts.load_state_dict({name: torch.randn_like(t) for name, t in experts.state_dict().items()})
    yield


def assert_never_stale(
    experts: MXExperts, layer: Layer, changes: Iterator[None], captured: Tensor, replay: Callable[[], None]
) -> None:
    """After each change the module, and the graph that wrote `captured`, give what freshly quantised weights give."""
    seen = [captured.detach().clone()]
    for _ in changes:
        inputs = layer.x, layer.ids, layer.weights
        want = moe_mlp(*inputs, experts.w1, experts.w2, backend=experts.backend)
        assert torch.equal(experts(*inputs), want)
        replay()
        assert torch.equal(captured, want)
        assert not any(torch.equal(want, old) for old in seen)
        seen.append(want.detach())

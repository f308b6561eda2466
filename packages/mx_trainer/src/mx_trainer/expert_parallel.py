"""Expert parallelism: every rank holds E / ep experts, and rows travel to them and back.

    router (on every rank, for its own tokens)
      rows sorted by expert, the number for each expert exchanged                  `exchange.plan_exchange`
      ── all-to-all ──>  rows to their experts' ranks: as they are, or quantised   `Wire`, `Exchange.tokens_forth`
                         grouped GEMMs, SwiGLU: steps F1-F4 of docs/kernels.md     `mx_kernels.autograd`
      <── all-to-all ──  results back                                              `Exchange.tokens_back`
      weighted sum over the k choices (F5)

The backward pass mirrors it: the gradient of the layer's output travels with the router's weights to the experts (B1), the
gradient of x and of the weights back. The experts see the same rows in the same order, by rank and then by token, as one
process with the whole batch would, and every product, sum and rounding is the same: the results are those of one process.

Rows that travel quantised (`--dispatch mxfp8`) are what fprop and dgrad would have made of them on the other side, so y and
dx are the same bits. The weight gradients quantise along the other axis; they start from the dequantised rows, so x and dout
are rounded twice there, which is the only difference. y and dx travel back in the activations' type.
"""

import math
from collections.abc import Sequence
from typing import Protocol, cast

import torch
import torch.nn.functional as F
from mx_core import FORMATS, MXTensor, ScaleLayout, dequantize
from mx_core.scale_layout import to_blocked
from mx_kernels import MXExperts, PreparedWeights, prepare_weights
from mx_kernels.autograd import backward_experts, forward_experts, prepared_operand, weight_for_dgrad
from mx_kernels.operands import ALIGNED, MxOperands, Operand, Operands, operands_of
from mx_kernels.recipe import Recipe
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from mx_trainer.exchange import Exchange, Traffic, plan_exchange

# --- how rows travel --------------------------------------------------------------------------------------------------


class Wire(Protocol):
    """What rows (T, D) are sent as, and what the experts' rank makes of what arrived."""

    def pack(self, rows_TD: Tensor) -> Sequence[Tensor]:
        """Tensors (T, ...) to send."""
        ...

    def row(self, parts: Sequence[Tensor], token_of: Tensor) -> Operand:
        """The experts' ALIGNED rows of the x that arrived, for fprop."""
        ...

    def col(self, parts: Sequence[Tensor], token_of: Tensor) -> Operand:
        """The same for wgrad."""
        ...

    def dout(
        self, parts: Sequence[Tensor], token_of: Tensor, slot_weights: Tensor
    ) -> tuple[Operand, Operand]:
        """The experts' rows of the dout that arrived: for dgrad, and times their weights for wgrad."""
        ...


class PlainWire:
    """Rows as they are."""

    def __init__(self, ops: Operands):
        self.ops = ops

    def pack(self, rows_TD: Tensor) -> Sequence[Tensor]:
        return (rows_TD,)

    def row(self, parts: Sequence[Tensor], token_of: Tensor) -> Operand:
        return self.ops.gather_row(parts[0], token_of)

    def col(self, parts: Sequence[Tensor], token_of: Tensor) -> Operand:
        return self.ops.gather_col(parts[0], token_of)

    def dout(
        self, parts: Sequence[Tensor], token_of: Tensor, slot_weights: Tensor
    ) -> tuple[Operand, Operand]:
        return self.ops.gather_dout(parts[0], token_of, slot_weights)


class MxWire:
    """Rows quantised along D: a byte for each element, and one for each 32."""

    def __init__(self, ops: MxOperands, dtype: torch.dtype):
        self.ops, self.dtype = ops, dtype

    def pack(self, rows_TD: Tensor) -> Sequence[Tensor]:
        ops, linear = self.ops, ScaleLayout.LINEAR.value
        return torch.ops.mx.quantize(
            rows_TD, ops.format, -1, ops.rounding, linear, None, ALIGNED, ops.backend
        )

    def row(self, parts: Sequence[Tensor], token_of: Tensor) -> Operand:
        # The received rows and one of zeros behind them, which -1 means.
        data_P, scale_P = (F.pad(t.view(torch.uint8), (0, 0, 0, 1))[token_of] for t in parts)
        return Operand(data_P.view(parts[0].dtype), to_blocked(scale_P), self.ops.format)

    def col(self, parts: Sequence[Tensor], token_of: Tensor) -> Operand:
        return self.ops.gather_col(self._values(parts), token_of)

    def dout(
        self, parts: Sequence[Tensor], token_of: Tensor, slot_weights: Tensor
    ) -> tuple[Operand, Operand]:
        col = self.ops.gather_col(self._values(parts), token_of, slot_weights)
        return self.row(parts, token_of), col

    def _values(self, parts: Sequence[Tensor]) -> Tensor:
        data, scale = parts
        mx = MXTensor(data, scale, FORMATS[self.ops.format], -1, ScaleLayout.LINEAR, data.shape)
        return dequantize(mx, self.dtype)


# --- the layer --------------------------------------------------------------------------------------------------------


class ExchangedMlp(torch.autograd.Function):
    """`mx_kernels.autograd.MoeMlp` with experts that are spread over ranks."""

    @staticmethod
    def forward(
        ctx,
        x_TD: Tensor,
        weights_Tk: Tensor,
        w1: Tensor,
        w2: Tensor,
        exchange: Exchange,
        wire: Wire,
        ops: Operands,
        recipe: Recipe,
        *prepared: Tensor,
    ) -> Tensor:
        dtype = x_TD.dtype
        x_M = [exchange.tokens_forth("x", part) for part in wire.pack(x_TD)]
        y_P, h = forward_experts(  # F1-F4
            ops,
            lambda: wire.row(x_M, exchange.local_token_of),
            lambda: prepared_operand(prepared, 0, recipe) or ops.weight_row(w1, dtype),
            lambda: prepared_operand(prepared, 2, recipe) or ops.weight_row(w2, dtype),
            exchange.offs,
            dtype,
        )
        y_S = exchange.tokens_back("y", y_P)
        ctx.exchange, ctx.wire, ctx.ops, ctx.recipe = exchange, wire, ops, recipe
        ctx.w_dtypes, ctx.parts = (w1.dtype, w2.dtype), len(x_M)
        ctx.save_for_backward(weights_Tk, h, *x_M, *(prepared[4:] or (w1, w2)))
        return torch.ops.mx.combine(y_S, exchange.slot_of, weights_Tk, ops.backend)  # F5

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyrefly: ignore[bad-override]
        exchange, wire, ops, recipe = ctx.exchange, ctx.wire, ctx.ops, ctx.recipe
        w1_dtype, w2_dtype = ctx.w_dtypes
        need_x, need_weights, need_w1, need_w2 = ctx.needs_input_grad[:4]
        weights_Tk, h, *rest = ctx.saved_tensors
        x_M, kept = rest[: ctx.parts], rest[ctx.parts :]
        token_of, slot_of = exchange.local_token_of, exchange.local_slot_of
        dout_M = [exchange.tokens_forth("dout", part) for part in wire.pack(grads[0].contiguous())]
        weights_M1 = exchange.choices_forth("weights", weights_Tk)
        slot_weights = torch.ops.mx.slot_weights(weights_M1, slot_of, token_of.shape[0], ops.backend)
        dx_P, dw_P, dw1, dw2 = backward_experts(  # B1-B6
            ops,
            lambda: (
                wire.dout(dout_M, token_of, slot_weights) if need_w2 else (wire.row(dout_M, token_of), None)
            ),
            h,
            slot_weights,
            exchange.offs,
            lambda: weight_for_dgrad(ops, kept, 0, recipe, h.dtype),
            lambda: weight_for_dgrad(ops, kept, 1, recipe, h.dtype),
            lambda: wire.col(x_M, token_of),
            need_x,
            (w1_dtype if need_w1 else None, w2_dtype if need_w2 else None),
        )
        dx = dweights = None
        if need_x:  # B7
            dx = torch.ops.mx.combine(exchange.tokens_back("dx", dx_P), exchange.slot_of, None, ops.backend)
        if need_weights:
            dweights = exchange.choices_back("dweights", dw_P)
        return dx, dweights, dw1, dw2, *(None,) * (len(ctx.needs_input_grad) - 4)


def _refresh_prepared(module: nn.Module, _: object) -> None:
    """load_state_dict hook."""
    assert isinstance(module, ParallelExperts)
    if module.prepared is not None:
        module.prepared.refresh()


class ParallelExperts(MXExperts):
    """This rank's part of `whole`'s experts; parameters are DTensors of all experts, sharded over `mesh`.

    Args:
        whole: all experts, the same on every rank.
        mesh: one-dimensional, of the ranks that share them.
        quantized: whether rows travel quantised.
        padded: whether buffers have a fixed size (see `plan_exchange`).
        capacity: that size as a multiple of the even load; 0: whatever may come.
    """

    def __init__(self, whole: MXExperts, mesh: DeviceMesh, *, quantized: bool, padded: bool, capacity: float):
        self.experts, self.mesh = whole.w2.shape[0], mesh
        local, (_, dim, hidden) = self.experts // mesh.size(), whole.w2.shape
        super().__init__(local, dim, hidden, recipe=whole.recipe, backend=whole.backend, device="meta")
        first = local * mesh.get_local_rank()
        for name in ("w1", "w2"):
            part = getattr(whole, name).detach()[first : first + local].clone()
            setattr(self, name, nn.Parameter(DTensor.from_local(part, mesh, [Shard(0)], run_check=False)))
        self.quantized, self.padded, self.capacity = quantized, padded, capacity
        self.register_load_state_dict_post_hook(_refresh_prepared)
        self.traffic = Traffic()
        self.dropped = torch.zeros((), dtype=torch.int64, device=whole.w1.device)
        """Rows that did not fit, since the trainer last looked."""

    def local_weights(self) -> tuple[Tensor, Tensor]:
        """W1 (L, 2H, D) and W2 (L, D, H) of this rank; under FSDP only between its hooks whole."""
        w1, w2 = (cast(DTensor, w).to_local() for w in (self.w1, self.w2))
        return w1, w2

    def prepare(
        self, optimizer: torch.optim.Optimizer | None = None, *, orientations: str = "both"
    ) -> PreparedWeights:
        """As `MXExperts.prepare`, of the local experts; not under FSDP, where whole weights come and go."""
        if self.prepared is not None:
            self.prepared.detach()
        local = [w.detach() for w in self.local_weights()]
        self.prepared = prepare_weights(
            *local, orientations=orientations, recipe=self.recipe, backend=self.backend
        )
        if optimizer is not None:
            self.prepared.attach(optimizer)
        return self.prepared

    def rows_per_rank(self, choices: int, k: int) -> int | None:
        """Capacity of each of the buffers; None: not padded."""
        if not self.padded:
            return None
        ranks = self.mesh.size()
        worst = choices // k * min(k, self.experts // ranks)
        return min(worst, math.ceil(self.capacity * choices / ranks)) if self.capacity else worst

    @torch.compiler.disable  # collectives and sizes that depend on the data; what lies around it stays compiled
    def forward(self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        """X (T, D), topk_ids and topk_weights (T, k) of this rank's tokens → (T, D). All ranks of the mesh call it."""
        ops = operands_of(self.recipe, self.backend)
        capacity = self.rows_per_rank(topk_ids.numel(), topk_ids.shape[1])
        exchange = plan_exchange(
            topk_ids, self.experts, capacity, self.mesh.get_group(), self.traffic, self.backend
        )
        if self.capacity and self.training:
            self.dropped += (exchange.slot_of < 0).sum()
        wire = MxWire(ops, x.dtype) if self.quantized and isinstance(ops, MxOperands) else PlainWire(ops)
        w1, w2 = self.local_weights()
        prepared = () if self.prepared is None else self.prepared.tensors()
        return ExchangedMlp.apply(
            x.contiguous(),
            topk_weights.float().contiguous(),
            w1,
            w2,
            exchange,
            wire,
            ops,
            self.recipe,
            *prepared,
        )

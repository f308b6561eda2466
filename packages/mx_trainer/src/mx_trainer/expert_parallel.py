"""Expert parallelism: every rank holds E / ep experts, and rows travel to them and back.

    router (on every rank, for its own tokens)
      rows sorted by expert, the number for each expert exchanged              `plan_exchange`
      ── all-to-all ──>  rows to their experts' ranks: as they are, or quantised   `Exchange.forth`
                         grouped GEMMs, SwiGLU: steps F1-F4 of mx_kernels
      <── all-to-all ──  results back                                          `Exchange.back`
      weighted sum over the k choices (F5)

The backward pass mirrors it: the gradient of the layer's output travels with the router's weights to the experts (B1), the
gradient of x and of the weights back. The experts see the same rows in the same order, by rank and then by token, as one
process with the whole batch would, and every product, sum and rounding is the same: the results are those of one process.

Rows that travel quantised (`--dispatch mxfp8`) are what fprop and dgrad would have made of them on the other side, so y and
dx are the same bits. The weight gradients quantise along the other axis; they start from the dequantised rows, so x and dout
are rounded twice there, which is the only difference. y and dx travel back in the activations' type.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from mx_core import ScaleLayout, e8m0_to_float
from mx_core.formats import BLOCK_SIZE
from mx_core.scale_layout import to_blocked
from mx_kernels import MXExperts, PreparedWeights, prepare_weights
from mx_kernels.autograd import backward_experts, forward_experts, prepared_operand, weight_for_dgrad
from mx_kernels.operands import ALIGNED, MxOperands, Operand, Operands, operands_of
from mx_kernels.recipe import Recipe
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

# --- which row goes where ---------------------------------------------------------------------------------------------


class Traffic:
    """Bytes this rank has handed to all-to-alls, by what they were."""

    def __init__(self) -> None:
        self.handed: Counter[str] = Counter()
        """All of them."""
        self.sent: Counter[str] = Counter()
        """Those for other ranks: what crosses a link."""

    def count(self, kind: str, rows: list[int], width: int, rank: int) -> None:
        """`rows` for each rank of `width` bytes, handed over by `rank`."""
        self.handed[kind] += sum(rows) * width
        self.sent[kind] += (sum(rows) - rows[rank]) * width


def row_bytes(width: int, element_size: int, quantized: bool) -> dict[str, int]:
    """Bytes of one row (one choice of one token) in one layer's forward and backward passes, by what they are: the closed
    formula of what `Traffic` counts. The counts, 8 bytes for each expert and call, come on top.

    Args:
        width: D.
        element_size: of the activations between experts, 2 for BF16.
        quantized: whether rows travel in MXFP8.
    """
    plain = width * element_size
    there = width + width // BLOCK_SIZE if quantized else plain
    return {"x": there, "y": plain, "dout": there, "weights": 4, "dx": plain, "dweights": 4}


@dataclass(frozen=True)
class Exchange:
    """Who sends which rows to whom. S rows leave this rank, M arrive; T tokens, k choices, L experts here."""

    group: dist.ProcessGroup
    traffic: Traffic
    send_rows: list[int]
    """By receiving rank; their sum is S."""
    receive_rows: list[int]
    """By sending rank; their sum is M."""
    choice_of: Tensor
    """(S,) int64: which of the T * k choices a row is; of a padding row, any."""
    slot_of: Tensor
    """(T, k) int32: the row of every choice, -1 where it was dropped."""
    local_slot_of: Tensor
    """(M, 1) int32: the experts' ALIGNED row of every row that arrives, -1 on padding."""
    local_token_of: Tensor
    """(P,) int32: its inverse."""
    offs: Tensor
    """(L,) int32: ends of the experts' rows."""
    backend: str

    def tokens_forth(self, kind: str, rows_T: Tensor) -> Tensor:
        """Rows (T, ...) of tokens, each as often as it was chosen, to the experts' ranks: (M, ...)."""
        token_of = self.choice_of // self.slot_of.shape[1]
        return self._move(kind, rows_T.index_select(0, token_of), self.send_rows, self.receive_rows)

    def choices_forth(self, kind: str, values_Tk: Tensor) -> Tensor:
        """One value of each choice (T, k) to the experts' ranks: (M, 1)."""
        rows = values_Tk.view(-1, 1).index_select(0, self.choice_of)
        return self._move(kind, rows, self.send_rows, self.receive_rows)

    def tokens_back(self, kind: str, rows_P: Tensor) -> Tensor:
        """The experts' rows (P, D), without padding, to where they came from: (S, D)."""
        rows_M = torch.ops.mx.combine(rows_P, self.local_slot_of, None, self.backend)
        return self._move(kind, rows_M, self.receive_rows, self.send_rows)

    def choices_back(self, kind: str, values_P: Tensor) -> Tensor:
        """One value of each of the experts' rows (P,) to its choice: (T, k), 0 for dropped ones."""
        values_M = _pick(values_P, self.local_slot_of)
        return _pick(self._move(kind, values_M, self.receive_rows, self.send_rows).view(-1), self.slot_of)

    def _move(self, kind: str, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """One all-to-all of rows, as bytes."""
        width = rows.shape[1:].numel() * rows.element_size()
        self.traffic.count(kind, send, width, self.group.rank())
        out = rows.new_empty(sum(receive), *rows.shape[1:])
        to, of = (t.contiguous().view(-1).view(torch.uint8).view(t.shape[0], width) for t in (out, rows))
        dist.all_to_all_single(to, of, receive, send, group=self.group)
        return out


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """values[index], 0 where the index is -1."""
    return torch.where(index >= 0, values[index.clamp(min=0)], 0.0)


def plan_exchange(
    ids_Tk: Tensor,
    experts: int,
    capacity: int | None,
    group: dist.ProcessGroup,
    traffic: Traffic,
    backend: str,
) -> Exchange:
    """Agree with the other ranks of `group` on the rows to exchange.

    Args:
        ids_Tk: (T, k) int64, the experts of this rank's tokens.
        experts: E; rank r of the group holds those from r * E / ranks on.
        capacity: rows from one rank to another, always: nothing then waits for the device, what does not fit is dropped and
            the rest is padding. None: as many as there are, for which the counts are read from the device, once.
        group: the ranks that share the experts.
        traffic: where bytes are counted.
        backend: of mx_kernels.
    """
    ranks, choices, device = group.size(), ids_Tk.numel(), ids_Tk.device
    local = experts // ranks
    ids, choice_of = ids_Tk.flatten().sort(
        stable=True
    )  # by expert; an expert's rows stay in the order of the tokens
    ends_RL = torch.searchsorted(ids, torch.arange(experts, device=device), right=True).view(ranks, local)
    starts_R = torch.cat([ends_RL.new_zeros(1), ends_RL[:-1, -1]])
    filled_RL = ends_RL - starts_R[:, None]  # rows for a rank, up to and with each of its experts
    slot = torch.arange(choices, device=device)
    slot_of = torch.empty_like(slot)
    if capacity is None:
        slot_of[choice_of] = slot
    else:
        filled_RL = filled_RL.clamp(max=capacity)
        rank = ids // local
        in_rank = slot - starts_R[rank]
        slot = torch.where(in_rank < capacity, rank * capacity + in_rank, -1)
        slot_of[choice_of] = slot
        padded = choice_of.new_zeros(ranks * capacity + 1)  # dropped rows write to the last entry
        choice_of = padded.scatter_(0, slot % (ranks * capacity + 1), choice_of)[:-1]
    sent_RL = filled_RL.diff(dim=1, prepend=filled_RL.new_zeros(ranks, 1))
    received_RL = torch.empty_like(sent_RL)
    dist.all_to_all_single(received_RL, sent_RL, group=group)
    traffic.count("counts", [local] * ranks, sent_RL.element_size(), group.rank())
    if capacity is None:
        # The only place where the host waits for the device.
        send_rows, receive_rows = torch.stack([sent_RL.sum(1), received_RL.sum(1)]).tolist()
        padding_R = received_RL.new_zeros(ranks, 1)
    else:
        send_rows = receive_rows = [capacity] * ranks
        padding_R = capacity - received_RL.sum(1, keepdim=True)
    # What arrives is sorted by rank, then by expert, then padding: one more expert, whose rows `route` drops.
    ends = torch.cat([received_RL, padding_R], dim=1).flatten().cumsum(0)
    row = torch.arange(sum(receive_rows), device=device)
    expert_M1 = (torch.searchsorted(ends, row, right=True) % (local + 1)).view(-1, 1)
    local_slot_of, local_token_of, offs = torch.ops.mx.route(expert_M1, local, backend)
    return Exchange(
        group=group,
        traffic=traffic,
        send_rows=send_rows,
        receive_rows=receive_rows,
        choice_of=choice_of,
        slot_of=slot_of.view(ids_Tk.shape).to(torch.int32),
        local_slot_of=local_slot_of,
        local_token_of=local_token_of,
        offs=offs,
        backend=backend,
    )


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
        data_P, scale_P = (
            F.pad(t.view(torch.uint8), (0, 0, 0, 1))[token_of] for t in parts
        )  # -1: the row of zeros
        return Operand(data_P.view(parts[0].dtype), to_blocked(scale_P), self.ops.format)

    def col(self, parts: Sequence[Tensor], token_of: Tensor) -> Operand:
        return self.ops.gather_col(self._values(parts), token_of)

    def dout(
        self, parts: Sequence[Tensor], token_of: Tensor, slot_weights: Tensor
    ) -> tuple[Operand, Operand]:
        col = self.ops.gather_col(self._values(parts), token_of, slot_weights)
        return self.row(parts, token_of), col

    def _values(self, parts: Sequence[Tensor]) -> Tensor:
        data, scale = parts  # mx_core.dequantize, which takes any format, but makes tables on the host
        blocks = data.to(torch.float32).view(*scale.shape, BLOCK_SIZE)
        return (blocks * e8m0_to_float(scale, torch.float32)[..., None]).view(data.shape).to(self.dtype)


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
        exchange, wire, ops, recipe, (w1_dtype, w2_dtype) = (
            ctx.exchange,
            ctx.wire,
            ctx.ops,
            ctx.recipe,
            ctx.w_dtypes,
        )
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
        self.prepared = wq = prepare_weights(
            *local, orientations=orientations, recipe=self.recipe, backend=self.backend
        )
        self.register_load_state_dict_post_hook(lambda *_: wq.refresh())
        if optimizer is not None:
            wq.attach(optimizer)
        return wq

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

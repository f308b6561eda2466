"""Which row goes to which rank, and the all-to-alls that take it there and back; see expert_parallel.py."""

from collections import Counter
from dataclasses import dataclass

import torch
import torch.distributed as dist
from mx_core.formats import BLOCK_SIZE
from torch import Tensor


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
    ids, choice_of = ids_Tk.flatten().sort(stable=True)  # an expert's rows stay in the order of the tokens
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

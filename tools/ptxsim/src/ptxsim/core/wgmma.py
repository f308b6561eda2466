"""Hopper's wgmma: operands from shared memory or registers, accumulators in registers.

Each warp computes its 16 rows. Operands are read and accumulators written when the operation takes effect, between issue and
`wgmma.wait_group`; the sums follow `ptxsim.wgmma_sum`, a bit-exact model of an H200.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import Fault
from .descriptors import check_operand, decode_bytes, read_operand
from .memory import who
from .state import Wait
from .tmem import REGISTER_POISON, stream_clock
from .values import LANE_INDEX, U64, Array, Value, first, spread

if TYPE_CHECKING:
    from .state import Warp

_BYTES = {"bf16": 2, "f16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1}
_PENDING = "wgmma without wgmma.wait_group"


@lru_cache(maxsize=64)
def _fragment(n: int) -> tuple[Array, Array]:
    """Row (of the warp's 16) and column of each (register, thread) of an f32 or s32 accumulator."""
    i = np.arange(n // 2)[:, None]
    return LANE_INDEX // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (LANE_INDEX % 4) + i % 2


class _Accumulate:
    """One wgmma in flight: its registers' values move from operation to operation until a wait."""

    def __init__(self, slots: list[int], inputs: Any, epoch: int):
        self.slots, self.inputs, self.epoch = slots, inputs, epoch
        self.result: list[Array] | None = None


def wgmma_fence(W: Warp) -> None:
    """Registers are read at issue here, so nothing waits for the fence; `check_wgmma_fence` asks for it."""


def note_registers(W: Warp, registers: list[str], line: int) -> None:
    """An instruction other than wgmma is about to access registers that a wgmma uses."""
    if W.unfenced_registers is not None:
        W.unfenced_registers.update(dict.fromkeys(registers, ("", line)))


def check_wgmma_fence(W: Warp, used: list[str], accumulated: list[str], shape: str, line: int) -> None:
    """Emitted before a wgmma.mma_async that some path reaches without wgmma.fence."""
    accesses = W.unfenced_registers
    if not W.machine.checks:
        return
    if accesses is None:
        raise Fault(f"no wgmma.fence before the first wgmma.mma_async: {who(W, line)}")
    for register in used:
        by, where = accesses.get(register, (shape, 0))
        if by != shape:
            raise Fault(
                f"no wgmma.fence between an access to {register} ({W.machine.describe_line(where)}) and the wgmma.mma_async "
                f"that uses it: {who(W, line)}"
            )
    accesses.update(dict.fromkeys(accumulated, (shape, line)))


def wgmma_mma(
    W: Warp,
    R: list,
    slots: list[int],
    n: int,
    d_type: str,
    a_type: str,
    b_type: str,
    a: Any,
    a_in_registers: bool,
    b: Value,
    scale_d: Value,
    negate_a: bool,
    negate_b: bool,
    transpose_a: bool,
    transpose_b: bool,
    line: int,
) -> None:
    cta = W.cta
    b_descriptor = first(b, None)
    keep = bool(first(scale_d, None))
    stream = W.stream("wgmma", "mma")
    epoch = stream.note(line)
    size = _BYTES[a_type]
    accessor = f"wgmma by {W.name}"
    rows = slice(16 * (W.number % 4), 16 * (W.number % 4) + 16)
    with stream_clock(W, stream) as clock:
        order = (clock, stream.actor, epoch, line, accessor)
        if not a_in_registers:
            check_operand(cta, first(a, None), False, transpose_a, 64, 32, size, *order)
        check_operand(cta, b_descriptor, False, transpose_b, n, 32, _BYTES[b_type], *order)
    fragment = _a_fragment(a) if a_in_registers else None
    previous = W.wgmma_owner.get(slots[0]) if keep else None
    if previous is not None and previous.slots != slots:
        raise Fault(
            f"wgmma accumulates on registers that an unfinished wgmma of another shape owns: {who(W, line)}"
        )
    held = previous if previous is not None else ([spread(R[s]) for s in slots] if keep else None)
    operation = _Accumulate(slots, held, epoch)
    W.machine.count("wgmma", 1)
    W.machine.count("wgmma columns", n)

    def run() -> None:
        raw = (
            fragment
            if fragment is not None
            else read_operand(cta, first(a, None), False, transpose_a, 64, 32, size)[rows]
        )
        x = decode_bytes(np.ascontiguousarray(raw), a_type)
        y = decode_bytes(read_operand(cta, b_descriptor, False, transpose_b, n, 32, _BYTES[b_type]), b_type)
        old = operation.inputs.result if isinstance(operation.inputs, _Accumulate) else operation.inputs
        operation.inputs = None
        operation.result = _compute(
            -x if negate_a else x, -y if negate_b else y, old, n, d_type, a_type, b_type
        )
        if W.wgmma_owner.get(slots[0]) is operation:
            for slot, value in zip(slots, operation.result, strict=True):
                R[slot] = value

    for slot in slots:
        R[slot] = REGISTER_POISON
        W.wgmma_owner[slot] = operation
    W.pending_registers.update(dict.fromkeys(slots, _PENDING))
    stream.ops.append((epoch, W.machine.engine.issue(run, line, stream.pipe)))


def _a_fragment(registers: list[Value]) -> Array:
    """Register r holds row lane/4 + 8·(r&1), bytes 4·(lane%4) + 16·(r>>1)."""
    out = np.zeros((16, 32), np.uint8)
    for r, v in enumerate(registers):
        word = spread(v).astype(np.uint32).view(np.uint8).reshape(32, 4)
        for q in range(4):
            out[LANE_INDEX // 4 + 8 * (r & 1), 4 * (LANE_INDEX % 4) + 16 * (r >> 1) + q] = word[:, q]
    return out


def _compute(
    x: Array, y: Array, old: list[Array] | None, n: int, d_type: str, a_type: str, b_type: str
) -> list[Array]:
    """New accumulator fragments."""
    row, column = _fragment(n)
    if d_type == "s32":
        p = (x @ y.T).astype(np.int64)[row, column]
        acc = np.stack(old).astype(np.uint32).view(np.int32).astype(np.int64) if old else 0
        return list((acc + p).astype(np.int32).view(np.uint32).astype(np.uint64))
    c = np.zeros((16, n))
    if old:
        words = np.stack(old).astype(np.uint32)
        if d_type == "f32":
            c[row, column] = words.view(np.float32)
        else:
            halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], 1).reshape(-1, 32)
            c[row, column] = halves.astype(np.uint16).view(np.float16)
    total = _sum(x, y, c, a_type, b_type, d_type)[row, column]
    if d_type == "f32":
        bits = total.astype(np.float32).view(np.uint32)
        return list(np.where(np.isnan(total), np.uint32(0x7FFFFFFF), bits).astype(np.uint64))
    bits = np.where(np.isnan(total), np.uint16(0x7FFF), total.astype(np.float16).view(np.uint16)).astype(
        np.uint64
    )
    return list(bits[0::2] | bits[1::2] << U64(16))


def _sum(x: Array, y: Array, c: Array, a_type: str, b_type: str, d_type: str) -> Array:
    try:
        from ..wgmma_sum import wgmma_step
    except ImportError:
        return x @ y.T + c
    return wgmma_step(x, y, c, a_type, b_type, d_type)


def wgmma_commit(W: Warp, line: int) -> None:
    W.stream("wgmma", "mma").epoch += 1
    W.machine.progress += 1


def wgmma_wait(W: Warp, n: int, next_block: int, line: int) -> int | Wait:
    """A warpgroup's wgmma runs once all four warps have issued it."""
    stream = W.stream("wgmma", "mma")
    epoch = stream.epoch - 1 - n
    base = W.number & ~3
    group = [w for w in W.cta.warps if base <= w.number < base + 4]

    def finish() -> None:
        while stream.ops and stream.ops[0][0] <= epoch:
            W.machine.engine.force(stream.ops.popleft()[1])
        stream.complete(W.clock, epoch)
        for slot in [s for s, owner in W.wgmma_owner.items() if owner.epoch <= epoch]:
            del W.wgmma_owner[slot]
            W.pending_registers.pop(slot, None)

    def ready() -> bool:
        return all(w.stream("wgmma", "mma").epoch > epoch for w in group)

    if ready():
        finish()
        return next_block
    return Wait(
        ready,
        next_block,
        lambda: (
            f"{W.machine.describe_line(line)}: wgmma.wait_group {n} (other warps of the warpgroup have not committed)"
        ),
        finish,
    )

"""Shuffles, votes, reductions and elections, and the convergence they need."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import Fault
from . import floats
from .integers import signed
from .memory import who
from .state import Wait
from .values import LANE_INDEX, M32, U64, Array, Mask, Value, bits_mask, count_true, first, mask_bits, spread

if TYPE_CHECKING:
    from .state import Warp


def converge(W: Warp, m: Mask, members: Value, line: int, what: str) -> Wait | None:
    """None if every live lane of the member mask is active; else wait for them to arrive at this instruction."""
    member = first(members, m) & M32
    active = mask_bits(m)
    if active & ~member & M32:
        raise Fault(
            f"{what}: lanes {active & ~member & M32:#x} execute it but are not in its mask {member:#x}: {who(W, line)}"
        )
    missing = member & W.live_bits & ~active
    if not missing:
        return None
    block = W.current_group.block
    return Wait(
        lambda: False,
        block,
        f"{W.machine.describe_line(line)}: {what} waits for lanes {missing:#x} of its warp",
    )


def need_full_warp(W: Warp, m: Mask, line: int, what: str) -> None:
    if m is not None and not (m == W.live).all():
        raise Fault(f"{what} needs all lanes of the warp, {mask_bits(m):#x} are active: {who(W, line)}")


def shuffle(mode: str, a: Value, b: Value, c: Value, m: Mask) -> tuple[Value, Value]:
    """Value from another lane, and whether that lane was in range."""
    if mode == "idx" and type(b) is not Array and type(c) is not Array and c & 0x1F1F == 0x1F:
        return int(a[b & 31]) if type(a) is Array else a, True
    values, source, clamp = spread(a), spread(b).astype(np.int64), spread(c).astype(np.int64)
    segment, bound = clamp >> 8 & 31, clamp & 31
    lane = LANE_INDEX
    low = lane & segment
    top = low | (bound & ~segment & 31)
    source = source & 31
    if mode == "idx":
        j = low | (source & ~segment & 31)
        ok = j <= top
    elif mode == "up":
        j = lane - source
        ok = j >= top
    elif mode == "down":
        j = lane + source
        ok = j <= top
    else:
        j = lane ^ source
        ok = j <= top
    j = np.where(ok, j, lane)
    result = values[j]
    if type(a) is not Array:
        return a, ok
    return result, ok


def vote(mode: str, p: Value, m: Mask) -> Value:
    p = spread(p) if type(p) is Array else np.full(32, bool(p))
    among = p if m is None else p[m]
    if mode == "all":
        return bool(among.all())
    if mode == "any":
        return bool(among.any())
    if mode == "uni":
        return bool(among.all() or not among.any())
    return mask_bits(p if m is None else p & m)


def reduce_warp(op: str, ty: str, opt: str, a: Value, m: Mask) -> Value:
    values = spread(a) if m is None else spread(a)[m]
    if ty == "f32":
        result = int(values[0])
        if len(values) == 1:
            return floats.minmax(op, ty, opt, result, result)
        for v in values[1:]:
            result = floats.minmax(op, ty, opt, result, int(v))
        return result
    if op == "add":
        return int(values.sum()) & M32
    if op in ("min", "max"):
        v = signed(values, 32) if ty == "s32" else values
        return int(v.min() if op == "min" else v.max()) & M32
    return int({"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}[op].reduce(values))


def match_warp(mode: str, a: Value, m: Mask) -> tuple[Value, Value]:
    values = spread(a)
    active = np.ones(32, bool) if m is None else m
    if mode == "all":
        same = bool((values[active] == values[active][0]).all())
        return (mask_bits(active) if same else 0), same
    equal = (values[:, None] == values[None, :]) & active[None, :]
    return np.array([mask_bits(row) for row in equal], dtype=np.uint64), True


_LEADERS = [bits_mask(1 << i) for i in range(32)]


def elect(m: Mask) -> tuple[Value, Value]:
    """The lowest active lane, and the predicate that is true there."""
    i = 0 if m is None else int(np.argmax(m))
    if m is not None and count_true(m) == 1:
        return i, True
    return i, _LEADERS[i]


__all__ = ["U64"]

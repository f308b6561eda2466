"""Register values: a Python int when every lane of the warp holds the same value, else uint64[32].

Predicates are a Python bool or bool[32]. A lane mask `m` is None for "all 32 lanes" or bool[32].
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

try:  # the C function itself: numpy's public wrapper costs as much as counting 32 lanes
    from numpy._core.multiarray import count_nonzero as count_true
except ImportError:
    from numpy import count_nonzero as count_true

M32 = 0xFFFFFFFF
M64 = (1 << 64) - 1
U64 = np.uint64
Array = np.ndarray
LANES = np.arange(32, dtype=np.uint64)
LANE_INDEX = np.arange(32)

Value = Any
"""int | uint64[32]"""
Mask = Any
"""None | bool[32]"""


class Undef(int):
    """Value of a register nobody wrote yet. Merging into it takes the new value for all lanes."""

    __slots__ = ()


UNDEF = Undef(0x7FBADBAD)
UNDEF_PREDICATE = Undef(0)


def spread(x: Value) -> Array:
    """The 32 lanes of a value."""
    if type(x) is Array:
        return x
    if isinstance(x, bool):
        return np.full(32, x)
    return np.full(32, x & M64, dtype=np.uint64)


def merge(m: Mask, new: Value, old: Value) -> Value:
    """`new` in the lanes of `m`, `old` elsewhere."""
    if m is None or type(old) is Undef:
        return new
    is_array = type(new) is Array
    if not is_array and type(old) is not Array and new == old:
        return new
    predicate = type(new) is bool or (is_array and new.dtype == bool)
    result = np.array(spread(old), dtype=bool) if predicate else spread(old).copy()
    result[m] = new[m] if is_array else new
    return result


def first(v: Value, m: Mask) -> int:
    """The value in the first active lane."""
    if type(v) is not Array:
        return v
    return v[int(np.argmax(m))].item() if m is not None else v[0].item()


def lanes(m: Mask) -> Iterable[int]:
    return range(32) if m is None else m.nonzero()[0].tolist()


def lane(v: Value, i: int) -> int:
    return int(v[i]) if type(v) is Array else v


def count_lanes(m: Mask) -> int:
    return 32 if m is None else int(count_true(m))


def mask_bits(m: Mask) -> int:
    return M32 if m is None else int(np.packbits(m, bitorder="little").view("<u4")[0])


def bits_mask(bits: int) -> Array:
    return (bits >> LANE_INDEX & 1).astype(bool)


def predicate_and_mask(p: Value, m: Mask) -> Mask | bool:
    """Lanes where a guard holds: a mask, None for all lanes, or False for none."""
    if type(p) is not Array:
        return m if p else False
    q = p if m is None else p & m
    n = count_true(q)
    if n == 0:
        return False
    return None if n == 32 else q


def logical_not(p: Value) -> Value:
    if type(p) is Array:
        return ~p if p.dtype == bool else p == 0
    return not p


def branch(p: Value, m: Mask, target: int, fall: int) -> int | tuple[Array, Array, int, int]:
    """Next block, or (taken lanes, other lanes, target, fall-through) if the warp splits."""
    if type(p) is not Array:
        return target if p else fall
    taken = p if m is None else p & m
    n = count_true(taken)
    if n == 0:
        return fall
    if n == (32 if m is None else count_true(m)):
        return target
    return taken, (~p if m is None else m & ~p), target, fall


def select(p: Value, a: Value, b: Value) -> Value:
    if type(p) is not Array:
        return a if p else b
    if type(a) is bool or (type(a) is Array and a.dtype == bool):
        return np.where(p, a, b)
    return np.where(p, spread(a), spread(b))

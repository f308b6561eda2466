"""Instructions across the lanes of a warp: shfl, vote, redux, match, elect, barrier reductions, member masks."""

from __future__ import annotations

import numpy as np
from emulator.conformance.case import Case, elementwise, random_bits

MASKS = ("0x0000ffff", "0xffff0000", "0x55555555", "0x00ff00f0", "0x80000001", "0x00000010")
N = 32 * 32


def _values_and_lanes(rng: np.random.Generator) -> list[np.ndarray]:
    return [random_bits(rng, N), rng.integers(0, 64, N).astype(np.uint32)]


def _small_values(rng: np.random.Generator) -> list[np.ndarray]:
    return [rng.integers(0, 5, N).astype(np.uint32), rng.integers(0, 64, N).astype(np.uint32)]


def _shuffle(mode: str, lane: str | int, clamp: str) -> str:
    """The shuffled word with its top bit replaced by the predicate."""
    return f"shfl.sync.{mode}.b32 d|p, a, {lane}, {clamp}, -1; selp.b32 t0, 1, 0, p; shl.b32 t0, t0, 31; and.b32 d, d, 0x7fffffff; or.b32 d, t0, d;"


_SHUFFLE = {
    "idx": _shuffle("idx", "b", "31"),
    "idx.width16": _shuffle("idx", "b", "0x101f"),
    "idx.width8": _shuffle("idx", "b", "0x181f"),
    "idx.clamp": _shuffle("idx", "b", "0x0013"),
    **{f"up{k}": _shuffle("up", k, "0") for k in (0, 1, 2, 4, 8, 16, 31, 33)},
    **{f"down{k}": _shuffle("down", k, "31") for k in (0, 1, 2, 4, 8, 16, 31, 33)},
    **{f"bfly{k}": _shuffle("bfly", k, "31") for k in (0, 1, 2, 4, 8, 16, 31, 33)},
    **{
        f"{m}{k}.width8": _shuffle(m, k, c)
        for k in (1, 3, 4)
        for m, c in (("up", "0x1800"), ("down", "0x181f"), ("bfly", "0x181f"))
    },
    **{f"down{k}.width16": _shuffle("down", k, "0x100b") for k in (1, 3, 4)},
    **{f"{m}.lane": _shuffle(m, "b", c) for m, c in (("up", "0"), ("down", "31"), ("bfly", "31"))},
    "uniform": "mov.b32 t0, 77; shfl.sync.idx.b32 d, t0, 3, 31, -1;",
    "uniform.predicate": "mov.b32 t0, 77; shfl.sync.idx.b32 t1|p, t0, 20, 0x0007, -1; selp.b32 d, 1, 0, p;",
    "after_divergence": "and.b32 t0, a, 1; setp.ne.u32 q, t0, 0; mov.b32 t0, a; @q add.u32 t0, t0, 100; shfl.sync.bfly.b32 d, t0, 1, 31, -1;",
}


def _members(mask: str, body: str) -> str:
    """Run `body` in the lanes of `mask` (predicate q); the others keep a fixed pattern."""
    return f"mov.u32 t0, %laneid; shl.b32 t1, 1, t0; and.b32 t1, t1, {mask}; setp.ne.u32 q, t1, 0; mov.b32 d, 0x5a5a5a5a; {body}"


_MEMBERS = {}
for _m in MASKS:
    _MEMBERS |= {
        f"bfly0.{_m}": _members(_m, f"@q shfl.sync.bfly.b32 d, a, 0, 31, {_m};"),
        f"ballot.{_m}": _members(_m, f"setp.lt.s32 p, a, 0; @q vote.sync.ballot.b32 d, p, {_m};"),
        f"all.{_m}": _members(
            _m, f"setp.lt.u32 p, b, 60; @q vote.sync.all.pred z, p, {_m}; @q selp.b32 d, 1, 0, z;"
        ),
        f"any.{_m}": _members(
            _m, f"setp.lt.u32 p, b, 3; @q vote.sync.any.pred z, p, {_m}; @q selp.b32 d, 1, 0, z;"
        ),
        f"uni.{_m}": _members(
            _m, f"setp.lt.u32 p, b, 60; @q vote.sync.uni.pred z, p, {_m}; @q selp.b32 d, 1, 0, z;"
        ),
    }
for _m in (*MASKS, "0xffffffff"):
    _MEMBERS |= {
        **{
            f"redux.{o}.{t}.{_m}": _members(_m, f"@q redux.sync.{o}.{t} d, a, {_m};")
            for o in ("add", "min", "max")
            for t in ("u32", "s32")
        },
        **{
            f"redux.{o}.{_m}": _members(_m, f"@q redux.sync.{o}.b32 d, a, {_m};")
            for o in ("and", "or", "xor")
        },
    }
_MEMBERS |= {
    "bfly1.0x00ff00f0": _members("0x00ff00f0", "@q shfl.sync.bfly.b32 d, a, 1, 31, 0x00ff00f0;"),
    "bfly1.member_register": _members("0x00ff00f0", "mov.b32 t2, 0x00ff00f0; @q shfl.sync.bfly.b32 d, a, 1, 31, t2;"),
    "redux.two_groups": _members("0x0000ffff", "@q redux.sync.add.u32 d, a, 0x0000ffff; @!q redux.sync.add.u32 d, a, 0xffff0000;"),
    "syncwarp.groups": _members("0x0000ffff", "@q bar.warp.sync 0x0000ffff; @!q bar.warp.sync 0xffff0000; mov.b32 d, a;"),
    "elect": "elect.sync t0|p, -1; selp.b32 d, 1, 0, p; shl.b32 t0, t0, 8; or.b32 d, d, t0;",
    "elect.0x0000fff0": _members("0x0000fff0", "mov.b32 t2, 0; @q elect.sync t2|p, 0x0000fff0; @q selp.b32 d, 1, 0, p; shl.b32 t2, t2, 8; @q or.b32 d, d, t2;"),
    "activemask": "activemask.b32 d;",
    "lanemasks": "mov.u32 t0, %lanemask_lt; mov.u32 t1, %lanemask_ge; mov.u32 t2, %lanemask_eq; xor.b32 d, t0, t1; add.u32 d, d, t2; mov.u32 t0, %lanemask_le; mov.u32 t1, %lanemask_gt; xor.b32 d, d, t0; add.u32 d, d, t1;",
}  # fmt: skip

_GROUPED = {
    "match.any": "match.any.sync.b32 d, a, -1;",
    "match.all": "match.all.sync.b32 d|p, a, -1; selp.b32 t0, 1, 0, p; add.u32 d, d, t0;",
    "ballot": "setp.lt.u32 p, a, 2; vote.sync.ballot.b32 d, p, 0xffffffff;",
    "barrier.red.popc": "setp.lt.u32 p, a, 2; barrier.sync.aligned 0; barrier.red.popc.aligned.u32 d, 0, p;",
    "barrier.red.and": "setp.lt.u32 p, a, 5; barrier.red.and.aligned.pred z, 0, p; selp.b32 d, 1, 0, z;",
    "barrier.red.or": "setp.eq.u32 p, a, 0; barrier.red.or.aligned.pred z, 0, p; selp.b32 d, 1, 0, z;",
}


def cases() -> list[Case]:
    """All bit for bit; 64 threads a block."""
    return [
        elementwise("warp/shuffle", _SHUFFLE, _values_and_lanes, block=64),
        elementwise("warp/members", _MEMBERS, _values_and_lanes, block=64),
        elementwise("warp/grouped", _GROUPED, _small_values, block=64),
    ]

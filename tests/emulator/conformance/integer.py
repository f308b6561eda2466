"""Integer and logic instructions, predicates and comparisons."""

from __future__ import annotations

import numpy as np
from emulator.conformance.case import SPECIAL_INT, Case, combinations, elementwise, random_bits


def _words(rng: np.random.Generator) -> list[np.ndarray]:
    """(a, b, c): special words, random words, and random words with shift counts and bit positions."""
    n = 1000
    small = lambda: rng.integers(0, 70, n).astype(np.uint32)  # noqa: E731
    bits = lambda: random_bits(rng, n)  # noqa: E731
    rows = [combinations(rng, SPECIAL_INT, 3, 3000), np.stack([bits(), bits(), bits()], 1)]
    rows += [np.stack([bits(), bits(), small()], 1), np.stack([bits(), small(), small()], 1)]
    return list(np.concatenate(rows).T)


_BITS = {
    **{f"shf.{d}.{m}": f"shf.{d}.{m}.b32 d, a, b, c;" for d in "lr" for m in ("wrap", "clamp")},
    "shl": "shl.b32 d, a, c;",
    "shr.u": "shr.u32 d, a, c;",
    "shr.s": "shr.s32 d, a, c;",
    "shl64": "shl.b64 w, ab, c;",
    "shr64.s": "shr.s64 w, ab, c;",
    "shr64.u": "shr.u64 w, ab, c;",
    "prmt": "prmt.b32 d, a, b, c;",
    **{f"prmt.{m}": f"prmt.b32.{m} d, a, b, c;" for m in ("f4e", "b4e", "rc8", "ecl", "ecr", "rc16")},
    "bfe.u": "bfe.u32 d, a, b, c;",
    "bfe.s": "bfe.s32 d, a, b, c;",
    "bfe.u64": "bfe.u64 w, ab, b, c;",
    "bfi": "bfi.b32 d, a, b, c, 8;",
    "bfi.len": "bfi.b32 d, a, a, b, c;",
    "bfi.b64": "bfi.b64 w, ab, bc, c, 9;",
    "popc": "popc.b32 d, a;",
    "clz": "clz.b32 d, a;",
    "brev": "brev.b32 d, a;",
    "popc64": "popc.b64 d, ab;",
    "clz64": "clz.b64 d, ab;",
    "bfind.u": "bfind.u32 d, a;",
    "bfind.s": "bfind.s32 d, a;",
    "bfind.shiftamt": "bfind.shiftamt.u32 d, a;",
    "bmsk.clamp": "bmsk.clamp.b32 d, b, c;",
    "bmsk.wrap": "bmsk.wrap.b32 d, b, c;",
    "szext": "szext.clamp.s32 d, a, c;",
    "fns": "fns.b32 d, a, 0, 1;",
    **{
        f"lop3.{t:#04x}": f"lop3.b32 d, a, b, c, {t};"
        for t in (0xC0, 0xE8, 0x96, 0x1B, 0xCA, 0xF8, 0x80, 0xFE, 0x3C, 0x6A)
    },
    "lop3.pred": "setp.ne.u32 q, c, 0; lop3.or.b32 t0|p, a, b, c, 0x96, q;",
    "not": "not.b32 d, a;",
    "cnot": "cnot.b32 d, a;",
}

_ARITHMETIC = {
    "add": "add.u32 d, a, b;",
    "sub": "sub.s32 d, a, b;",
    "add64": "add.u64 w, ab, bc;",
    "sub64": "sub.s64 w, ab, bc;",
    "neg": "neg.s32 d, a;",
    "abs": "abs.s32 d, a;",
    "mul.lo": "mul.lo.u32 d, a, b;",
    "mul.hi.u": "mul.hi.u32 d, a, b;",
    "mul.hi.s": "mul.hi.s32 d, a, b;",
    "mad.lo": "mad.lo.s32 d, a, b, c;",
    "mad.hi.u": "mad.hi.u32 d, a, b, c;",
    "mad.hi.s": "mad.hi.s32 d, a, b, c;",
    "mul.wide.u": "mul.wide.u32 w, a, b;",
    "mul.wide.s": "mul.wide.s32 w, a, b;",
    "mad.wide.u": "mad.wide.u32 w, a, b, bc;",
    "mad.wide.s": "mad.wide.s32 w, a, b, bc;",
    "mul.lo.u64": "mul.lo.u64 w, ab, bc;",
    "mul.hi.u64": "mul.hi.u64 w, ab, bc;",
    "mul.hi.s64": "mul.hi.s64 w, ab, bc;",
    "mul.wide.u16": "mul.wide.u16 d, al, bl;",
    "mul.wide.s16": "mul.wide.s16 d, ah, bh;",
    "mul24": "mul24.lo.s32 d, a, b;",
    "min.u": "min.u32 d, a, b;",
    "min.s": "min.s32 d, a, b;",
    "max.u": "max.u32 d, a, b;",
    "max.s": "max.s32 d, a, b;",
    "min.relu": "min.relu.s32 d, a, b;",
    "min.s64": "min.s64 w, ab, bc;",
    "max.u64": "max.u64 w, ab, bc;",
    "div.u": "div.u32 d, a, b;",
    "rem.u": "rem.u32 d, a, b;",
    "div.s": "div.s32 d, a, b;",
    "rem.s": "rem.s32 d, a, b;",
    "add.cc": "add.cc.u32 t0, a, b; addc.u32 d, c, 0;",
    "sub.cc": "sub.cc.u32 t0, a, b; subc.u32 d, c, 0;",
    "add.sat": "add.sat.s32 d, a, b;",
    "sub.sat": "sub.sat.s32 d, a, b;",
    "dp4a.s": "dp4a.s32.s32 d, a, b, c;",
    "dp4a.u": "dp4a.u32.u32 d, a, b, c;",
    "sad": "sad.u32 d, a, b, c;",
    "slct": "slct.b32.s32 d, a, b, c;",
    "add.u16x2": "add.u16x2 d, a, b;",
    "min.s16x2": "min.s16x2 d, a, b;",
    "max.u16x2": "max.u16x2 d, a, b;",
}

_BOTH = "selp.b32 d, 1, 0, p; selp.b32 t0, 2, 0, q; or.b32 d, d, t0;"
_PREDICATES = {
    **{
        f"setp.{c}.{t}": f"setp.{c}.{t} p, a, b;"
        for t in ("u32", "s32")
        for c in ("eq", "ne", "lt", "le", "gt", "ge")
    },
    **{f"setp.{c}.u32": f"setp.{c}.u32 p, a, b;" for c in ("lo", "ls", "hi", "hs")},
    "setp.imm.s": "setp.lt.s32 p, a, -5;",
    "setp.imm.u": "setp.gt.u32 p, a, 0x80000000;",
    "setp.and": "setp.ne.u32 q, c, 0; setp.lt.and.s32 p, a, b, q;",
    "setp.xor.not": "setp.ne.u32 q, c, 0; setp.lt.xor.s32 p, a, b, !q;",
    "setp.s16": "setp.lt.s16 p, al, bl;",
    "setp.u64": "setp.lt.u64 p, ab, bc;",
    "setp.s64": "setp.ge.s64 p, ab, bc;",
    "setp.two": f"setp.ne.u32 z, c, 0; setp.lt.or.s32 p|q, a, b, z; {_BOTH}",
    "guarded": "setp.lt.s32 q, a, b; mov.b32 d, 7; @q add.s32 d, a, c; @!q mul.lo.s32 d, b, c;",
    "branch": "setp.lt.u32 q, a, b; mov.b32 d, c; @q bra LEFT; xor.b32 d, d, a; bra JOIN; LEFT: add.u32 d, d, b; JOIN: add.u32 d, d, 1;",
    "selp": "setp.lt.s32 q, a, b; selp.b32 d, a, c, q;",
}

_SHORT_AND_LONG = {
    "add.s16": "add.s16 h, al, bl;",
    "sub.s16": "sub.s16 h, al, bl;",
    "shr.u16": "shr.u16 h, al, c;",
    "shr.s16": "shr.s16 h, al, c;",
    "shl.b16": "shl.b16 h, al, c;",
    "and.b16": "and.b16 h, al, bh;",
    "selp.b16": "setp.eq.b16 q, al, bl; selp.b16 h, ch, cl, q;",
    "cvt.s16.s8": ".reg .b8 byte; cvt.u8.u32 byte, a; cvt.s16.s8 h, byte;",
    "mul.lo.s64": "mul.lo.s64 w, ab, bc;",
    "mad.lo.s64": "mad.lo.s64 w, ab, bc, ab;",
    "or.b64": "or.b64 w, ab, bc;",
    "xor.b64": "xor.b64 w, ab, bc;",
    "pred": "setp.lt.u32 q, a, b; setp.lt.u32 r, b, c; not.pred p, q; and.pred z, p, r; xor.pred p, z, q; or.pred p, p, z;",
    "selp.f32": ".reg .f32 f<3>; mov.b32 f0, a; mov.b32 f1, b; setp.lt.s32 q, a, c; selp.f32 f2, f0, f1, q; mov.f32 f1, f2; mov.b32 d, f1;",
}


def cases() -> list[Case]:
    """All bit for bit."""
    return [
        elementwise("integer/short_and_long", _SHORT_AND_LONG, _words),
        elementwise("integer/bits", _BITS, _words),
        elementwise("integer/arithmetic", _ARITHMETIC, _words),
        elementwise("integer/predicates", _PREDICATES, _words),
    ]

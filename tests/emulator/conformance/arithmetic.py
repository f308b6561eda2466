"""Floating-point arithmetic: fp32, fp16/bf16 (packed and scalar), comparisons, and the approximate functions."""

from __future__ import annotations

import numpy as np
from emulator.conformance.case import (
    SPECIAL_F32,
    Buffers,
    Case,
    combinations,
    elementwise,
    f32_bits,
    random_bits,
)

ROUNDINGS = ("rn", "rz", "rm", "rp")
SPECIAL_HALF = np.array(
    [0, 0x8000, 1, 0x8001, 0x3FF, 0x400, 0x3C00, 0xBC00, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E00, 0xFE00, 0x7C01, 0x7F80,
     0xFF80, 0x7FC0, 0x7F81, 0x7F7F, 0xFF7F, 0x80, 0x7F, 0x3F80, 0xBF80, 0x8080],
    np.uint32,
)  # fmt: skip


def _triples(rng: np.random.Generator) -> np.ndarray:
    """(a, b, c): special values, random bits, moderate values, and products that sit on or next to a tie of a·b+c."""
    n = 500
    moderate = [
        rng.standard_normal(n),
        rng.standard_normal(n),
        rng.standard_normal(n) * 2.0 ** rng.integers(-30, 3, n),
    ]
    c = rng.uniform(1, 2, n)
    half_ulp = 2.0**-24 * (1 + rng.choice([-1, 0, 1], n) * 2.0 ** -rng.integers(8, 24, n))
    k = rng.integers(1, 1 << 12, n) / 4096.0
    deep = [
        1 + k,
        2.0**-24 * (1 - k + rng.integers(1, 1 << 12, n) * 2.0**-23),
        c,
    ]  # (1+k)(1-k): just under the tie
    e = rng.integers(13, 24, n)
    lost_in_f64 = [
        1 + 2.0**-e,
        2.0**-24 * (1 - 2.0**-e),
        c,
    ]  # 2^-24 (1 - 2^-2e): vanishes beside c in binary64
    sign = rng.choice([-1.0, 1.0], n)
    tiny = np.stack([rng.integers(0, 1 << 25, n).astype(np.uint32), f32_bits(rng.uniform(0.5, 2, n)), random_bits(rng, n) & 0x81FFFFFF], 1)  # fmt: skip
    small = [
        2.0 ** rng.uniform(-80, -60, n),
        2.0 ** rng.uniform(-80, -60, n),
        rng.integers(0, 1 << 24, n) * 2.0**-149,
    ]
    floats = [moderate, [np.ones(n), half_ulp, c], deep, [sign * lost_in_f64[0], *lost_in_f64[1:]], small]
    return np.concatenate(
        [combinations(rng, SPECIAL_F32, 3, 3000), np.stack([random_bits(rng, n) for _ in range(3)], 1)]
        + [np.stack([f32_bits(x) for x in columns], 1) for columns in floats]
        + [tiny]
    )


def _f32(rng: np.random.Generator) -> list[np.ndarray]:
    return list(_triples(rng).T)


def _halves(rng: np.random.Generator) -> list[np.ndarray]:
    """Two 16-bit values to a word, in three columns."""
    n = 1500
    bf16 = np.stack([f32_bits(rng.standard_normal(n)) >> 16 for _ in range(3)], 1)
    f16 = rng.standard_normal((n, 3)).astype(np.float16).view(np.uint16).astype(np.uint32)
    rows = [
        combinations(rng, SPECIAL_HALF, 3, 2500),
        rng.integers(0, 65536, (n, 3)).astype(np.uint32),
        bf16,
        f16,
    ]
    x = np.concatenate(rows)
    return list((x | (np.roll(x, 1001, 0) << 16)).T)


def _wide_range(rng: np.random.Generator) -> list[np.ndarray]:
    x = np.concatenate(
        [SPECIAL_F32, random_bits(rng, 3000), f32_bits(rng.uniform(-130, 130, 2000)), f32_bits(rng.standard_normal(2000)),
         f32_bits(2.0 ** rng.uniform(-126, 127, 2000)), f32_bits(rng.uniform(1, 2, 2000)), f32_bits(np.arange(-150.0, 129.0))]
    )  # fmt: skip
    return [x, np.roll(x, 4321)]


_F32 = {
    **{
        f"{name}{z}": f"{name}{z}.f32 d, {operands};"
        for r in ROUNDINGS
        for z in ("", ".ftz")
        for name, operands in ((f"add.{r}", "a, c"), (f"mul.{r}", "a, b"), (f"fma.{r}", "a, b, c"))
    },
    "sub.rn": "sub.rn.f32 d, a, c;",
    "add.sat": "add.sat.f32 d, a, b;",
    "mul.sat": "mul.sat.f32 d, a, b;",
    "fma.sat": "fma.rn.sat.f32 d, a, b, c;",
    "fma.ftz.sat": "fma.rn.ftz.sat.f32 d, a, b, c;",
    "abs": "abs.f32 d, a;",
    "neg": "neg.f32 d, a;",
    "abs.ftz": "abs.ftz.f32 d, a;",
    "neg.ftz": "neg.ftz.f32 d, a;",
    "copysign": "copysign.f32 d, a, b;",
    **{
        f"{o}{m}": f"{o}{m}.f32 d, a, b;"
        for o in ("min", "max")
        for m in ("", ".ftz", ".NaN", ".ftz.NaN", ".xorsign.abs", ".NaN.xorsign.abs")
    },
}

_DIVISION = {
    **{f"div.{r}": f"div.{r}.f32 d, a, b;" for r in ROUNDINGS},
    **{f"{o}.{r}": f"{o}.{r}.f32 d, a;" for o in ("sqrt", "rcp") for r in ROUNDINGS},
    "div.rn.ftz": "div.rn.ftz.f32 d, a, b;",
    "rcp.rn.ftz": "rcp.rn.ftz.f32 d, a;",
    "sqrt.rn.ftz": "sqrt.rn.ftz.f32 d, a;",
}

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan")
_BOTH = "selp.b32 d, 1, 0, p; selp.b32 t0, 2, 0, q; or.b32 d, d, t0;"
_COMPARE = {
    **{f"{c}{z}": f"setp.{c}{z}.f32 p, a, b;" for c in COMPARISONS for z in ("", ".ftz")},
    "lt.and": "setp.gt.f32 q, c, 0f00000000; setp.lt.and.f32 p, a, b, q;",
    "lt.or.not": "setp.gt.f32 q, c, 0f00000000; setp.lt.or.f32 p, a, b, !q;",
    "two": f"setp.lt.f32 p|q, a, b; {_BOTH}",
    "two.and": f"setp.gt.f32 z, c, 0f00000000; setp.lt.and.f32 p|q, a, b, z; {_BOTH}",
    "set.u32": "set.lt.u32.f32 d, a, b;",
    "set.f32": "set.lt.f32.f32 d, a, b;",
    **{
        f"testp.{k}": f"testp.{k}.f32 p, a;"
        for k in ("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    },
}

_HALF = {
    **{
        f"{name}.{t}": f"{name}.{t} d, {operands};"
        for t in ("f16x2", "bf16x2")
        for name, operands in (
            ("fma.rn", "a, b, c"), ("fma.rn.relu", "a, b, c"), ("add.rn", "a, c"), ("mul.rn", "a, b"), ("sub.rn", "a, b"),
            ("neg", "a"), ("abs", "a"), ("min", "a, b"), ("max", "a, b"), ("max.NaN", "a, b"),
            ("min.NaN.xorsign.abs", "a, b"), ("max.xorsign.abs", "a, b"),
        )
    },
    "fma.ftz.f16x2": "fma.rn.ftz.f16x2 d, a, b, c;",
    "add.ftz.f16x2": "add.ftz.f16x2 d, a, b;",
    "add.sat.f16x2": "add.sat.f16x2 d, a, b;",
    "fma.sat.f16x2": "fma.rn.sat.f16x2 d, a, b, c;",
    "min.ftz.f16x2": "min.ftz.f16x2 d, a, b;",
    **{f"fma.{t}": f"fma.rn.{t} h, al, bl, cl;" for t in ("f16", "bf16")},
    **{f"max.{t}": f"max.{t} h, al, bl;" for t in ("f16", "bf16")},
    **{f"setp.lt.{t}": f"setp.lt.{t} p, al, bl;" for t in ("f16", "bf16")},
}  # fmt: skip

APPROXIMATE_ULPS = {
    "ex2": 2, "rcp": 1, "rsqrt": 2, "sqrt": 1, "tanh": 132, "div.approx": 2, "div.full": 2,
}  # fmt: skip
"""Largest distance of the hardware from the rounded value, seen on an H200 over the inputs here."""
_APPROXIMATE = {
    **{f"{o}{z}": f"{o}.approx{z}.f32 d, a;" for o in ("ex2", "rcp", "rsqrt", "sqrt") for z in ("", ".ftz")},
    "tanh": "tanh.approx.f32 d, a;",
    "div.approx": "div.approx.f32 d, a, b;",
    "div.full": "div.full.f32 d, a, b;",
    "div.full.ftz": "div.full.ftz.f32 d, a, b;",
}


_F64 = {
    **{f"{o}.rn": f"{o}.rn.f64 x, a, b;" for o in ("add", "sub", "mul", "div")},
    "fma.rn": "fma.rn.f64 x, a, b, c;",
    **{o: f"{o}.f64 x, a, b;" for o in ("min", "max")},
    **{o: f"{o}.f64 x, a;" for o in ("neg", "abs", "sqrt.rn", "rcp.rn")},
    "cvt.f32": "cvt.rn.f32.f64 f, a; mov.b32 d, f; cvt.u64.u32 x, d;",
    "cvt.f64.f32": "cvt.u32.u64 d, a; mov.b32 f, d; cvt.f64.f32 x, f;",
}
SPECIAL_F64 = np.array(
    [0, 1 << 63, 1, 1 << 52, 0x3FF0000000000000, 0xBFF8000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000,
     0xFFF0000000000000, 0x7FF8000000000000, 0xFFF8000000000123, 0x7FF0000000000001, 0xFFF4000000ABCDEF, 0x7FFFFFFFFFFFFFFF,
     0x7FFC00000000BEEF, 0x47EFFFFFE0000000],
    np.uint64,
)  # fmt: skip


def _f64_case() -> Case:
    """Binary64, with NaNs of every payload: whose is kept?"""
    body = [
        "  .reg .f64 a, b, c, x; .reg .f32 f; mul.wide.u32 w, gi, 8; mov.u32 t9, %nctaid.x; mul.lo.u32 t9, t9, 128;",
        "  add.u64 w0, in_a, w; ld.global.f64 a, [w0]; add.u64 w0, in_b, w; ld.global.f64 b, [w0];",
        "  add.u64 w0, in_c, w; ld.global.f64 c, [w0];",
    ]
    for row, text in enumerate(_F64.values()):
        text = text.replace("cvt.u64.u32 x, d;", "cvt.u64.u32 w1, d; mov.b64 x, w1;")
        text = text.replace("cvt.u32.u64 d, a;", "mov.b64 w1, a; cvt.u32.u64 d, w1;")
        body.append(
            f"  {text} mad.lo.u32 t10, t9, {row}, gi; mad.wide.u32 w7, t10, 8, out; st.global.f64 [w7], x;"
        )

    def buffers(rng: np.random.Generator) -> Buffers:
        every = np.stack(np.meshgrid(*[SPECIAL_F64] * 3, indexing="ij"), -1).reshape(-1, 3)
        values = np.stack(
            [rng.standard_normal(1020), rng.standard_normal(1020), np.exp(30 * rng.standard_normal(1020))], 1
        )
        x = rng.permutation(
            np.concatenate([every, values.view(np.uint64), rng.integers(0, 1 << 64, (4, 3), np.uint64)])
        )
        columns = np.ascontiguousarray(x.T)
        return dict(zip(("in_a", "in_b", "in_c"), columns, strict=True)) | {
            "out": np.zeros((len(_F64), len(x)), np.uint64)
        }

    return Case("arithmetic/f64", "\n".join(body), buffers, grid=(40, 1, 1), labels=tuple(_F64))


def _bound(label: str) -> int:
    return next(n for name, n in APPROXIMATE_ULPS.items() if label.startswith(name))


def cases() -> list[Case]:
    """fp32 and 16-bit arithmetic, bit for bit; approximate functions within their measured distance."""
    return [
        elementwise("arithmetic/f32", _F32, _f32),
        elementwise("arithmetic/division", _DIVISION, _f32),
        elementwise("arithmetic/compare", _COMPARE, _f32),
        elementwise("arithmetic/half", _HALF, _halves),
        _f64_case(),
        elementwise(
            "arithmetic/approximate", _APPROXIMATE, _wide_range, ulps={k: _bound(k) for k in _APPROXIMATE}
        ),
    ]

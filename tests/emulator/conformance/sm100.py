"""What sm_100 adds outside tcgen05: narrow-float and ue8m0 conversions, f32x2 arithmetic, 256-bit accesses, redux on f32.

No hardware of ours has them: conversions are compared exhaustively with ml_dtypes (and in the test with mx_core), the
rest with IEEE arithmetic in numpy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import ml_dtypes
import numpy as np
from emulator.conformance.case import SPECIAL_F32, Case, elementwise, f32_bits, near_ties, random_bits
from numpy.typing import NDArray

Words = NDArray[np.uint32]
Operation = tuple[str, Callable[[Words, Words, Words], NDArray]]  # PTX over a, b, c; the same in numpy


@dataclass(frozen=True)
class Checked:
    """An elementwise case whose rows have a model each."""

    case: Case
    models: Mapping[str, Callable[[Words, Words, Words], NDArray]]

    def wanted(self) -> dict[str, Words]:
        """Label → expected words."""
        b = self.case.inputs()
        with np.errstate(all="ignore"):
            return {
                k: np.asarray(f(b["in_a"], b["in_b"], b["in_c"])).astype(np.uint32)
                for k, f in self.models.items()
            }


def _checked(
    name: str, operations: Mapping[str, Operation], inputs: Callable[[np.random.Generator], Iterable[NDArray]]
) -> Checked:
    case = elementwise(name, {k: v[0] for k, v in operations.items()}, inputs, target="sm_100a")
    return Checked(case, {k: v[1] for k, v in operations.items()})


def _f32(x: Words) -> NDArray[np.float32]:
    return x.astype(np.uint32).view(np.float32)


def _bf16(x: NDArray) -> NDArray[np.float32]:
    """The low half-word as a value."""
    return (x.astype(np.uint32) << np.uint32(16)).view(np.float32)


# ---- conversions -----------------------------------------------------------------------------------------------------


def narrow(x: NDArray, dtype: type, *, relu: bool = False) -> NDArray[np.uint32]:
    """cvt.rn.satfinite to an ml_dtypes float: to nearest even, saturating, NaN to the type's NaN or, without one, +max."""
    x = x.astype(np.float32)
    info = ml_dtypes.finfo(dtype)
    largest = np.float32(info.max)
    has_nan = dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    codes = (
        np.clip(np.where(np.isnan(x), 0, x), -largest, largest).astype(dtype).view(np.uint8).astype(np.uint32)
    )
    if relu:
        codes = np.where(x > 0, codes, 0)
    return np.where(np.isnan(x), 0x7F if has_nan else _code(largest, dtype), codes)


def _code(value: np.float32, dtype: type) -> int:
    return int(np.array([value]).astype(dtype).view(np.uint8)[0])


def ue8m0(x: NDArray, *, up: bool) -> NDArray[np.uint32]:
    """cvt.{rz,rp}.satfinite.ue8m0x2 of |x|: the exponent rounded, 254 at most; NaN gives 255, 0 gives 0."""
    bits = x.astype(np.float32).view(np.uint32) & np.uint32(0x7FFFFFFF)
    exponent, fraction = bits >> 23, bits & np.uint32(0x7FFFFF)
    below_smallest = 0x400000  # 2^-127 is a subnormal fp32 with this fraction
    if up:
        code = exponent + (np.where(exponent == 0, fraction > below_smallest, fraction > 0)).astype(np.uint32)
    else:
        code = exponent.copy()
    return np.where(bits > 0x7F800000, 255, np.minimum(code, 254)).astype(np.uint32)


def _pair(convert: Callable[[NDArray], NDArray], width: int = 8) -> Callable[[Words, Words, Words], NDArray]:
    """First source in the upper half."""
    return lambda a, b, c: convert(_f32(a)) << width | convert(_f32(b))


def _unpack(dtype: type, width: int = 8) -> Callable[[Words, Words, Words], NDArray]:
    """Two codes in the low bits of a to f16x2; NaN codes give 0x7fff."""

    def model(a: Words, b: Words, c: Words) -> NDArray:
        out = []
        for shift in (0, width):
            codes = (a >> np.uint32(shift) & np.uint32((1 << width) - 1)).astype(np.uint8)
            codes = codes & np.uint8((1 << ml_dtypes.finfo(dtype).bits) - 1)
            half = codes.view(dtype).astype(np.float32).astype(np.float16)
            out.append(np.where(np.isnan(half), 0x7FFF, half.view(np.uint16)).astype(np.uint32))
        return out[0] | out[1] << 16

    return model


def _ue8m0_to_bf16(a: Words, b: Words, c: Words) -> NDArray:
    def one(code: NDArray) -> NDArray:
        return np.where(code == 0, 0x0040, np.where(code == 255, 0x7FFF, code << 7)).astype(np.uint32)

    return one(a & 255) | one(a >> 8 & 255) << 16


_BYTE = "mov.b16 h, {byte, 0}; cvt.u32.u16 d, h;"
E2M1, E2M3, E3M2 = ml_dtypes.float4_e2m1fn, ml_dtypes.float6_e2m3fn, ml_dtypes.float6_e3m2fn
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
_TO_NARROW: dict[str, Operation] = {
    "e4m3x2.f32": ("cvt.rn.satfinite.e4m3x2.f32 h, a, b;", _pair(lambda x: narrow(x, E4M3))),
    "e5m2x2.f32": ("cvt.rn.satfinite.e5m2x2.f32 h, a, b;", _pair(lambda x: narrow(x, E5M2))),
    "e2m3x2.f32": ("cvt.rn.satfinite.e2m3x2.f32 h, a, b;", _pair(lambda x: narrow(x, E2M3))),
    "e3m2x2.f32": ("cvt.rn.satfinite.e3m2x2.f32 h, a, b;", _pair(lambda x: narrow(x, E3M2))),
    "e2m1x2.f32": (
        ".reg .b8 byte; cvt.rn.satfinite.e2m1x2.f32 byte, a, b; cvt.u32.u8 d, byte;",
        _pair(lambda x: narrow(x, E2M1), 4),
    ),
    "ue8m0x2.rz.f32": ("cvt.rz.satfinite.ue8m0x2.f32 h, a, b;", _pair(lambda x: ue8m0(x, up=False))),
    "ue8m0x2.rp.f32": ("cvt.rp.satfinite.ue8m0x2.f32 h, a, b;", _pair(lambda x: ue8m0(x, up=True))),
    "ue8m0x2.rz.bf16x2": (
        "cvt.rz.satfinite.ue8m0x2.bf16x2 h, a;",
        lambda a, b, c: ue8m0(_bf16(a >> 16), up=False) << 8 | ue8m0(_bf16(a & 0xFFFF), up=False),
    ),
    "ue8m0x2.rp.bf16x2": (
        "cvt.rp.satfinite.ue8m0x2.bf16x2 h, a;",
        lambda a, b, c: ue8m0(_bf16(a >> 16), up=True) << 8 | ue8m0(_bf16(a & 0xFFFF), up=True),
    ),
}
_FROM_NARROW: dict[str, Operation] = {
    "f16x2.e4m3x2": ("cvt.rn.f16x2.e4m3x2 d, al;", _unpack(E4M3)),
    "f16x2.e5m2x2": ("cvt.rn.f16x2.e5m2x2 d, al;", _unpack(E5M2)),
    "f16x2.e2m3x2": ("and.b32 t0, a, 0x3f3f; cvt.u16.u32 h1, t0; cvt.rn.f16x2.e2m3x2 d, h1;", _unpack(E2M3)),
    "f16x2.e3m2x2": ("and.b32 t0, a, 0x3f3f; cvt.u16.u32 h1, t0; cvt.rn.f16x2.e3m2x2 d, h1;", _unpack(E3M2)),
    "f16x2.e2m1x2": (".reg .b8 byte; cvt.u8.u32 byte, a; cvt.rn.f16x2.e2m1x2 d, byte;", _unpack(E2M1, 4)),
    "bf16x2.ue8m0x2": ("cvt.rn.bf16x2.ue8m0x2 d, al;", _ue8m0_to_bf16),
}


def _all_bf16(rng: np.random.Generator) -> list[Words]:
    x = np.concatenate([np.arange(65536, dtype=np.uint32) << 16, near_ties(rng, 8000, 1, 0, 2), near_ties(rng, 8000, 3, -6, 8), near_ties(rng, 8000, 2, -14, 15), random_bits(rng, 8000), np.resize(SPECIAL_F32, 256)])  # fmt: skip
    x = rng.permutation(x)
    return [x[0::2], x[1::2]]


def _all_codes(_rng: np.random.Generator) -> list[Words]:
    return [np.arange(65536, dtype=np.uint32)]


# ---- arithmetic on pairs ---------------------------------------------------------------------------------------------


def _fma(a: NDArray, b: NDArray, c: NDArray) -> Words:
    """Fused, for operands whose exact result a float64 holds."""
    return (
        (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64))
        .astype(np.float32)
        .view(np.uint32)
    )


def _packed(instruction: str, model: Callable[[NDArray, NDArray, NDArray], Words]) -> dict[str, Operation]:
    """f32x2 over the pairs (a, b), (b, c), (c, a): the low and the high result."""
    setup = "mov.b64 w1, {a, b}; mov.b64 w2, {b, c}; mov.b64 w3, {c, a}; "
    text = setup + instruction
    low, high = text + " mov.b64 {d, t0}, w4;", text + " mov.b64 {t0, d}, w4;"
    return {
        f"{instruction.split()[0]}.low": (low, lambda a, b, c: model(_f32(a), _f32(b), _f32(c))),
        f"{instruction.split()[0]}.high": (high, lambda a, b, c: model(_f32(b), _f32(c), _f32(a))),
    }


_PAIRS = {
    **_packed("add.rn.f32x2 w4, w1, w2;", lambda a, b, c: (a + b).view(np.uint32)),
    **_packed("mul.rn.f32x2 w4, w1, w2;", lambda a, b, c: (a * b).view(np.uint32)),
    **_packed("fma.rn.f32x2 w4, w1, w2, w3;", _fma),
}


def _integers(rng: np.random.Generator) -> list[Words]:
    return [f32_bits(rng.integers(-4000, 4000, 4096) / 64.0) for _ in range(3)]


def _signed_floats(rng: np.random.Generator) -> list[Words]:
    return [f32_bits(rng.standard_normal(2048))]


def _redux(op: str, *, absolute: bool) -> Operation:
    def model(a: Words, b: Words, c: Words) -> NDArray:
        x = _f32(a).reshape(-1, 32)
        x = np.abs(x) if absolute else x
        return np.repeat(getattr(x, op)(1), 32).view(np.uint32)

    return f"redux.sync.{op}{'.abs' if absolute else ''}.f32 d, a, -1;", model


_REDUX = {
    f"redux.{op}{'.abs' if a else ''}": _redux(op, absolute=a) for op in ("min", "max") for a in (False, True)
}


def cases() -> list[Checked]:
    """Elementwise cases with their models."""
    return [
        _checked("sm100/to_narrow", _TO_NARROW, _all_bf16),
        _checked("sm100/from_narrow", _FROM_NARROW, _all_codes),
        _checked("sm100/f32x2", _PAIRS, _integers),
        _checked("sm100/redux", _REDUX, _signed_floats),
    ]


_WIDE = """
  mul.wide.u32 w, gi, 32; add.u64 w0, src, w; add.u64 w1, out, w;
  ld.global.v8.b32 {t0,t1,t2,t3,t4,t5,t6,t7}, [w0]; st.global.v8.b32 [w1], {t7,t6,t5,t4,t3,t2,t1,t0};"""
_WIDE_64 = """
  mul.wide.u32 w, gi, 32; add.u64 w0, src, w; add.u64 w1, out, w;
  ld.global.v4.b64 {w2,w3,w4,w5}, [w0]; st.global.v4.b64 [w1], {w5,w2,w3,w4};"""


def wide_cases() -> list[tuple[Case, Callable[[NDArray], NDArray]]]:
    """256-bit loads and stores, with the permutation that each makes of its 8 words."""
    buffers = lambda rng: {"src": random_bits(rng, 1024), "out": np.zeros(1024, np.uint32)}  # noqa: E731
    return [
        (
            Case("sm100/v8.b32", _WIDE, buffers, target="sm_100a"),
            lambda x: x.reshape(-1, 8)[:, ::-1].reshape(-1),
        ),
        (
            Case("sm100/v4.b64", _WIDE_64, buffers, target="sm_100a"),
            lambda x: np.roll(x.reshape(-1, 4, 2), 1, 1).reshape(-1),
        ),
    ]

"""Conversions: cvt between fp32, the 16-bit and 8-bit floats, tf32 and integers."""

from __future__ import annotations

import numpy as np
from emulator.conformance.case import SPECIAL_F32, Case, elementwise, f32_bits, near_ties, random_bits

ROUND_TO_INT = ("rni", "rzi", "rmi", "rpi")


def _every_bf16(rng: np.random.Generator) -> list[np.ndarray]:
    """Pairs of fp32 words: every bf16 pattern, and words around the ties of the narrow formats."""
    x = np.concatenate(
        [np.arange(65536, dtype=np.uint32) << 16, near_ties(rng, 12000, 3, -6, 8), near_ties(rng, 6000, 2, -14, 15),
         near_ties(rng, 6000, 7, -126, 127), near_ties(rng, 6000, 10, -14, 15), np.resize(SPECIAL_F32, 512)]
    )  # fmt: skip
    x = rng.permutation(x)
    return [x[0::2], x[1::2]]


def _floats(rng: np.random.Generator) -> list[np.ndarray]:
    x = np.concatenate(
        [SPECIAL_F32, random_bits(rng, 2500), near_ties(rng, 1500, 7, -126, 127), near_ties(rng, 1500, 10, -14, 15), near_ties(rng, 1500, 3, -6, 8)]
    )  # fmt: skip
    return [x, np.roll(x, 977)]


def _floats_for_integers(rng: np.random.Generator) -> list[np.ndarray]:
    return [
        np.concatenate(
            [SPECIAL_F32, random_bits(rng, 1500), f32_bits(rng.uniform(-70000, 70000, 1000)), f32_bits(rng.integers(-300, 300, 600) / 2.0),
             f32_bits(rng.uniform(-5e9, 5e9, 600)), f32_bits(rng.uniform(-3e19, 3e19, 600))]
        )
    ]  # fmt: skip


def _integers(rng: np.random.Generator) -> list[np.ndarray]:
    small = np.arange(300, dtype=np.uint32)
    x = np.concatenate(
        [
            random_bits(rng, 2500),
            rng.integers(0, 1 << 26, 1000).astype(np.uint32),
            small,
            0 - small,
            SPECIAL_F32,
        ]
    )
    return [x, np.roll(x, 333)]


def _every_half(_rng: np.random.Generator) -> list[np.ndarray]:
    x = np.arange(65536, dtype=np.uint32)
    return [x | (np.roll(x, 12345) << 16)]


_PACKED = {
    "e4m3x2.f32": "cvt.rn.satfinite.e4m3x2.f32 h, a, b;",
    "e5m2x2.f32": "cvt.rn.satfinite.e5m2x2.f32 h, a, b;",
    "bf16x2.f32": "cvt.rn.bf16x2.f32 d, a, b;",
    "f16x2.f32": "cvt.rn.f16x2.f32 d, a, b;",
}

_FROM_F32 = {
    "e4m3x2.relu": "cvt.rn.satfinite.relu.e4m3x2.f32 h, a, b;",
    "e5m2x2.relu": "cvt.rn.satfinite.relu.e5m2x2.f32 h, a, b;",
    "bf16x2.relu": "cvt.rn.relu.bf16x2.f32 d, a, b;",
    "f16x2.relu": "cvt.rn.relu.f16x2.f32 d, a, b;",
    "bf16x2.rz": "cvt.rz.bf16x2.f32 d, a, b;",
    "f16x2.rz": "cvt.rz.f16x2.f32 d, a, b;",
    "bf16.rn": "cvt.rn.bf16.f32 h, a;",
    "bf16.rz": "cvt.rz.bf16.f32 h, a;",
    **{f"f16.{r}": f"cvt.{r}.f16.f32 h, a;" for r in ("rn", "rz", "rm", "rp")},
    "f16.ftz": "cvt.rn.ftz.f16.f32 h, a;",
    "f16.sat": "cvt.rn.sat.f16.f32 h, a;",
    "tf32.rna": "cvt.rna.tf32.f32 d, a;",
    "tf32.rn": "cvt.rn.tf32.f32 d, a;",
    "tf32.rz": "cvt.rz.tf32.f32 d, a;",
    **{f"f32.{r}": f"cvt.{r}.f32.f32 d, a;" for r in ROUND_TO_INT},
    "f32.sat": "cvt.sat.f32.f32 d, a;",
    "f32.ftz": "cvt.ftz.f32.f32 d, a;",
    "f32.rni.ftz": "cvt.rni.ftz.f32.f32 d, a;",
}

_TO_INTEGER = {
    **{
        f"{t}.{r}{z}": f"cvt.{r}{z}.{t}.f32 d, a;"
        for t in ("s32", "u32")
        for r in ROUND_TO_INT
        for z in ("", ".ftz")
    },
    "s16.rni": "cvt.rni.s16.f32 h, a;",
    "u16.rzi": "cvt.rzi.u16.f32 h, a;",
    "s8.rni": "cvt.rni.s8.f32 d, a;",
    "u8.rni.sat": "cvt.rni.sat.u8.f32 d, a;",
    "s64.rzi": "cvt.rzi.s64.f32 w, a;",
    "u64.rni": "cvt.rni.u64.f32 w, a;",
}

_FROM_INTEGER = {
    "f32.s32": "cvt.rn.f32.s32 d, a;",
    "f32.u32": "cvt.rn.f32.u32 d, a;",
    "f32.s32.rz": "cvt.rz.f32.s32 d, a;",
    "f32.u32.rp": "cvt.rp.f32.u32 d, a;",
    "f32.s32.rm": "cvt.rm.f32.s32 d, a;",
    "f16.s32": "cvt.rn.f16.s32 h, a;",
    "bf16.s32": "cvt.rn.bf16.s32 h, a;",
    "f32.s16": "cvt.rn.f32.s16 d, al;",
    "f32.u64": "cvt.rn.f32.u64 d, ab;",
    "f32.s64": "cvt.rn.f32.s64 d, ab;",
    "s32.s16": "cvt.s32.s16 d, al;",
    "u32.u16": "cvt.u32.u16 d, ah;",
    "s16.s32.sat": "cvt.sat.s16.s32 h, a;",
    "u8.s32.sat": "cvt.sat.u8.s32 d, a;",
    "s8.s32.sat": "cvt.sat.s8.s32 d, a;",
    "s32.u32.sat": "cvt.sat.s32.u32 d, a;",
    "u32.s32.sat": "cvt.sat.u32.s32 d, a;",
    "s8.s32": "cvt.s8.s32 d, a;",
    "s64.s32": "cvt.s64.s32 w, a;",
    "u64.u32": "cvt.u64.u32 w, a;",
    "u32.u64": "cvt.u32.u64 d, ab;",
    "s32.s64.sat": "cvt.sat.s32.s64 d, ab;",
}

_FROM_HALF = {
    "f16x2.e4m3x2": "cvt.rn.f16x2.e4m3x2 d, al;",
    "f16x2.e5m2x2": "cvt.rn.f16x2.e5m2x2 d, al;",
    "f16x2.e4m3x2.relu": "cvt.rn.relu.f16x2.e4m3x2 d, al;",
    "f32.f16": "cvt.f32.f16 d, al;",
    "f32.bf16": "cvt.f32.bf16 d, al;",
    "f32.f16.ftz": "cvt.ftz.f32.f16 d, al;",
    "e4m3x2.f16x2": "cvt.rn.satfinite.e4m3x2.f16x2 h, a;",
    "e5m2x2.f16x2": "cvt.rn.satfinite.e5m2x2.f16x2 h, a;",
    "e4m3x2.f16x2.relu": "cvt.rn.satfinite.relu.e4m3x2.f16x2 h, a;",
    "s32.f16.rni": "cvt.rni.s32.f16 d, al;",
    "s32.bf16.rni": "cvt.rni.s32.bf16 d, al;",
    "f16.rni": "cvt.rni.f16.f16 h, al;",
    "bf16.f16": "cvt.rn.bf16.f16 h, al;",
    "f16.bf16": "cvt.rn.f16.bf16 h, al;",
    "f32.e4m3": "cvt.rn.f16x2.e4m3x2 t0, al; mov.b32 {h1, h2}, t0; cvt.f32.f16 d, h1;",
}


def cases() -> list[Case]:
    """Every conversion of sm_90 that the project's kernels or the DSL emit, and their neighbours."""
    return [
        elementwise("conversions/packed", _PACKED, _every_bf16),
        elementwise("conversions/from_f32", _FROM_F32, _floats),
        elementwise("conversions/to_integer", _TO_INTEGER, _floats_for_integers),
        elementwise("conversions/from_integer", _FROM_INTEGER, _integers),
        elementwise("conversions/from_half", _FROM_HALF, _every_half),
    ]

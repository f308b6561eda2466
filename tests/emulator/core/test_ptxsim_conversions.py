"""Conversions, exhaustive or at every boundary, against ml_dtypes, mx_core and exact arithmetic."""

from __future__ import annotations

from fractions import Fraction

import ml_dtypes
import mx_core
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ptxsim.core import convert, floats

BF16 = np.arange(1 << 16, dtype=np.uint32) << 16
"""Every bf16 value, as f32 bits."""
FORMATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
MX = {"e4m3": mx_core.MXFP8_E4M3, "e5m2": mx_core.MXFP8_E5M2, "e2m1": mx_core.MXFP4_E2M1, "e3m2": mx_core.MXFP6_E3M2, "e2m3": mx_core.MXFP6_E2M3}  # fmt: skip


def lanes(bits):
    """In pieces of 32."""
    bits = np.asarray(bits, np.uint64)
    return np.pad(bits, (0, -len(bits) % 32)).reshape(-1, 32)


def boundary_values(ty):
    """Every code, every midpoint, and their f32 neighbours."""
    mantissa, min_exponent, largest, _, _ = convert.NARROW[ty]
    grid = np.unique(
        np.concatenate(
            [np.arange(2 ** (mantissa + 2)) * 2.0 ** (e - mantissa - 1) for e in range(min_exponent, 18)]
        )
    )
    grid = grid[grid <= 2 * largest].astype(np.float32)
    around = np.concatenate([grid, np.nextafter(grid, np.float32(0)), np.nextafter(grid, np.float32(1e9))])
    return np.concatenate([around, -around]).view(np.uint32)


@pytest.mark.parametrize("ty", list(MX))
def test_narrow_codes_equal_mx_core(ty):
    bits = np.concatenate([BF16, boundary_values(ty)])
    x = bits.view(np.float32)
    finite = np.isfinite(x)
    ours = convert.narrow_codes(x, ty, relu=False)
    theirs = mx_core.encode(torch.from_numpy(x[finite].copy()), MX[ty]).numpy()
    assert (ours[finite] == theirs).all()


@pytest.mark.parametrize("ty", ["e4m3", "e5m2"])
def test_nan_and_relu(ty):
    x = np.array([np.nan, -np.nan, np.inf, -np.inf, -0.0, -3.0], np.float32)
    top = {"e4m3": 0x7E, "e5m2": 0x7B}[ty]
    assert convert.narrow_codes(x, ty, relu=False).tolist()[:5] == [0x7F, 0x7F, top, 0x80 | top, 0x80]
    assert convert.narrow_codes(x, ty, relu=True).tolist() == [0x7F, 0x7F, top, 0, 0, 0]


@pytest.mark.parametrize(
    ("src", "dtype"), [("e4m3x2", ml_dtypes.float8_e4m3fn), ("e5m2x2", ml_dtypes.float8_e5m2)]
)
def test_widening_is_exact(src, dtype):
    codes = np.arange(1 << 16, dtype=np.uint64)
    got = np.concatenate([convert.unpack_narrow("f16x2", src, False, piece) for piece in lanes(codes)])
    for shift, half in ((0, got & np.uint64(0xFFFF)), (8, got >> np.uint64(16))):
        want = (
            (codes >> np.uint64(shift) & np.uint64(255))
            .astype(np.uint8)
            .view(dtype)
            .astype(np.float16)
            .view(np.uint16)
        )
        want = np.where(np.isnan(want.view(np.float16)), 0x7FFF, want)
        assert (half == want).all()


def test_bf16_rounding_of_every_half_way_case():
    high = np.arange(1 << 16, dtype=np.uint64) << np.uint64(16)
    for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = high | np.uint64(low)
        got = np.concatenate([convert.nearest_bf16(piece) for piece in lanes(bits)])
        want = (bits + np.uint64(0x7FFF) + (bits >> np.uint64(16) & np.uint64(1))) >> np.uint64(16)
        nan = np.isnan(bits.astype(np.uint32).view(np.float32))
        assert (got == np.where(nan, np.uint64(0x7FFF), want)).all()
        generic = floats.from_float(
            floats.round_to(bits.astype(np.uint32).view(np.float32).astype(np.float64), "bf16", "rn"),
            "bf16",
            False,
        )
        assert (got == generic).all()


def test_e8m0_rounds_up_or_down():
    """ue8m0: the power of two at or above (rp) or below (rz); compared with the exponent arithmetic of the definition."""
    x = BF16.view(np.float32)
    for up in (False, True):
        got = convert.to_e8m0(x, up)
        for i in range(0, 1 << 15, 97):  # positive values
            value = float(x[i])
            if not np.isfinite(value):
                continue
            code = int(got[i])
            if value == 0:
                assert code == 0
            elif up:
                assert Fraction(value) <= Fraction(2) ** (code - 127) or code == 254
                assert code == 0 or Fraction(value) > Fraction(2) ** (code - 128)
            else:
                assert code == 0 or Fraction(2) ** (code - 127) <= Fraction(value) < Fraction(2) ** (
                    code - 126
                )
    assert convert.to_e8m0(np.array([np.nan, np.inf], np.float32), True).tolist() == [255, 254]


def test_e8m0_widens_exactly():
    codes = np.arange(256, dtype=np.uint64)
    got = np.concatenate([convert.unpack_e8m0(piece | piece << np.uint64(8)) for piece in lanes(codes)])
    want = mx_core.e8m0_to_float(torch.arange(256, dtype=torch.uint8), torch.bfloat16).float().numpy()
    values = ((got & np.uint64(0xFFFF)) << np.uint64(16)).astype(np.uint32).view(np.float32)
    assert (values[:255] == want[:255]).all()
    assert int(got[255]) == 0x7FFF7FFF


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("dst", ["s32", "u32", "s16", "u8", "s64"])
def test_float_to_int_saturates(mode, dst):
    x = np.array([0.5, 1.5, -0.5, -1.5, 2.5, 1e30, -1e30, 127.5, 65535.5, -32768.5], np.float32)
    got = convert.float_to_int(
        dst, "f32", mode, False, 64, np.pad(x.view(np.uint32), (0, 22)).astype(np.uint64)
    )[:10]
    width = int(dst[1:])
    low, high = (-(2 ** (width - 1)), 2 ** (width - 1) - 1) if dst[0] == "s" else (0, 2**width - 1)
    rounder = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode]
    want = [min(max(int(rounder(float(v))), low), high) & (2**64 - 1) for v in x]
    assert got.tolist() == want


def exact_round(x: Fraction, mode: str) -> float:
    """A fraction to binary32, by definition; no overflow."""
    if x == 0:
        return 0.0
    e = -149
    while abs(x) >= Fraction(2) ** (e + 24):
        e += 1
    q = x / Fraction(2) ** e
    floor = q.numerator // q.denominator
    rest = q - floor
    if mode == "rn":
        n = floor + (rest > Fraction(1, 2) or (rest == Fraction(1, 2) and floor % 2))
    else:
        n = {"rm": floor, "rp": floor + (rest > 0), "rz": floor + (rest > 0 and x < 0)}[mode]
    return float(Fraction(n) * Fraction(2) ** e)


bits32 = st.integers(0, (1 << 32) - 1)


@settings(max_examples=300, deadline=None)
@given(
    bits32,
    bits32,
    bits32,
    st.sampled_from(["rn", "rz", "rm", "rp"]),
    st.sampled_from(["add", "mul", "fma", "div"]),
)
def test_f32_arithmetic_rounds_once(a, b, c, mode, op):
    x, y, z = (float(np.uint32(v).view(np.float32)) for v in (a, b, c))
    if not all(map(np.isfinite, (x, y, z))) or (op == "div" and y == 0):
        return
    exact = {
        "add": lambda: Fraction(x) + Fraction(y),
        "mul": lambda: Fraction(x) * Fraction(y),
        "fma": lambda: Fraction(x) * Fraction(y) + Fraction(z),
        "div": lambda: Fraction(x) / Fraction(y),
    }[op]()
    if abs(exact) >= Fraction(2) ** 127:
        return
    args = (a, b, c)[: 3 if op == "fma" else 2]
    got = float(np.uint32(floats.arithmetic(op, "f32", mode, "", *args)).view(np.float32))
    assert got == exact_round(exact, mode)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 0xFFFF), st.integers(0, 0xFFFF), st.integers(0, 0xFFFF), st.sampled_from(["f16", "bf16"])
)
def test_half_fma_rounds_once(a, b, c, ty):
    dtype = np.float16 if ty == "f16" else ml_dtypes.bfloat16
    x, y, z = (float(np.uint16(v).view(dtype)) for v in (a, b, c))
    if not all(map(np.isfinite, (x, y, z))):
        return
    exact = Fraction(x) * Fraction(y) + Fraction(z)
    got = float(np.uint16(floats.arithmetic("fma", ty, "rn", "", a, b, c)).view(dtype))
    if not np.isfinite(got):
        assert abs(exact) > Fraction(float(ml_dtypes.finfo(dtype).max))
        return
    for direction in (-np.inf, np.inf):
        if abs(got) == float(ml_dtypes.finfo(dtype).max):
            return
        neighbour = float(
            np.nextafter(
                np.uint16(floats.arithmetic("fma", ty, "rn", "", a, b, c)).view(dtype), dtype(direction)
            )
        )
        assert abs(exact - Fraction(got)) <= abs(exact - Fraction(neighbour))

"""Element codes: every code, every rounding boundary, the outside codecs, and packing."""

import math

import gfloat
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mx_core import (
    FORMATS,
    MXFP4_E2M1,
    MXFP6_E2M3,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    ElementFormat,
    decode,
    encode,
)
from mx_core import pack as pack_codes
from mx_core import unpack as unpack_codes
from mx_core.codec import from_storage, packed_size, storage_dtype, to_storage
from support import oracle
from support.outside import GFLOAT, ML_DTYPES
from torch import Tensor

ALL = pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)


def all_codes(format: ElementFormat) -> Tensor:
    return torch.arange(1 << format.bits, dtype=torch.uint8)


def boundary_values(format: ElementFormat) -> Tensor:
    """fp32: every value, every midpoint between neighbours, and the 3 fp32 values on both sides of each; signed."""
    values = torch.tensor(oracle.magnitudes(format.name), dtype=torch.float64)
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, values[-1:] * 1.5]).to(torch.float32)
    bits = points.view(torch.int32)[:, None] + torch.arange(-3, 4)
    magnitudes = bits[bits >= 0].to(torch.int32).view(torch.float32)
    return torch.cat([magnitudes, -magnitudes])


def oracle_codes(x: Tensor, format: ElementFormat) -> list[int]:
    return [
        oracle.encode(oracle.abs_value(bits), bool(bits >> 31), format.name)
        for bits in (x.view(torch.int32).to(torch.int64) & 0xFFFF_FFFF).tolist()
    ]


@ALL
def test_every_code_round_trips(format: ElementFormat) -> None:
    codes = all_codes(format)
    values = decode(codes, format)
    np.testing.assert_array_equal(values.numpy(), np.array(format.values, np.float32))
    produced = codes[values.isfinite()]
    if format is MXINT8:
        produced = produced[produced != 0x80]
    assert torch.equal(encode(decode(produced, format), format), produced)
    assert torch.equal(decode(codes, format, torch.float64).float().nan_to_num(), values.nan_to_num())


@ALL
def test_rounding_at_every_boundary(format: ElementFormat) -> None:
    x = boundary_values(format)
    assert encode(x, format).tolist() == oracle_codes(x, format)


@ALL
def test_rounding_of_all_bfloat16(format: ElementFormat) -> None:
    """All finite bf16 values, against the exact oracle."""
    x = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    x = x[x.isfinite()]
    assert encode(x, format).tolist() == oracle_codes(x.float(), format)


@pytest.mark.parametrize("name", ML_DTYPES)
def test_same_as_ml_dtypes(name: str) -> None:
    """ml_dtypes rounds to nearest even; it does not saturate, so only values up to max are compared."""
    format = FORMATS[name]
    x = torch.cat([boundary_values(format), torch.randn(20_000) * format.max_value / 3])
    x = x[x.abs() <= format.max_value]
    assert encode(x, format).tolist() == x.numpy().astype(ML_DTYPES[name]).view(np.uint8).tolist()


@ALL
def test_same_as_gfloat(format: ElementFormat) -> None:
    """gfloat rounds to nearest even and saturates; all the finite boundaries, both signs."""
    x = boundary_values(format)
    info = GFLOAT[format.name]
    rounded = [
        gfloat.round_float(info, v, gfloat.RoundMode.TiesToEven, sat=True)
        for v in x.tolist()
        if v > -1.99 or format is not MXINT8
    ]
    x = x if format is not MXINT8 else x[x > -1.99]
    theirs = [gfloat.encode_float(info, v) for v in rounded]
    assert encode(x, format).tolist() == theirs


@pytest.mark.parametrize(
    ("format", "dtype"), [(MXFP8_E4M3, torch.float8_e4m3fn), (MXFP8_E5M2, torch.float8_e5m2)]
)
def test_same_as_torchs_cast(format: ElementFormat, dtype: torch.dtype) -> None:
    x = torch.cat([boundary_values(format), torch.randn(20_000) * format.max_value / 3])
    x = x[x.abs() <= format.max_value]
    assert torch.equal(encode(x, format), x.to(dtype).view(torch.uint8))


@ALL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_specials(format: ElementFormat, dtype: torch.dtype) -> None:
    x = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0], dtype=dtype)
    top, sign = format.max_code, format.sign_bit
    if format.twos_complement:
        assert encode(x, format).tolist() == [0, 0, 0x7F, 0x81, 0, 0]
    else:
        assert encode(x, format).tolist() == [format.nan_code, format.nan_code, top, top | sign, 0, sign]


@ALL
def test_every_nan_pattern(format: ElementFormat) -> None:
    bits = torch.tensor([0x7F80_0001, 0x7FC0_0000, 0x7FFF_FFFF], dtype=torch.int32)
    x = torch.cat([bits, bits | -(1 << 31)]).view(torch.float32)
    assert encode(x, format).unique().tolist() == [format.nan_code]


@ALL
def test_mxint8_never_produces_0x80_nor_fp_formats_inf(format: ElementFormat) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (200_000,)).to(torch.int32)
    codes = encode(bits.view(torch.float32), format)
    magnitude = codes & (format.sign_bit - 1)
    if format is MXINT8:
        assert 0x80 not in codes.tolist()
    else:
        assert set(magnitude[magnitude > format.max_code].tolist()) <= {format.nan_code}


@ALL
@given(n=st.integers(0, 70), rows=st.integers(0, 3), seed=st.integers(0, 1000))
def test_packing_round_trips(format: ElementFormat, n: int, rows: int, seed: int) -> None:
    codes = torch.randint(0, 1 << format.bits, (rows, n), generator=torch.Generator().manual_seed(seed)).to(
        torch.uint8
    )
    packed = pack_codes(codes, format)
    assert packed.shape == (rows, packed_size(n, format))
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_codes(packed, format, n), codes)
    # Read back by the definition: one little-endian integer per row.
    for row, octets in zip(codes.tolist(), packed.tolist(), strict=True):
        word = int.from_bytes(bytes(octets), "little")
        assert [(word >> (format.bits * i)) & ((1 << format.bits) - 1) for i in range(n)] == row
        assert word >> (format.bits * n) == 0


def test_packing_by_hand() -> None:
    assert pack_codes(torch.tensor([0x1, 0x2, 0x3], dtype=torch.uint8), MXFP4_E2M1).tolist() == [0x21, 0x03]
    codes = torch.tensor([0b000001, 0b000010, 0b000011, 0b100000], dtype=torch.uint8)
    assert pack_codes(codes, MXFP6_E2M3).tolist() == [0b10_000001, 0b0011_0000, 0b100000_00]


def test_fp4_packing_is_ml_dtypes_nibble_order() -> None:
    """torch.float4_e2m1fn_x2 and the hardware take the first value in the low nibble."""
    values = torch.tensor([0.5, 6.0, -1.0, 3.0])
    codes = values.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    packed = pack_codes(encode(values, MXFP4_E2M1), MXFP4_E2M1)
    assert packed.tolist() == [codes[0] | codes[1] << 4, codes[2] | codes[3] << 4]


@ALL
def test_storage(format: ElementFormat) -> None:
    codes = torch.randint(0, 1 << format.bits, (3, 64)).to(torch.uint8)
    data = to_storage(codes, format)
    assert data.dtype == storage_dtype(format)
    assert torch.equal(from_storage(data, format, 64), codes)
    with pytest.raises(TypeError, match="data: expected torch"):
        from_storage(data.view(torch.uint8).to(torch.int32), format, 64)


def test_errors() -> None:
    with pytest.raises(
        TypeError, match=r"x: expected torch.float32 or torch.bfloat16 or torch.float16, got torch.float64"
    ):
        encode(torch.zeros(1, dtype=torch.float64), MXFP8_E4M3)
    with pytest.raises(TypeError, match=r"codes: expected torch.uint8, got torch.int64"):
        decode(torch.zeros(1, dtype=torch.int64), MXFP8_E4M3)
    with pytest.raises(ValueError, match="packed: expected 3 bytes in the last axis, got 4"):
        unpack_codes(torch.zeros(4, dtype=torch.uint8), MXFP4_E2M1, 5)

"""Element codes: fp32 to codes, codes to fp32, and codes packed into bytes.

All formats go through one encoder and one decoder, which read what they need from the ElementFormat.
"""

import functools
import math

import torch
from torch import Tensor
from torch.nn.functional import pad

from mx_core.checks import check_dtype, expected
from mx_core.formats import FP32_FRACTION_BITS, MXFP8_E4M3, MXFP8_E5M2, MXINT8, ElementFormat
from mx_core.static import static_format

_INF_BITS = 0x7F80_0000

_STORAGE_DTYPES = {  # by name: torch.compile takes strings for constants, and would hash a format field by field
    MXFP8_E4M3.name: torch.float8_e4m3fn,
    MXFP8_E5M2.name: torch.float8_e5m2,
    MXINT8.name: torch.int8,
}


def encode(x: Tensor, format: ElementFormat) -> Tensor:
    """Round to the nearest code: ties to even, saturating (Inf too), the sign of zero kept.

    Args:
        x: any shape; float32, bfloat16 or float16. float64 is refused: rounding it to fp32 first would
            round twice.
        format: the element format.

    Returns:
        uint8 of x's shape, one code per value, in the low `format.bits` bits. NaN gives
        `format.nan_code`. MXINT8 is two's complement; its code 0x80 is never produced.
    """
    check_dtype("x", x, torch.float32, torch.bfloat16, torch.float16)
    format = static_format(format)
    m = format.mantissa_bits
    min_normal = format.min_normal_bits
    bits = x.detach().to(torch.float32).view(torch.int32)
    magnitude = bits & 0x7FFF_FFFF
    is_nan = (_INF_BITS - magnitude) >> 31  # all ones, or 0; several times faster than torch.where
    magnitude.clamp_(max=format.max_value_bits)
    # The quantum, the distance between neighbouring codes, is 2^(E - m) from the smallest normal exponent
    # up and 2^(emin - m) below. Adding 2^(23 + E - m), whose own last bit is worth one quantum, makes fp32
    # addition round |x| to a whole number of quanta, ties to even.
    exponent = (magnitude & _INF_BITS).clamp_(min=min_normal)
    magic = exponent + ((FP32_FRACTION_BITS - m) << FP32_FRACTION_BITS)
    quanta = magnitude.view(torch.float32).add_(magic.view(torch.float32)).view(torch.int32).sub_(magic)
    # A normal value has 2^m or more quanta, so its implicit one steps the exponent field from 0 to 1.
    code = exponent.sub_(min_normal).bitwise_right_shift_(FP32_FRACTION_BITS - m).add_(quanta)
    if format.twos_complement:
        negative = bits >> 31
        code = code.bitwise_xor_(negative).sub_(negative)
    else:
        code |= (bits >> (32 - format.bits)).bitwise_and_(format.sign_bit)
    code &= ~is_nan
    code |= is_nan.bitwise_and_(format.nan_code)
    return code.to(torch.uint8)


def decode(codes: Tensor, format: ElementFormat, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values of codes, exactly.

    Args:
        codes: uint8, any shape, one code per value (what `encode` and `unpack` return).
        format: the element format.
        dtype: torch.float32 or torch.float64.
    """
    check_dtype("codes", codes, torch.uint8)
    own = storage_dtype(format)
    if own.is_floating_point:
        return codes.view(own).to(dtype)  # no table to bring to the device, for which a GPU's host would wait
    table = torch.tensor(static_format(format).values, dtype=dtype, device=codes.device)
    return table.index_select(0, codes.reshape(-1).to(torch.int32)).reshape(codes.shape)


def packed_size(n: int, format: ElementFormat) -> int:
    """Bytes that `n` values take along the packed axis."""
    values, size = _packing(format)
    return -(-n // values) * size


def pack(codes: Tensor, format: ElementFormat) -> Tensor:
    """Pack codes along the last axis: two FP4 to a byte, four FP6 to three bytes, 8-bit formats as they are.

    Little-endian: the first value sits in the lowest bits. Code 0 fills up an incomplete last group.

    Args:
        codes: uint8 (..., n), one code per value.
        format: the element format.

    Returns:
        uint8 (..., packed_size(n, format)).
    """
    check_dtype("codes", codes, torch.uint8)
    values, size = _packing(format)
    if values == 1:
        return codes
    bits = static_format(format).bits
    padded = pad(codes, (0, -codes.shape[-1] % values)).to(torch.int32)
    word = _join([padded[..., i::values] << (bits * i) for i in range(values)])
    return torch.stack([word >> (8 * i) & 0xFF for i in range(size)], dim=-1).flatten(-2).to(torch.uint8)


def unpack(packed: Tensor, format: ElementFormat, n: int) -> Tensor:
    """The codes of packed values; the inverse of `pack`.

    Args:
        packed: uint8 (..., packed_size(n, format)).
        format: the element format.
        n: how many values the last axis holds.

    Returns:
        uint8 (..., n), one code per value.
    """
    check_dtype("packed", packed, torch.uint8)
    if packed.shape[-1] != packed_size(n, format):
        raise ValueError(
            expected("packed", f"{packed_size(n, format)} bytes in the last axis", packed.shape[-1])
        )
    values, size = _packing(format)
    if values == 1:
        return packed
    bits = static_format(format).bits
    octets = packed.to(torch.int32)
    word = _join([octets[..., i::size] << (8 * i) for i in range(size)])
    mask = (1 << bits) - 1
    codes = torch.stack([word >> (bits * i) & mask for i in range(values)], dim=-1)
    return codes.flatten(-2)[..., :n].to(torch.uint8)


def to_storage(codes: Tensor, format: ElementFormat) -> Tensor:
    """Codes as MXTensor keeps them: packed, in the format's torch dtype where there is one.

    float8_e4m3fn, float8_e5m2 and int8; packed uint8 for FP6 and FP4.
    """
    return pack(codes, format).view(storage_dtype(format))


def from_storage(data: Tensor, format: ElementFormat, n: int) -> Tensor:
    """The uint8 codes, `n` along the last axis, of what `to_storage` returned."""
    check_dtype("data", data, storage_dtype(format))
    return unpack(data.view(torch.uint8), format, n)


def storage_dtype(format: ElementFormat) -> torch.dtype:
    """The torch dtype of element data."""
    return _STORAGE_DTYPES.get(format.name, torch.uint8)


def _packing(format: ElementFormat) -> tuple[int, int]:
    """(values, bytes) of the smallest group that fills whole bytes: (1, 1), (2, 1) or (4, 3)."""
    bits = static_format(format).bits
    values = 8 // math.gcd(bits, 8)
    return values, values * bits // 8


def _join(parts: list[Tensor]) -> Tensor:
    """Bitwise or of disjoint bit fields."""
    return functools.reduce(torch.bitwise_or, parts)

"""MX (microscaling) formats and the exact math that kernels are tested against; plain torch, any device."""

from mx_core import checks, groups, metrics, reference
from mx_core.codec import decode, encode, pack, unpack
from mx_core.formats import (
    BLOCK_SIZE,
    FORMATS,
    MXFP4_E2M1,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    ElementFormat,
    RowMap,
    ScaleLayout,
    ScaleRounding,
)
from mx_core.metrics import QuantizationError, quantization_error
from mx_core.quantize import dequantize, quantize
from mx_core.scale_layout import from_blocked, to_blocked
from mx_core.scaling import amax_to_e8m0, e8m0_to_float
from mx_core.tensor import MXTensor, mx_equal

__all__ = [
    "BLOCK_SIZE",
    "FORMATS",
    "MXFP4_E2M1",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "MXINT8",
    "ElementFormat",
    "MXTensor",
    "QuantizationError",
    "RowMap",
    "ScaleLayout",
    "ScaleRounding",
    "amax_to_e8m0",
    "checks",
    "decode",
    "dequantize",
    "e8m0_to_float",
    "encode",
    "from_blocked",
    "groups",
    "metrics",
    "mx_equal",
    "pack",
    "quantization_error",
    "quantize",
    "reference",
    "to_blocked",
    "unpack",
]

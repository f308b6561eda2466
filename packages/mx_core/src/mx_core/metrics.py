"""How much a quantisation loses."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mx_core.checks import check_shape
from mx_core.codec import to_storage
from mx_core.quantize import dequantize
from mx_core.tensor import MXTensor


@dataclass(frozen=True)
class QuantizationError:
    """What `quantization_error` measures.

    Attributes:
        sqnr_db: signal to quantisation noise, 10 log10(sum x^2 / sum (x - q)^2), in dB; inf if exact.
        underflow: fraction of all elements that were not 0 and became 0.
        saturation: fraction of all elements beyond the largest value of their block.
    """

    sqnr_db: float
    underflow: float
    saturation: float


def quantization_error(x: Tensor, mx: MXTensor) -> QuantizationError:
    """The error of `mx` as a quantisation of `x`. Reads the device.

    Args:
        x: the tensor that was quantised; float32, bfloat16 or float16.
        mx: what it became.

    A NaN or an Inf in x makes sqnr_db NaN: a bad value shows. Fractions of an empty tensor are 0.
    """
    check_shape("x", x, *mx.shape)
    exact = x.detach().to(torch.float64)
    restored = dequantize(mx, torch.float64)
    signal = exact.square().sum().item()
    noise = (exact - restored).square().sum().item()
    underflow = ((restored == 0) & (exact != 0)).sum().item()
    largest = dequantize(_with_largest_codes(mx), torch.float64)
    saturation = (exact.abs() > largest).sum().item()
    count = max(x.numel(), 1)
    return QuantizationError(_decibels(signal, noise), underflow / count, saturation / count)


def _with_largest_codes(mx: MXTensor) -> MXTensor:
    """`mx` with every element at its block's largest value."""
    codes = torch.full(mx.shape, mx.format.max_code, dtype=torch.uint8, device=mx.device)
    return dataclasses.replace(mx, data=to_storage(codes, mx.format))


def _decibels(signal: float, noise: float) -> float:
    if noise == 0:
        return math.inf
    if signal == 0:
        return -math.inf
    return 10 * math.log10(signal / noise)  # NaN stays NaN

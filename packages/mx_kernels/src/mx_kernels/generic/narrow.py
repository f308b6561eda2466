"""FP6 and FP4 on GPUs: exact, and not made for speed.

Every E2M1, E2M3 and E3M2 value is an E4M3 value too. A GEMM therefore takes such operands as E4M3 codes with the scales
that they have, through the MXFP8 kernel, and the products are the same to the last bit. Quantising to these formats is
mx_core's torch code, run on the device. Enough for studies and for the control of a comparison.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import torch
from mx_core import FORMATS, MXFP8_E4M3, decode, encode, unpack
from torch import Tensor

from mx_kernels.cpu.backend import BACKEND as REFERENCE
from mx_kernels.problem import (
    DSwigluProblem,
    GatherQuantizeProblem,
    GemmProblem,
    Problem,
    QuantizeProblem,
    SwigluProblem,
)

P = TypeVar("P", bound=Problem)

NARROW_FORMATS = ("mxfp6_e2m3", "mxfp6_e3m2", "mxfp4_e2m1")


def with_e4m3(problem: P) -> P:
    """The problem with every narrow format replaced by E4M3."""
    narrow = {
        name: MXFP8_E4M3.name
        for name in ("format", "a_format", "b_format")
        if getattr(problem, name, None) in NARROW_FORMATS
    }
    return dataclasses.replace(problem, **narrow) if narrow else problem  # type: ignore[type-var]


def e4m3_data(data: Tensor, format: str) -> Tensor:
    """Packed codes (…, K·bits/8) of a narrow format as float8_e4m3fn (…, K) of the same values; others as they are."""
    if format not in NARROW_FORMATS:
        return data
    codes = unpack(data, FORMATS[format], data.shape[-1] * 8 // FORMATS[format].bits)
    table = _e4m3_codes(format, data.device)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(torch.float8_e4m3fn).view(codes.shape)


@functools.cache
def _e4m3_codes(format: str, device: torch.device) -> Tensor:
    """The E4M3 code of the value of each code of a narrow format."""
    codes = torch.arange(1 << FORMATS[format].bits, dtype=torch.uint8)
    return encode(decode(codes, FORMATS[format]), MXFP8_E4M3).to(device)


class NarrowFormats:
    """Mixin that stands before the class of a GPU backend and takes the narrow formats off it."""

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """Why this backend cannot run the problem on this device."""
        return super().why_not(with_e4m3(problem), device)  # type: ignore[misc]

    def _for(self, problem: Any) -> Any:
        """Who makes data of the problem's format."""
        return REFERENCE if problem.format in NARROW_FORMATS else super()

    def quantize(self, problem: QuantizeProblem, x: Tensor, offs: Tensor | None) -> tuple[Tensor, ...]:
        """See MemoryBoundBackend."""
        return self._for(problem).quantize(problem, x, offs)

    def gather_quantize(
        self, problem: GatherQuantizeProblem, x: Tensor, token_of: Tensor, slot_weights: Tensor | None
    ) -> tuple[Tensor, ...]:
        """See MemoryBoundBackend."""
        return self._for(problem).gather_quantize(problem, x, token_of, slot_weights)

    def swiglu(self, problem: SwigluProblem, h: Tensor, offs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """See MemoryBoundBackend."""
        return self._for(problem).swiglu(problem, h, offs)

    def dswiglu(
        self, problem: DSwigluProblem, da: Tensor, h: Tensor, slot_weights: Tensor, offs: Tensor
    ) -> tuple[Tensor, ...]:
        """See MemoryBoundBackend."""
        return self._for(problem).dswiglu(problem, da, h, slot_weights, offs)

    def grouped_gemm(
        self,
        problem: GemmProblem,
        a: Tensor,
        a_scale: Tensor | None,
        b: Tensor,
        b_scale: Tensor | None,
        offs: Tensor | None,
        out: Tensor | None,
    ) -> Tensor:
        """See ops/gemm.py."""
        a, b = e4m3_data(a, problem.a_format), e4m3_data(b, problem.b_format)
        return super().grouped_gemm(with_e4m3(problem), a, a_scale, b, b_scale, offs, out)  # type: ignore[misc]

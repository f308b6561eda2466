"""FP6 and FP4 on GPUs, in the kernels of FP8.

Every E2M1, E2M3 and E3M2 value is an E4M3 value too. So the kernels round to the narrow format's values but write E4M3
codes (device/mx.py), which are packed here; and a GEMM takes unpacked E4M3 codes with the scales that they have, so that its
products are the same to the last bit. The packing costs several passes over the data: this is for studies and for the
control of a comparison, not for speed.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from mx_core import FORMATS, MXFP8_E4M3, decode, encode, pack, unpack
from torch import Tensor

from mx_kernels.problem import GemmProblem, Problem

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


def unpack_e4m3(data: Tensor, format: str) -> Tensor:
    """Packed codes (…, K·bits/8) of a narrow format as float8_e4m3fn (…, K) of the same values; others as they are."""
    if format not in NARROW_FORMATS:
        return data
    if FORMATS[format].bits == 4:
        pairs = _tables(format, data.device).unpack_pair.index_select(0, data.flatten().to(torch.int32))
        return pairs.view(torch.float8_e4m3fn).view(*data.shape[:-1], 2 * data.shape[-1])
    codes = unpack(data, FORMATS[format], data.shape[-1] * 8 // FORMATS[format].bits)
    e4m3 = _tables(format, data.device).to_e4m3.index_select(0, codes.flatten().to(torch.int32))
    return e4m3.view(torch.float8_e4m3fn).view(codes.shape)


def pack_e4m3(codes: Tensor, format: str) -> Tensor:
    """E4M3 codes uint8 (…, K) of a narrow format's values as its packed codes (…, K·bits/8)."""
    tables = _tables(format, codes.device)
    if FORMATS[format].bits == 4 and codes.shape[-1] % 2 == 0:
        pairs = codes.flatten().view(torch.int16).to(torch.int32) & 0xFFFF
        return tables.pack_pair.index_select(0, pairs).view(*codes.shape[:-1], codes.shape[-1] // 2)
    narrow = tables.from_e4m3.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)
    return pack(narrow, FORMATS[format])


class _Tables(NamedTuple):
    to_e4m3: Tensor
    """uint8 (2^bits,): the E4M3 code of each code's value."""
    from_e4m3: Tensor
    """uint8 (256,): the code of each E4M3 code's value, rounded where the format does not have it."""
    unpack_pair: Tensor
    """int16 (256,): of a byte of two FP4 codes the two E4M3 codes, the first in the low byte."""
    pack_pair: Tensor
    """uint8 (65536,): the inverse."""


@functools.cache
def _tables(format: str, device: torch.device) -> _Tables:
    found, byte = FORMATS[format], torch.arange(256)
    to_e4m3 = encode(decode(byte[: 1 << found.bits].to(torch.uint8), found), MXFP8_E4M3)
    from_e4m3 = encode(decode(byte.to(torch.uint8), MXFP8_E4M3), found)
    low, high = (to_e4m3.to(torch.int32)[nibble] for nibble in (byte & 0xF, byte >> 4))
    unpack_pair = (low | high << 8).to(torch.int16)
    pair = torch.arange(1 << 16)
    pack_pair = (from_e4m3[pair & 0xFF] & 0xF) | from_e4m3[pair >> 8] << 4
    return _Tables(*(t.to(device) for t in (to_e4m3, from_e4m3, unpack_pair, pack_pair)))


class NarrowFormats:
    """Mixin that stands before the class of a GPU backend and takes the narrow formats off it."""

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """Why this backend cannot run the problem on this device."""
        return super().why_not(with_e4m3(problem), device)  # type: ignore[misc]

    def prepare(self, op: str, problem: Problem, *args: Any) -> Callable[..., Any]:
        """See MemoryBoundBackend."""
        run = super().prepare(op, problem, *args)  # type: ignore[misc]
        format = getattr(problem, "format", None)
        return (lambda *tensors: _packed(format, run(*tensors))) if format in NARROW_FORMATS else run

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
        a, b = unpack_e4m3(a, problem.a_format), unpack_e4m3(b, problem.b_format)
        return super().grouped_gemm(with_e4m3(problem), a, a_scale, b, b_scale, offs, out)  # type: ignore[misc]


def _packed(format: str, results: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What an op returns, with the data packed: (data, scale) pairs, perhaps dw after them."""
    return tuple(
        pack_e4m3(t, format) if i % 2 == 0 and t.dtype is torch.uint8 else t for i, t in enumerate(results)
    )

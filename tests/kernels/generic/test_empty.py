"""Tensors with nothing along an axis, and rows that are all padding: the CPU reference's bytes, in poisoned memory."""

import pytest
import torch
from mx_kernels.generic import backend
from torch import Tensor

QUANTISED = [("mxfp8_e4m3", "rceil", "blocked_128x4"), ("mxfp8_e5m2", "floor", "linear")]


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    allocate = backend.empty

    def empty(*args):
        results = allocate(*args)
        for x in results:
            x.view(torch.uint8).fill_(0x7F)
        return results

    monkeypatch.setattr(backend, "empty", empty)


def bf16(*shape: int) -> Tensor:
    return torch.linspace(-3, 3, torch.Size(shape).numel()).view(shape).bfloat16()


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def padding(*shape: int) -> Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


@pytest.mark.parametrize(("format", "rounding", "layout"), QUANTISED)
def test_quantize(gpu, format, rounding, layout):
    for shape in ((0, 32), (128, 0), (2, 0, 32), (0, 33, 32)):
        x = bf16(*shape)
        for axis in (-1, -2):
            gpu.check("quantize", x, format, axis, rounding, layout, None, "aligned")
        gpu.check("quantize_dual", x, format, rounding, layout, None)
    for row_map in ("aligned", "compact"):
        for shape in ((0, 32), (5, 0)):
            offs = int32(0, shape[0], shape[0])
            gpu.check("quantize", bf16(*shape), format, -1, rounding, layout, offs, row_map)


@pytest.mark.parametrize(("T", "P", "D"), [(0, 0, 32), (0, 128, 32), (4, 0, 32), (3, 128, 0)])
def test_routed_rows(gpu, T, P, D):
    x, token_of, slot_of, weights = bf16(T, D), padding(P), padding(T, 2), torch.ones(T, 2)
    gpu.check("gather", x, token_of)
    format, *rest = QUANTISED[0]
    gpu.check("gather_quantize", x, token_of, None, format, -1, *rest)
    gpu.check("gather_quantize_dual", x, token_of, torch.ones(P), format, *rest)
    gpu.check("slot_weights", weights, slot_of, P)
    for w in (weights, None):
        gpu.check("combine", bf16(P, D), slot_of, w)
    gpu.check("combine_backward", bf16(T, D), bf16(P, D), slot_of, weights)
    gpu.check("route", torch.full((T, 2), -1), 3)


@pytest.mark.parametrize(("P", "H"), [(0, 32), (128, 0)])
def test_swiglu(gpu, P, H):
    """The router weights' gradient has values where H is 0."""
    da, h, w, offs = bf16(P, H), bf16(P, 2 * H), torch.ones(P), int32(0, min(P, 3))
    gpu.check("swiglu", h, offs)
    gpu.check("dswiglu", da, h, w, offs)
    for quantised in QUANTISED:
        gpu.check("swiglu_quantize", h, offs, *quantised)
        gpu.check("dswiglu_quantize", da, h, w, offs, *quantised)
        gpu.check("dswiglu_quantize_row", da, h, w, offs, *quantised)

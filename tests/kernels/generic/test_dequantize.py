"""MXFP8 operands to BF16 against mx_core.dequantize, bit for bit; in groups, and where scale bytes leave bf16's range."""

import pytest
import torch
from mx_core import FORMATS, MXTensor, RowMap, ScaleLayout, dequantize
from mx_core.groups import align_rows, aligned_offs
from mx_core.scale_layout import to_blocked
from mx_kernels.problem import GemmProblem
from support.gemm_data import exact_operand, offs_of
from torch import Tensor

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
ALIGNED, COMPACT = RowMap.ALIGNED, RowMap.COMPACT
LINEAR = ScaleLayout.LINEAR


def run(gpu, mode: str, a: MXTensor, b: MXTensor, offs: Tensor | None = None, row_map: RowMap = ALIGNED):
    """Both operands (linear scales) as BF16 tensors."""
    from mx_kernels.generic.dequantize import dequantize_operands

    compact = offs is not None and row_map is COMPACT
    scales = align_rows(a.scale, offs) if compact else a.scale, b.scale
    problem = GemmProblem(mode, a.format.name, b.format.name, torch.bfloat16, row_map, offs is not None)
    operands = a.data, to_blocked(scales[0]), b.data, to_blocked(scales[1])
    moved = [x.to(gpu.device) for x in operands]
    return [
        x.cpu() for x in dequantize_operands(problem, *moved, None if offs is None else offs.to(gpu.device))
    ]


def assert_equal(got: Tensor, x: MXTensor) -> None:
    """The same bits as the reference's, but for those of a NaN."""
    want = dequantize(x, torch.bfloat16)
    assert torch.equal(got.isnan(), want.isnan())
    there = ~want.isnan()
    assert torch.equal(got[there].view(torch.int16), want[there].view(torch.int16))


def every_code_and_scale(format: str, axis: int, *, batch: bool = False) -> MXTensor:
    """(256, 256): every code, along the blocks, with every scale byte."""
    codes = torch.arange(256, dtype=torch.uint8).expand(256, 256)
    bytes_ = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8)
    codes = (codes if axis == -1 else codes.mT).contiguous()
    bytes_ = bytes_.contiguous()
    if batch:
        codes, bytes_ = codes[None], bytes_[None]
    dtype = torch.float8_e4m3fn if format == E4M3 else torch.float8_e5m2
    return MXTensor(codes.view(dtype), bytes_, FORMATS[format], axis, LINEAR, codes.shape)


@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_every_code_with_every_scale_byte(gpu, mode):
    a = every_code_and_scale(E4M3, -2 if mode == "wgrad" else -1)
    b = every_code_and_scale(E5M2, -1 if mode == "fprop" else -2, batch=mode != "wgrad")
    for got, want in zip(run(gpu, mode, a, b), (a, b), strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_every_shape(gpu, mode):
    """Rows and columns that end inside a tile and a block; several matrices."""
    shapes = [((130, 48), (3, 33, 208))] if not gpu.is_real else []
    shapes = shapes or [((1, 16), (1, 1, 16)), ((300, 1056), (5, 200, 144)), ((4096, 2048), (7, 384, 1408))]
    for a_shape, b_shape in shapes:
        a = exact_operand(*a_shape, reduction=1, axis=-2 if mode == "wgrad" else -1)
        b_shape = (a_shape[0], b_shape[2]) if mode == "wgrad" else b_shape
        b = exact_operand(*b_shape, reduction=1, axis=-1 if mode == "fprop" else -2, seed=1)
        for got, want in zip(run(gpu, mode, a, b), (a, b), strict=True):
            assert_equal(got, want)


SIZES = [3, 0, 200, 128, *[0] * 30, 1, *[0] * 33, 70, 0]  # windows of 32 groups without rows, too


@pytest.mark.parametrize("row_map", [ALIGNED, COMPACT])
def test_groups(gpu, row_map):
    """Every row of a group, and of an ALIGNED group's padding; scales of COMPACT rows stand by group."""
    offs = offs_of(SIZES)
    end = int(aligned_offs(offs)[-1]) if row_map is ALIGNED else sum(SIZES)
    rows = end + (256 if row_map is ALIGNED else 9)
    a = exact_operand(rows, 160, reduction=1)
    b = exact_operand(2, 32, 160, reduction=1, seed=1)
    got = run(gpu, "fprop", a, b, offs, row_map)
    assert_equal(got[0][:end], first_rows(a, end))
    assert_equal(got[1], b)


def first_rows(x: MXTensor, count: int) -> MXTensor:
    """Rows of a matrix quantised along its rows."""
    data, scale = x.data[:count], x.scale[:count]
    return MXTensor(data, scale, x.format, x.axis, x.layout, data.shape)


def test_rows_of_no_group_are_left_alone(gpu, monkeypatch):
    """The 128-row units past the last group, which may be most of what was allocated, cost no time."""
    from mx_kernels.generic import dequantize as module

    allocate = module.empty
    monkeypatch.setattr(module, "empty", lambda *args: [x.fill_(7) for x in allocate(*args)])
    offs = offs_of([1, 129])
    a, b = (exact_operand(640, 32, reduction=1, axis=-2, seed=seed) for seed in (0, 1))
    for got, want in zip(run(gpu, "wgrad", a, b, offs), (a, b), strict=True):
        assert torch.equal(got[:384], dequantize(want, torch.bfloat16)[:384])
        assert (got[384:] == 7).all()

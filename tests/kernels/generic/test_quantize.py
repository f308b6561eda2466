"""Quantisers against mx_core, byte for byte."""

import pytest
import torch
from mx_core import MXFP8_E4M3

from .inputs import awkward, every_bf16_maximum, offsets

BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = ("linear", "blocked_128x4")
SHAPES = [
    (1, 32),
    (33, 96),
    (128, 128),
    (129, 160),
    (300, 1056),
    (5, 7),
    (64, 33),
    (2, 130, 264),
    (3, 32, 64),
]


def quantize(gpu, x, format="mxfp8_e4m3", rounding="rceil", layout="blocked_128x4"):
    row = gpu.check("quantize", x, format, -1, rounding, layout, None, "aligned")
    gpu.check("quantize", x, format, -2, rounding, layout, None, "aligned")
    gpu.check("quantize_dual", x, format, rounding, layout, None)
    return row


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_every_shape(gpu, dtype, layout):
    for shape in gpu.pick([(33, 96)] if layout == "linear" else [(2, 34, 72)], SHAPES):
        quantize(gpu, awkward(*shape, dtype=dtype), layout=layout)


@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil", "even"])
@pytest.mark.parametrize("format", ["mxfp8_e4m3", "mxfp8_e5m2"])
def test_every_format_and_rounding(gpu, format, rounding):
    if not gpu.is_real and (format, rounding) != ("mxfp8_e5m2", "floor"):
        pytest.skip("emulated: one of them")
    quantize(gpu, awkward(64, 96), format, rounding)


def test_rows_apart_and_unaligned(gpu):
    wide = awkward(40, 200)
    for x in (wide[:, :96], wide[:, 8:104], wide[:, 1:97], wide[::2, :64])[:: gpu.pick(2, 1)]:
        gpu.check("quantize_dual", x, "mxfp8_e4m3", "rceil", "blocked_128x4", None)
    if gpu.is_real:
        gpu.check("quantize_dual", awkward(4, 64, 200)[1:, :, :96], "mxfp8_e4m3", "rceil", "linear", None)


def test_every_bf16_maximum(gpu):
    x = every_bf16_maximum()
    x = x if gpu.is_real else x[::8].contiguous()  # the emulator: every eighth row of patterns
    for rounding in ("rceil", "floor") if gpu.is_real else ("rceil",):
        gpu.check("quantize", x, "mxfp8_e4m3", -1, rounding, "linear", None, "aligned")


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_fp32_maxima_where_a_division_rounds_wrong(gpu, rounding):
    patterns = torch.tensor(
        [0x04600001, 0x43E00001, 0x47600001, 0x04600000, 0x7F7FFFFF, 1], dtype=torch.int32
    )
    x = torch.zeros(6, 32)
    x[:, 3] = patterns.view(torch.float32)
    x[:, 4] = -x[:, 3] / 3
    gpu.check("quantize", x, "mxfp8_e4m3", -1, rounding, "linear", None, "aligned")
    gpu.check("quantize", x.T.contiguous(), "mxfp8_e4m3", -2, rounding, "linear", None, "aligned")


def block(*values):
    return torch.nn.functional.pad(torch.tensor(values, dtype=torch.float32), (0, 32 - len(values)))


NAN = float("nan")
# (case of cases.md, values, rounding, scale byte, first codes)
KNOWN = [
    ("C01", (450, -450, 17, 19), "rceil", 0x80, "76F65052"),
    ("C01", (450, -450, 17, 19), "floor", 0x7F, "7EFE585A"),
    ("C02", (448 / 1024, -448 / 1024, 1 / 1024), "rceil", 0x75, "7EFE38"),
    ("C02", (448.0, -448, 1), "floor", 0x7F, "7EFE38"),
    ("C02", (448 * 1024.0, -448 * 1024, 1024), "rceil", 0x89, "7EFE38"),
    ("C03", (150, -150, 1), "rceil", 0x7E, "79F940"),
    ("C03", (150, -150, 1), "ceil", 0x7F, "71F138"),
    ("C04", (957,), "floor", 0x80, "7E"),
    ("C04", (957,), "rceil", 0x81, "77"),
    ("C06a", (0.0, -0.0), "rceil", 0x00, "0080"),
    ("C06b", (2.0**-133, -(2.0**-133)), "rceil", 0x00, "0888"),
    ("C06c", (2.0**-126, 2.0**-127, 2.0**-133), "rceil", 0x00, "403808"),
    ("C06f", (2.0**-149,), "rceil", 0x00, "00"),
    ("C07", (NAN, 1.0), "rceil", 0xFF, "7F7F7F"),
    ("C07", (-float("inf"), 1.0), "floor", 0xFF, "7F7F7F"),
    ("C08", (448.0, 17, 19, -17, 8.5, 9.5, 232, 248, 2.0**-10, 2.0**-10 * (1 + 2.0**-7)), "rceil", 0x7F, "7E585AD8505276780001"),
    ("C08", (448.0, 3 * 2.0**-10, 7.5 * 2.0**-9, -(2.0**-10), 2.0**-9, 2.0**-6, 440, 432), "rceil", 0x7F, "7E02088001087E7E"),
]  # fmt: skip


@pytest.mark.parametrize("rounding", ["rceil", "floor", "ceil"])
def test_known_blocks(gpu, rounding):
    known = [case for case in KNOWN if case[2] == rounding]
    x = torch.stack([block(*case[1]) for case in known])
    data, scale = gpu.run("quantize", x, "mxfp8_e4m3", -1, rounding, "linear", None, "aligned")
    for row, (name, _, _, byte, codes) in enumerate(known):
        assert scale[row, 0] == byte, name
        assert bytes(data.view(torch.uint8)[row, : len(codes) // 2].tolist()).hex().upper() == codes, name


def test_every_code_comes_back(gpu):
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    values = torch.tensor([MXFP8_E4M3.decode(int(c)) for c in codes])
    x = torch.zeros(len(values), 32)
    x[:, 0], x[:, 1] = 448.0, values
    data, _ = gpu.run("quantize", x, "mxfp8_e4m3", -1, "rceil", "linear", None, "aligned")
    assert torch.equal(data.view(torch.uint8)[:, 1], codes)


GROUPS = [(16, 48, 0, 33), (0, 0, 200), (128, 0, 1, 127), (4065, *[1] * 31), (1, 8, 16, 32, 63)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_groups(gpu, layout):
    for counts in gpu.pick([(16, 48, 0, 33)], GROUPS):
        offs = offsets(*counts)
        x = awkward(int(offs[-1]) + 40, 96)
        x[int(offs[-1]) :] = NAN  # never read
        gpu.check("quantize_dual", x, "mxfp8_e4m3", "rceil", layout, offs)
        gpu.check("quantize", x, "mxfp8_e4m3", -2, "rceil", layout, offs, "aligned")
        for row_map in ("aligned", "compact"):
            gpu.check("quantize", x, "mxfp8_e4m3", -1, "rceil", layout, offs, row_map)


def test_no_block_spans_two_groups(gpu):  # C11
    x = torch.cat([torch.full((16, 32), 448.0), torch.full((48, 32), 1.0)])
    data, scale = gpu.run("quantize", x, "mxfp8_e4m3", -2, "rceil", "linear", offsets(16, 48), "aligned")
    assert scale[0].tolist() == [0x7F, 0, 0, 0, 0x77, 0x77, 0, 0]
    codes = data.view(torch.uint8)[:, 0]
    assert set(codes[:16].tolist()) == {0x7E}
    assert set(codes[128:176].tolist()) == {0x78}
    assert not codes[16:128].any()


def test_nothing_to_quantize(gpu):  # C12
    for x, offs in (
        (torch.empty(0, 32), None),
        (torch.empty(0, 32), offsets(0, 0, 0)),
        (torch.ones(6, 32), offsets(0, 0)),
    ):
        gpu.check("quantize_dual", x.bfloat16(), "mxfp8_e4m3", "rceil", "blocked_128x4", offs)


def test_a_large_matrix(gpu):
    if gpu.is_real:
        quantize(gpu, awkward(3000, 7168))

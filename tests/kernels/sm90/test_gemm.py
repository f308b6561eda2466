"""The Hopper grouped GEMM in the emulator: bitwise on exact operands, under every schedule, into poisoned memory."""

import dataclasses

import pytest
import torch
from mx_core import MXFP8_E4M3, MXFP8_E5M2, MXTensor, RowMap, ScaleLayout, decode
from mx_core.quantize import linear_scale
from mx_core.scale_layout import to_blocked
from mx_kernels.sm90 import config
from mx_kernels.sm90.config import TileConfig
from support.bounds import assert_sum_error
from support.gemm_data import GROUP_SIZES, exact_matrix, poison
from torch import Tensor

from kernels.gemm_cases import Gemm

pytest_plugins = ["ptxsim.pytest_plugin"]

ALIGNED, COMPACT = RowMap.ALIGNED, RowMap.COMPACT
BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
SMS = 4


def check_exact(case: Gemm, **run) -> None:
    a, b = case.operands()
    got, want = case.run(a, b, **run), case.expected(a, b).to(case.out_dtype)
    assert torch.equal(got, want), f"{(got != want).sum()} of {want.numel()} elements are wrong"


@pytest.fixture
def use_tile(monkeypatch):
    """Fix the tile, whatever the sizes."""
    return lambda tile: monkeypatch.setattr(config, "choose_tile", lambda *_: tile)


@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_bf16_group_sizes(emulated_gpu, mode, sizes):
    """COMPACT, with NaN rows past the groups: those of the result are zeros; K and N end inside a tile."""
    emulated_gpu("sm_90a", sms=SMS)
    check_exact(Gemm(mode, tuple(sizes), 136, 72, row_map=COMPACT, spare_rows=9))


@pytest.mark.parametrize("sizes", [[1, 127, 0, 129], [0, 0, 150]], ids=str)
@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_mxfp8_group_sizes(emulated_gpu, mode, sizes):
    emulated_gpu("sm_90a", sms=SMS)
    check_exact(Gemm(mode, tuple(sizes), 144, 96, (E4M3, E4M3)))


@pytest.mark.parametrize("mode", ["fprop", "dgrad"])
def test_mxfp8_compact_rows(emulated_gpu, mode):
    """Data without padding, scales of every group on a 128-row tile of their own; NaN codes past the groups."""
    emulated_gpu("sm_90a", sms=SMS)
    check_exact(Gemm(mode, (33, 0, 140), 96, 160, (E4M3, E4M3), COMPACT, spare_rows=9))


@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_mixed_formats_fp32_result(emulated_gpu, mode):
    emulated_gpu("sm_90a", sms=SMS)
    check_exact(Gemm(mode, (65, 3), 64, 80, (E5M2, E4M3), out_dtype=FP32))


@pytest.mark.parametrize(
    ("mode", "formats", "tile"),
    [
        ("fprop", ("bf16", "bf16"), TileConfig(128, 256, cluster_m=2)),
        ("dgrad", ("bf16", "bf16"), TileConfig(256, 128, cluster_n=2)),
        ("dgrad", ("bf16", "bf16"), TileConfig(128, 192)),
        ("wgrad", ("bf16", "bf16"), TileConfig(128, 128, cluster_m=2)),
        ("fprop", (E4M3, E4M3), TileConfig(128, 128, cluster_m=2)),
        ("dgrad", (E4M3, E4M3), TileConfig(256, 128, cluster_n=2)),
    ],
    ids=str,
)
def test_clusters_under_every_schedule(emulated_gpu, schedule, use_tile, mode, formats, tile):
    """Multicast loads, several tiles to a cluster, groups that end inside it."""
    use_tile(tile)
    emulated_gpu("sm_90a", sms=2, schedule=schedule, seed=1)
    check_exact(Gemm(mode, (150, 0, 70), 264 if formats[0] == "bf16" else 272, 144, formats))


@pytest.mark.parametrize("columns", [264, 520])
@pytest.mark.parametrize(
    ("mode", "formats", "tile_n"),
    [
        ("fprop", ("bf16", "bf16"), 256),
        ("dgrad", ("bf16", "bf16"), 128),
        ("fprop", (E4M3, E4M3), 128),
        ("dgrad", (E4M3, E4M3), 128),
    ],
    ids=str,
)
def test_short_tails_are_split_along_n(emulated_gpu, use_tile, mode, formats, tile_n, columns):
    """Clusters of two CTAs along M: groups whose last rows fill one CTA's tile, both or neither; odd and even tiles of N."""
    use_tile(TileConfig(128, tile_n, cluster_m=2))
    emulated_gpu("sm_90a", sms=SMS)
    columns = columns // 16 * 16 if formats[0] != "bf16" else columns
    n, k = (columns, 144) if mode == "fprop" else (144, columns)
    check_exact(Gemm(mode, (128, 0, 129, 300, 1, 256), n, k, formats, COMPACT, spare_rows=3))


@pytest.mark.parametrize("tile", [TileConfig(128, 128), TileConfig(128, 256, cluster_m=2)], ids=str)
def test_tickets_are_all_drawn_once_and_the_counter_ends_at_zero(emulated_gpu, use_tile, monkeypatch, tile):
    """Launches that follow each other share the counter: with more, fewer and no tiles than clusters; work for all and for some."""
    use_tile(tile)
    emulated_gpu("sm_90a", sms=SMS)
    counter = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr("mx_kernels.sm90.gemm_backend.ticket_counter", lambda _: counter)
    for mode, sizes in (("fprop", (300, 0, 70)), ("wgrad", (5, 0, 0)), ("dgrad", (1,)), ("fprop", (0, 0))):
        check_exact(Gemm(mode, sizes, 136, 72))
        assert counter.item() == 0
    case = Gemm("wgrad", (0, 0), 136, 72, out_dtype=FP32)  # no group has a tile
    case.run(*case.operands(), out=torch.zeros(case.shape), accumulate=True)
    assert counter.item() == 0


@pytest.mark.parametrize("formats", [("bf16", "bf16"), (E4M3, E4M3)], ids=str)
def test_wgrad_accumulates_and_leaves_empty_groups_alone(emulated_gpu, formats):
    emulated_gpu("sm_90a", sms=SMS)
    case = Gemm("wgrad", (40, 0, 100), 96, 64, formats, out_dtype=FP32)
    a, b = case.operands()
    before = exact_matrix(*case.shape, reduction=1, dtype=FP32, seed=5)
    got = case.run(a, b, out=before.clone(), accumulate=True)
    assert torch.equal(got, (before.double() + case.expected(a, b)).float())
    assert torch.equal(got[1], before[1])


def test_empty_expert_gets_an_exact_zero_gradient(emulated_gpu):
    """C10: out 32, 32, 96 x4; dB 2, 0, 4; dA 32, 32, 96 x4."""
    emulated_gpu("sm_90a", sms=SMS)
    a = torch.ones(6, 32, dtype=BF16)
    b = torch.stack([torch.full((32, 32), e + 1.0) for e in range(3)]).to(BF16)
    rows = torch.tensor([32, 32, 96, 96, 96, 96], dtype=BF16)[:, None].expand(6, 32)
    for mode in ("fprop", "dgrad"):
        assert torch.equal(Gemm(mode, (2, 0, 4), 32, 32, row_map=COMPACT).run(a, b), rows)
    dw = Gemm("wgrad", (2, 0, 4), 32, 32, row_map=COMPACT).run(a, a)
    assert torch.equal(dw, torch.tensor([2, 0, 4], dtype=BF16)[:, None, None].expand(3, 32, 32))


@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_no_rows(emulated_gpu, mode):
    """C12: shape (0, N), zero weight gradients, no launch error."""
    emulated_gpu("sm_90a", sms=SMS)
    got = Gemm(mode, (0, 0, 0), 64, 32, row_map=COMPACT).run(
        torch.empty(0, 32 if mode == "fprop" else 64, dtype=BF16),
        torch.empty(0, 32, dtype=BF16) if mode == "wgrad" else torch.ones(3, 64, 32, dtype=BF16),
    )
    assert torch.equal(got, torch.zeros(got.shape, dtype=BF16))


@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
@pytest.mark.parametrize("formats", [("bf16", "bf16"), (E4M3, E4M3)], ids=str)
def test_random_operands_within_the_measured_bound(emulated_gpu, mode, formats):
    emulated_gpu("sm_90a", sms=SMS)
    case = Gemm(mode, (130, 45), 96, 160, formats, out_dtype=FP32)
    a, b = case.operands(exact=False)
    got = case.run(a, b)
    for a_MK, b_NK, where in case.products(a, b):
        assert_sum_error(got[where], a_MK, b_NK)


def one_code_rows(format, codes: Tensor, scale_bytes: Tensor) -> MXTensor:
    """(rows, 32) with one code a row, at position row % 32, and one scale byte a row."""
    data = torch.zeros(len(codes), 32, dtype=torch.uint8)
    rows = torch.arange(len(codes))
    data[rows, rows % 32] = codes
    dtype = torch.float8_e4m3fn if format is MXFP8_E4M3 else torch.float8_e5m2
    return MXTensor(
        data.view(dtype), scale_bytes[:, None], format, -1, ScaleLayout.LINEAR, torch.Size(data.shape)
    )


@pytest.mark.parametrize(
    ("format", "exact_bytes"), [(MXFP8_E4M3, range(3, 247)), (MXFP8_E5M2, range(10, 240))], ids=str
)
def test_every_scale_byte(emulated_gpu, format, exact_bytes):
    """x @ I = x: what a value becomes on its way through bf16. Exact inside the contract's range; outside rounded to
    bf16's subnormals, and Inf where dequantising to fp32 gives Inf too."""
    emulated_gpu("sm_90a", sms=SMS)
    bytes_ = torch.arange(255, dtype=torch.uint8)
    largest, smallest = (0x7E, 0x01) if format is MXFP8_E4M3 else (0x7B, 0x01)
    codes = torch.cat([torch.full((255,), c, dtype=torch.uint8) for c in (largest, smallest, 0x80 | largest)])
    x = one_code_rows(format, codes, bytes_.repeat(3))
    identity = one_code_rows(
        MXFP8_E4M3, torch.full((32,), 0x38, dtype=torch.uint8), torch.full((32,), 127, dtype=torch.uint8)
    )
    w = MXTensor(
        identity.data[None], identity.scale[None], MXFP8_E4M3, -1, ScaleLayout.LINEAR, torch.Size((1, 32, 32))
    )
    case = Gemm("fprop", (765,), 32, 32, (format.name, E4M3), out_dtype=FP32)
    got = case.run(case.with_rows(x), w)[:765]
    rows = torch.arange(765)
    value = decode(codes, format).double() * torch.exp2(bytes_.repeat(3).double() - 127)
    want = value.float().to(BF16).float()
    assert torch.equal(got[rows, rows % 32], want)
    exact = torch.isin(bytes_.repeat(3), torch.tensor(list(exact_bytes), dtype=torch.uint8))
    assert torch.equal(want[exact].double(), value[exact])
    assert ((want[~exact].double() - value[~exact]).abs() <= 2.0**-134)[value[~exact].abs() < 1].all()


def with_far_block(x: MXTensor, byte: int) -> MXTensor:
    """The same values but for one block of zeros, which has this scale byte."""
    data, scale = x.data.view(torch.uint8).clone(), x.scale.clone()
    (data if x.axis == -1 else data.mT)[..., 3, 32:64] = 0
    scale[..., 3, 1] = byte
    return dataclasses.replace(x, data=data.view(x.data.dtype), scale=scale)


@pytest.mark.parametrize(
    ("mode", "operand", "byte"),
    [
        *((mode, operand, 60) for mode in ("fprop", "dgrad") for operand in ("a", "b")),
        ("fprop", "a", 200),
        ("dgrad", "b", 146),  # 125 + 21: the furthest that F16 operands hold together with the other scales
        ("dgrad", "a", 147),
    ],
)
def test_scales_far_apart(emulated_gpu, mode, operand, byte):
    """The same sums from BF16 operands, where one scale of the tile lies too far from the others."""
    emulated_gpu("sm_90a", sms=SMS)
    case = Gemm(mode, (70, 0, 64), 64, 64, (E4M3, E4M3), out_dtype=FP32)
    a, b = case.operands()
    if operand == "a":
        a = with_far_block(a, byte)
    else:
        b = with_far_block(b, byte)
    assert torch.equal(case.run(a, b), case.expected(a, b).float())


@pytest.mark.parametrize("first", [0, 233], ids=["smallest bytes", "largest bytes"])
def test_near_scales_are_exact_at_both_ends(emulated_gpu, first):
    """F16 operands hold what BF16 rounds or overflows: scale bytes below 3 and above 246, in FP32 results."""
    emulated_gpu("sm_90a", sms=SMS)
    bytes_ = torch.arange(first, first + 22, dtype=torch.uint8).repeat_interleave(3)
    codes = torch.tensor([0x7E, 0x01, 0xFE], dtype=torch.uint8).repeat(22)
    x = one_code_rows(MXFP8_E4M3, codes, bytes_)
    unit = torch.full((32,), 127 if first == 0 else 100, dtype=torch.uint8)
    identity = one_code_rows(MXFP8_E4M3, torch.full((32,), 0x38, dtype=torch.uint8), unit)
    w = MXTensor(
        identity.data[None], identity.scale[None], MXFP8_E4M3, -1, ScaleLayout.LINEAR, torch.Size((1, 32, 32))
    )
    case = Gemm("fprop", (66,), 32, 32, (E4M3, E4M3), out_dtype=FP32)
    got = case.run(case.with_rows(x), w)[:66]
    want = decode(codes, MXFP8_E4M3).double() * torch.exp2(bytes_.double() + int(unit[0]) - 254)
    assert torch.equal(got[torch.arange(66), torch.arange(66) % 32], want.float())
    assert not got.isinf().any()


@pytest.mark.parametrize("nan_scale", [False, True], ids=["code", "code and scale"])
@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("mode", ["fprop", "dgrad", "wgrad"])
def test_nan_reaches_its_row_or_column_and_no_other(emulated_gpu, mode, operand, nan_scale):
    """A NaN code among near scales (F16 operands), and with a NaN scale in another line of the tile (BF16 operands)."""
    emulated_gpu("sm_90a", sms=SMS)
    case = Gemm(mode, (64,), 64, 32, (E4M3, E4M3))
    a, b = case.operands()
    want = case.expected(a, b).to(BF16)
    x = a if operand == "a" else b
    data = x.data.view(torch.uint8)
    (data if x.axis == -1 else data.mT)[..., 9, 3] = 0x7F
    lines = [9]
    if nan_scale:
        x.scale.view(-1, x.scale.shape[-1])[5, 0] = 255
        lines = [5, 9]
    got, want = (x[..., :64, :] for x in (case.run(a, b), want))  # not the padding rows
    hit = torch.zeros_like(want, dtype=torch.bool)
    (hit if operand == "a" else hit.mT)[..., lines, :] = True
    assert got[hit].isnan().all()
    assert torch.equal(got[~hit], want[~hit])


def test_rows_that_the_copy_engine_cannot_address_are_refused(emulated_gpu):
    emulated_gpu("sm_90a", sms=SMS)
    case = Gemm("fprop", (16,), 64, 36, row_map=COMPACT)
    a, b = case.operands()
    out = poison(*case.shape, dtype=BF16)
    with pytest.raises(
        ValueError, match=r"a: expected rows and an address that are multiples of 16 bytes.*\(16, 36\)"
    ):
        case.run(a, b, out=out)
    assert out.isnan().all()


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("mode", ["fprop", "wgrad"])  # in the loop, and before it
def test_scales_that_are_not_aligned_are_refused(emulated_gpu, mode, operand):
    gpu = emulated_gpu("sm_90a", sms=SMS)
    case = Gemm(mode, (16,), 64, 32, (E4M3, E4M3))
    operands = [with_blocked_scales(x) for x in case.operands()]
    x = operands["ab".index(operand)]
    moved = torch.empty(x.scale.numel() + 1, dtype=torch.uint8)[1:].view(x.scale.shape)
    operands["ab".index(operand)] = dataclasses.replace(x, scale=moved.copy_(x.scale))
    out = poison(*case.shape, dtype=BF16)
    with pytest.raises(
        ValueError, match=rf"{operand}_scale: expected an address that is a multiple of 16 bytes"
    ):
        case.run(*operands, out=out)
    assert out.isnan().all()
    assert not gpu.launches


def with_blocked_scales(x: MXTensor) -> MXTensor:
    """The same values with the scales that kernels read."""
    scale = to_blocked(linear_scale(x))
    return dataclasses.replace(x, scale=scale, layout=ScaleLayout.BLOCKED_128X4)

"""The Blackwell grouped GEMM in the emulator: bitwise on exact operands, under every schedule, into poisoned memory."""

import pytest
import torch
from mx_core import MXFP8_E4M3, MXTensor, RowMap, ScaleLayout, reference
from mx_kernels import grouped_gemm_fprop, grouped_gemm_wgrad, quantize_mx_dual
from mx_kernels.sm100.backend import forced_tile
from mx_kernels.sm100.config import TileConfig
from support.bounds import assert_sum_error
from support.gemm_data import GROUP_SIZES, exact_matrix, exact_operand, offs_of, poison

from kernels.sm100.cases import MODES, SCHEDULES, TILES, check_exact, gemm

pytest_plugins = ["ptxsim.pytest_plugin"]

ALIGNED, COMPACT = RowMap.ALIGNED, RowMap.COMPACT
BF16, FP32 = torch.bfloat16, torch.float32
E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tiles(emulated_gpu, mode, tile):
    """Every tile and cluster, with tails in M, N and K and a group that ends inside a cluster's tile.

    The schedule goes with the tile, so that each schedule meets each mode.
    """
    emulated_gpu("sm_100a", sms=4, schedule=SCHEDULES[TILES.index(tile) % len(SCHEDULES)], seed=1)
    with forced_tile(tile):
        check_exact(gemm(mode, (150, 0, 70), 272, 144))


@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
@pytest.mark.parametrize("mode", MODES)
def test_group_sizes(emulated_gpu, mode, sizes):
    emulated_gpu("sm_100a", sms=4)
    with forced_tile(TileConfig(256, 128)):
        check_exact(gemm(mode, tuple(sizes), 144, 160))


@pytest.mark.parametrize("sizes", GROUP_SIZES.values(), ids=GROUP_SIZES)
def test_compact_group_sizes(emulated_gpu, sizes):
    """Rows without padding, stored up to the group's last; NaN codes past the groups, zeros in the result."""
    emulated_gpu("sm_100a", sms=4, schedule="random", seed=2)
    with forced_tile(TileConfig(256, 128)):
        check_exact(gemm("fprop", tuple(sizes), 136, 96, row_map=COMPACT, spare_rows=37))


@pytest.mark.parametrize("mode", MODES)
def test_bf16(emulated_gpu, mode):
    """kind::f16, no scales. Groups along K may begin anywhere: rows of the next one must not leak in."""
    emulated_gpu("sm_100a", sms=4, schedule="random", seed=3)
    with forced_tile(TileConfig(256, 256)):
        check_exact(gemm(mode, (33, 0, 140), 136, 264, ("bf16", "bf16"), COMPACT, spare_rows=9))
    with forced_tile(TileConfig(128, 128, 1)):
        check_exact(gemm(mode, (33, 0, 140), 72, 136, ("bf16", "bf16"), out_dtype=FP32))


@pytest.mark.parametrize("formats", [(E5M2, E4M3), (E4M3, E5M2)], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_e5m2_and_fp32_results(emulated_gpu, mode, formats):
    emulated_gpu("sm_100a", sms=4, schedule="late")
    with forced_tile(TileConfig(256, 256)):
        check_exact(gemm(mode, (65, 3), 80, 96, formats, out_dtype=FP32))


@pytest.mark.parametrize("row_map", [ALIGNED, COMPACT])
def test_dgrad_row_maps(emulated_gpu, row_map):
    emulated_gpu("sm_100a", sms=4, schedule="tma_late")
    with forced_tile(TileConfig(256, 192)):
        check_exact(gemm("dgrad", (129, 0, 5), 96, 208, row_map=row_map, out_dtype=FP32))


@pytest.mark.parametrize("tile", [TileConfig(256, 256, 2, 2), TileConfig(128, 256, 1)], ids=str)
@pytest.mark.parametrize("mode", ["fprop", "wgrad"])
def test_schedules_are_bitwise_equal(emulated_gpu, mode, tile):
    """Random operands, whose sums depend on their order: early, late, random completion give the same bits."""
    case = gemm(mode, (200, 130), 144, 288)
    a, b = case.operands(exact=False)
    results = []
    for seed, schedule in enumerate((*SCHEDULES, "random")):
        emulated_gpu("sm_100a", sms=4, schedule=schedule, seed=seed)
        with forced_tile(tile):
            results.append(case.run(a, b))
    assert all(torch.equal(result, results[0]) for result in results[1:])


@pytest.mark.parametrize("formats", [(E4M3, E4M3), (E5M2, E4M3), ("bf16", "bf16")], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_random_operands_within_the_measured_bound(emulated_gpu, mode, formats):
    emulated_gpu("sm_100a", sms=4)
    case = gemm(mode, (130, 45), 96, 160, formats, out_dtype=FP32)
    a, b = case.operands(exact=False)
    got = case.run(a, b)
    for a_MK, b_NK, where in case.products(a, b):
        assert_sum_error(got[where], a_MK, b_NK)


@pytest.mark.parametrize("formats", [(E4M3, E4M3), ("bf16", "bf16")], ids=str)
def test_wgrad_accumulates_and_leaves_empty_groups_alone(emulated_gpu, formats):
    emulated_gpu("sm_100a", sms=4, schedule="late")
    case = gemm("wgrad", (40, 0, 100), 96, 64, formats, out_dtype=FP32)
    a, b = case.operands()
    before = exact_matrix(*case.shape, reduction=1, dtype=FP32, seed=9)
    got = case.run(a, b, out=before.clone(), accumulate=True)
    assert torch.equal(got, (case.expected(a, b) + before).float())


@pytest.mark.parametrize("tile", [TileConfig(128, 128, 1), TileConfig(256, 256)], ids=str)
def test_dense(emulated_gpu, tile):
    """offs None: the one-group case. COMPACT and ALIGNED are the same there."""
    emulated_gpu("sm_100a", sms=4)
    x = exact_operand(136, 160, reduction=160, seed=1)
    w = exact_operand(1, 264, 160, reduction=160, seed=2)
    with forced_tile(tile):
        y = grouped_gemm_fprop(x, w, None, backend="sm100")
    assert torch.equal(y, reference.grouped_fprop(x, w, None, out_dtype=BF16))
    dy, x = (exact_operand(160, c, axis=-2, reduction=160, seed=c) for c in (144, 80))
    with forced_tile(tile):
        dw = grouped_gemm_wgrad(dy, x, None, backend="sm100")
    assert torch.equal(dw, reference.grouped_wgrad(dy, x, None, out_dtype=BF16))


@pytest.mark.parametrize("sizes", [[2, 0, 4], [0, 0, 6], [6, 0, 0], [0, 6, 0]], ids=str)
def test_c10_gradients_of_empty_experts(emulated_gpu, sizes):
    """C10: A = ones (6, 32), B[e] = e + 1, dY = ones, into memory full of NaN."""
    emulated_gpu("sm_100a", sms=4)
    ones = torch.ones(6, 32, dtype=BF16)
    b = torch.arange(1, 4, dtype=BF16)[:, None, None].expand(3, 32, 32).contiguous()
    expert = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    case = {m: gemm(m, tuple(sizes), 32, 32, ("bf16", "bf16"), COMPACT) for m in MODES}
    want = 32 * (expert + 1).to(BF16)[:, None].expand(6, 32)
    assert torch.equal(case["fprop"].run(ones, b), want)
    assert torch.equal(case["dgrad"].run(ones, b), want)
    dw = case["wgrad"].run(ones, ones)
    assert torch.equal(dw, torch.tensor(sizes, dtype=BF16)[:, None, None].expand(3, 32, 32))


@pytest.mark.parametrize("sizes", [[16, 48], [16, 48, 0, 33]], ids=str)
def test_c11_no_scale_block_spans_two_experts(emulated_gpu, sizes):
    """C11: expert 0 holds 448, the others 2^-12, which a scale shared with expert 0 would make zero."""
    emulated_gpu("sm_100a", sms=4)
    expert = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    x = torch.where(expert == 0, 448.0, 2.0**-12)[:, None].expand(-1, 64).to(BF16).contiguous()
    offs = offs_of(sizes)
    ones, x_col = (quantize_mx_dual(t, offs=offs, backend="sm100")[1] for t in (torch.ones_like(x), x))
    dw = grouped_gemm_wgrad(ones, x_col, offs, out_dtype=FP32, backend="sm100")
    want = torch.tensor([n * (448.0 if e == 0 else 2.0**-12) for e, n in enumerate(sizes)])
    assert torch.equal(dw, want[:, None, None].expand(-1, 64, 64))


@pytest.mark.parametrize("mode", MODES)
def test_c12_no_rows(emulated_gpu, mode):
    """C12: shape (0, N), zero weight gradients, no launch error."""
    emulated_gpu("sm_100a", sms=4)
    got = gemm(mode, (0, 0, 0), 64, 32, ("bf16", "bf16"), COMPACT).run(
        torch.empty(0, 32 if mode == "fprop" else 64, dtype=BF16),
        torch.empty(0, 32, dtype=BF16) if mode == "wgrad" else torch.ones(3, 64, 32, dtype=BF16),
    )
    assert torch.equal(got, torch.zeros(got.shape, dtype=BF16))


@pytest.mark.parametrize(
    "sizes",
    [(300, *[0] * 31), (*[0] * 31, 300), (269, *[1] * 31), (1, 8, 16, 32, 63, *[0] * 35, 5)],
    ids=["first", "last", "most", "41 groups"],
)
@pytest.mark.parametrize("mode", ["fprop", "wgrad"])
def test_c13_skew_of_many_experts(emulated_gpu, mode, sizes):
    """C13, and more groups than the scheduler warp has lanes."""
    emulated_gpu("sm_100a", sms=6, schedule="random", seed=4)
    with forced_tile(TileConfig(128, 128, 1)):
        check_exact(gemm(mode, sizes, 32, 32))


@pytest.mark.parametrize("rows", [127, 128, 129])
def test_c14_rows_around_a_tile(emulated_gpu, rows):
    """C14's M = 127, 128, 129 at one-CTA and two-CTA tiles."""
    emulated_gpu("sm_100a", sms=2)
    for tile in (TileConfig(128, 64, 1), TileConfig(256, 64)):
        with forced_tile(tile):
            check_exact(gemm("fprop", (rows,), 64, 64, row_map=COMPACT))


def test_every_scale_byte(emulated_gpu):
    """x @ I = x, exactly, for every scale byte: byte 0 is 2^-127, not 0 and not flushed; 255 is NaN, never Inf."""
    emulated_gpu("sm_100a", sms=2)
    rows = torch.arange(256)
    codes = torch.zeros(256, 32, dtype=torch.uint8)
    codes[rows, rows % 32] = 0x38  # 1.0
    x = mx(codes, rows.to(torch.uint8)[:, None])
    eye = mx(torch.eye(32, dtype=torch.uint8) * 0x38, torch.full((32, 1), 127, dtype=torch.uint8))
    w = MXTensor(eye.data[None], eye.scale[None], MXFP8_E4M3, -1, ScaleLayout.LINEAR, torch.Size((1, 32, 32)))
    y = grouped_gemm_fprop(x, w, None, out_dtype=FP32, backend="sm100")
    assert torch.equal(y[rows[:255], rows[:255] % 32].double(), torch.exp2(rows[:255].double() - 127))
    assert y[255].isnan().all()
    y[rows, rows % 32] = 0
    assert torch.equal(y[:255], torch.zeros(255, 32))


@pytest.mark.parametrize("operand", ["a", "b"])
@pytest.mark.parametrize("mode", MODES)
def test_nan_block_reaches_its_row_or_column_and_no_other(emulated_gpu, mode, operand):
    emulated_gpu("sm_100a", sms=2)
    case = gemm(mode, (64,), 64, 32)
    a, b = case.operands()
    want = case.expected(a, b).to(BF16)
    x = a if operand == "a" else b
    x.scale.view(-1, x.scale.shape[-1])[5, 0] = 255
    got = case.run(a, b)
    hit = torch.zeros_like(want, dtype=torch.bool)
    hit[(..., 5, slice(None)) if operand == "a" else (..., slice(None), 5)] = True
    if mode != "wgrad":
        hit[64:] = False  # padding is zero, whatever the weights hold
    assert got[hit].isnan().all()
    assert torch.equal(got[~hit], want[~hit])


def test_offsets_past_the_rows_write_nothing_outside(emulated_gpu):
    """Offsets that contradict the data are clamped: the emulator would report a store outside the output."""
    emulated_gpu("sm_100a", sms=2)
    x = torch.ones(100, 64, dtype=BF16)
    w = torch.ones(3, 64, 64, dtype=BF16)
    out = poison(100, 64, dtype=BF16)
    offs = torch.tensor([40, 20, 5000], dtype=torch.int32)
    grouped_gemm_fprop(x, w, offs, out=out, row_map=COMPACT, backend="sm100")
    assert torch.equal(out[:40], torch.full((40, 64), 64.0, dtype=BF16))


def test_rows_that_the_copy_engine_cannot_address_are_refused(emulated_gpu):
    emulated_gpu("sm_100a", sms=2)
    case = gemm("fprop", (16,), 64, 36, ("bf16", "bf16"), COMPACT)
    a, b = case.operands()
    with pytest.raises(
        ValueError, match=r"a: expected rows and an address that are multiples of 16 bytes.*\(16, 36\)"
    ):
        case.run(a, b)


def test_offs_dtype_is_checked(emulated_gpu):
    emulated_gpu("sm_100a", sms=2)
    x, w = torch.ones(16, 64, dtype=BF16), torch.ones(2, 64, 64, dtype=BF16)
    with pytest.raises((TypeError, ValueError), match="offs"):
        grouped_gemm_fprop(x, w, offs_of([8, 8]).long(), backend="sm100")


def mx(codes, scale) -> MXTensor:
    """E4M3 codes with linear scales along the rows."""
    return MXTensor(codes.view(torch.float8_e4m3fn), scale, MXFP8_E4M3, -1, ScaleLayout.LINEAR, codes.shape)

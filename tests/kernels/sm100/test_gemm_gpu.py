"""The Blackwell grouped GEMM on hardware: `uv run pytest -m gpu -n 0 tests/kernels/sm100`."""

import pytest
import torch
from mx_core import RowMap
from mx_kernels import arch
from mx_kernels.sm100.backend import forced_tile
from mx_kernels.sm100.config import VARIANTS
from support.gemm_data import GROUP_SIZES, offs_of

from kernels.gemm_cases import OPS, check_random
from kernels.sm100.cases import MODES, TILES, gemm

DEVICE = "cuda"
E4M3, E5M2, BF16 = "mxfp8_e4m3", "mxfp8_e5m2", "bf16"
FORMATS = ((E4M3, E4M3), (E5M2, E4M3), (BF16, BF16))
MANY = {"C13 first": [4096, *[0] * 31], "C13 ones": [4065, *[1] * 31], "C13 small": [1, 8, 16, 32, 63]}


def no_blackwell() -> bool:
    return not torch.cuda.is_available() or arch.target_of(torch.device("cuda")) not in ("sm_100a", "sm_103a")


pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("no_blackwell()", reason="needs a Blackwell GPU with tcgen05"),
]


@pytest.mark.parametrize("tile", dict.fromkeys((*TILES, *VARIANTS)), ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_exact_and_repeatable(mode, tile):
    """Bitwise right, into poisoned memory each time; C13: in every one of 50 runs."""
    with forced_tile(tile):
        for index, sizes in enumerate((GROUP_SIZES | MANY).values()):
            formats = FORMATS[index % 3]
            compact = mode != "wgrad" or formats[0] == BF16
            row_map = RowMap.COMPACT if compact and index % 2 else RowMap.ALIGNED
            case = gemm(mode, sizes, 272, 208, formats, row_map, torch.float32)
            a, b = case.operands()
            want = case.expected(a, b).float()
            for _ in range(50 if sizes in MANY.values() else 3):
                assert torch.equal(case.run(a, b, device=DEVICE), want), (sizes, formats, row_map)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_random_operands_within_the_measured_bound(mode, formats):
    check_random(gemm(mode, (700, 0, 33, 1024), 512, 768, formats, out_dtype=torch.float32), device=DEVICE)


@pytest.mark.parametrize("tile", TILES[::4], ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_graph_replays_with_other_groups_and_nothing_synchronises(mode, tile):
    """C16: a launch knows no group size; the graph sees new offs in the same memory."""
    before, after = (
        gemm(mode, sizes, 256, 128, (BF16, BF16), RowMap.COMPACT, spare_rows=12)
        for sizes in ((300, 0, 200), (1, 400, 99))
    )
    a, b = (x.to(DEVICE) for x in before.operands())
    offs, out = before.offs.to(DEVICE), torch.empty(before.shape, dtype=torch.bfloat16, device=DEVICE)

    def call() -> None:
        OPS[mode](a, b, offs, out=out, row_map=RowMap.COMPACT, backend="sm100")

    with forced_tile(tile):
        call()  # compile
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        torch.cuda.set_sync_debug_mode("error")
        try:
            with torch.cuda.graph(graph):
                call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    new_a, new_b = after.operands(seed=7)
    a.copy_(new_a)
    b.copy_(new_b)
    offs.copy_(offs_of(list(after.sizes)))
    out.fill_(torch.nan)
    graph.replay()
    assert torch.equal(after.written(out.cpu()), after.expected(new_a, new_b).to(torch.bfloat16))

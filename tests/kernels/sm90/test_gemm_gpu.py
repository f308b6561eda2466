"""The Hopper grouped GEMM on hardware: `uv run pytest -m gpu -n 0 tests/kernels/sm90`."""

import pytest
import torch
from mx_core import RowMap
from mx_kernels import arch
from mx_kernels.sm90 import config
from support.gemm_data import GROUP_SIZES, offs_of

from kernels.gemm_cases import OPS, Gemm, check_random

E4M3, E5M2 = "mxfp8_e4m3", "mxfp8_e5m2"
BF16 = ("bf16", "bf16")


def no_hopper() -> bool:
    return not torch.cuda.is_available() or arch.target_of(torch.device("cuda")) != "sm_90a"


pytestmark = [pytest.mark.gpu, pytest.mark.skipif("no_hopper()", reason="needs a Hopper GPU")]

#: Formats of a and b, and whether MXFP8 operands are dequantised before the product.
OPERANDS = {
    "bf16": (BF16, False),
    **{
        f"{a} {b} {where}": ((a, b), where == "first")
        for a, b in ((E4M3, E4M3), (E5M2, E4M3))
        for where in ("in the loop", "first")
    },
}
WAYS = [
    (mode, operands)
    for mode in ("fprop", "dgrad", "wgrad")
    for operands in OPERANDS
    if mode != "wgrad" or "in the loop" not in operands  # there is no such kernel
]
every_way = pytest.mark.parametrize(("mode", "formats"), WAYS, indirect=["formats"])
one_of_each = pytest.mark.parametrize(
    ("mode", "formats"), [w for w in WAYS if E5M2 not in w[1]], indirect=["formats"]
)


@pytest.fixture
def formats(request, monkeypatch):
    """Of a and b, by the name of one of OPERANDS."""
    found, first = OPERANDS[request.param]
    monkeypatch.setattr(config, "dequantize_first", lambda *_: first)
    return found


MANY = {"C13 first": [4096, *[0] * 31], "C13 ones": [4065, *[1] * 31], "C13 small": [1, 8, 16, 32, 63]}


@pytest.mark.parametrize("sizes", (GROUP_SIZES | MANY).values(), ids=GROUP_SIZES | MANY)
@every_way
def test_exact_and_repeatable(mode, formats, sizes):
    """Bitwise right, into poisoned memory each time; C13: in every one of 50 runs."""
    for row_map in RowMap:
        if mode == "wgrad" and formats != BF16 and row_map is RowMap.COMPACT:
            continue
        case = Gemm(mode, tuple(sizes), 272, 208, formats, row_map, torch.float32)
        a, b = case.operands()
        want = case.expected(a, b).float()
        for _ in range(50 if tuple(sizes) in map(tuple, MANY.values()) else 3):
            assert torch.equal(case.run(a, b, device="cuda"), want)


@one_of_each
def test_random_operands_within_the_measured_bound(mode, formats):
    check_random(Gemm(mode, (700, 0, 33, 1024), 512, 768, formats, out_dtype=torch.float32), device="cuda")


@pytest.mark.parametrize("mode", ["fprop", "dgrad"])
def test_f16_and_bf16_operands_give_the_same_bits(mode, monkeypatch):
    """In the loop: one block of zeros has a scale near the others, then one so far away that its tiles take BF16 operands."""
    case = Gemm(mode, (700, 0, 33, 1024), 512, 768, (E4M3, E4M3), out_dtype=torch.float32)
    a, b = case.operands(exact=False)
    monkeypatch.setattr(config, "dequantize_first", lambda *_: False)
    results = []
    for byte in (127, 1):
        for x in (a, b):
            data = x.data.view(torch.uint8)
            (data if x.axis == -1 else data.mT)[..., 3, :32] = 0
            x.scale[..., 3, 0] = byte
        results.append(case.run(a, b, device="cuda"))
    assert torch.equal(*results)


def parts(x) -> list[torch.Tensor]:
    """The tensors of an operand."""
    return [x] if isinstance(x, torch.Tensor) else [x.data.view(torch.uint8), x.scale]


@one_of_each
def test_graph_replays_with_other_groups_and_nothing_synchronises(mode, formats):
    """C16: a launch knows no group size; the graph sees new offs in the same memory."""
    row_map = RowMap.COMPACT if formats == BF16 else RowMap.ALIGNED
    before, after = (
        Gemm(mode, sizes, 256, 128, formats, row_map, spare_rows=12 if formats == BF16 else 0)
        for sizes in ((300, 0, 200), (1, 400, 99))
    )
    a, b = (x.to("cuda") for x in before.operands())
    offs = offs_of(list(before.sizes), "cuda")
    out = torch.full(before.shape, torch.nan, dtype=torch.bfloat16, device="cuda")

    def call():
        OPS[mode](a, b, offs, out=out, row_map=row_map, backend="sm90")

    call()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        others = after.operands(seed=7)
        for x, other in zip((a, b), others, strict=True):
            for target, source in zip(parts(x), parts(other), strict=True):
                target.copy_(source.pin_memory(), non_blocking=True)
        offs.copy_(after.offs.pin_memory(), non_blocking=True)
        out.fill_(torch.nan)
        graph.replay()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(after.written(out.cpu()), after.expected(*others).to(torch.bfloat16))

"""What ptxas makes of the kernels that `choose_tile` picks: no spills, no serialised wgmmas, the expected instructions."""

import re
from collections import Counter

import cutlass.cute as cute
import pytest
from mx_kernels.sm90.config import SMEM_BYTES, TILE_K, GemmKey, TileConfig, choose_tile
from mx_kernels.sm90.gemm import GroupedGemm

E4M3 = "mxfp8_e4m3"


def key(mode: str, format: str = "bf16", tile: TileConfig | None = None, **changes) -> GemmKey:
    tile = tile or choose_tile(mode, format != "bf16", rows=65536, groups=64, columns=2048)
    fields = {"out_dtype": "bf16", "aligned": True, "grouped": True, "accumulate": False} | changes
    return GemmKey(mode, format, format, tile=tile, **fields)


FEW_ROWS = {
    scaled: choose_tile("fprop", scaled, rows=16384, groups=128, columns=2048) for scaled in (False, True)
}
KEYS = [
    *(key(mode) for mode in ("fprop", "dgrad", "wgrad")),
    *(key(mode, E4M3) for mode in ("fprop", "dgrad")),
    key("fprop", tile=FEW_ROWS[False]),
    key("dgrad", E4M3, tile=FEW_ROWS[True]),
    key("fprop", out_dtype="fp32", aligned=False),
    key("wgrad", out_dtype="fp32", accumulate=True),
]


@pytest.mark.parametrize("key", KEYS, ids=lambda k: f"{k.mode}-{k.a_format}-{k.tile}-{k.out_dtype}")
def test_no_spills_and_asynchronous_wgmmas(key, tmp_path, capfd):
    options = f"--gpu-arch sm_90a --keep-ptx --dump-dir {tmp_path} remarks{{ptx}}"
    compiled = cute.compile(*GroupedGemm(key).build(), options=options)
    report = "".join(capfd.readouterr())
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in report
    assert "serialized" not in report, report
    assert "setmaxnreg" not in report, report  # "'setmaxnreg' ignored"
    ptx = compiled.__ptx__
    assert not re.search(r"\b(ld|st)\.local", ptx)
    wgmmas = Counter(re.findall(r"wgmma\.mma_async\S*\.m64n(\d+)k16\.\S+", ptx))
    once = TILE_K // 16 * key.rows_per_consumer // 64
    tile_n = key.tile.tile_n
    expected = {f"{tile_n}": 2 * once if key.scaled else once}  # F16 and BF16
    if tile_n == 256:
        expected["128"] = once  # of tiles that reach past N by half or more
    assert wgmmas == expected


def test_stages_fill_shared_memory():
    for k in KEYS:
        used = k.stages * k.stage_bytes
        assert k.stages >= 3
        assert used <= SMEM_BYTES
        assert used + k.stage_bytes + 32 * 1024 > SMEM_BYTES - k.b_stages * k.tile.tile_n * TILE_K * 2


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"mode": "fprop", "format": "mxfp4"}, "takes bf16, mxfp8_e4m3, mxfp8_e5m2 operands, got mxfp4"),
        ({"mode": "fprop", "format": E4M3, "tile": TileConfig(128, 256)}, "tile_n: expected 128"),
        ({"mode": "wgrad", "format": E4M3, "aligned": False}, "expected ALIGNED rows"),
        ({"mode": "fprop", "tile": TileConfig(256, 256)}, "accumulators"),
        (
            {"mode": "fprop", "tile": TileConfig(cluster_m=3)},
            "cluster: expected 1, 2, 4 or 8 CTAs, got 3 x 1",
        ),
        ({"mode": "fprop", "accumulate": True}, "only wgrad into an fp32 output accumulates"),
    ],
    ids=str,
)
def test_impossible_kernels_say_why(fields, reason):
    with pytest.raises(ValueError, match=re.escape(reason)):
        key(**fields)

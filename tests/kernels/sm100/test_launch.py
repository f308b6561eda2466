"""What a launch depends on beside the problem: caches, the room for clusters, measured tiles. None may change a bit."""

import pytest
import torch
from mx_kernels import jit, mx_linear, registry
from mx_kernels.generic import autotune
from mx_kernels.sm100 import backend, config
from mx_kernels.sm100.backend import forced_tile
from mx_kernels.sm100.config import GemmKey, TileConfig
from mx_kernels.sm100.gemm import GroupedGemm

from kernels.sm100.cases import check_exact, gemm

pytest_plugins = ["ptxsim.pytest_plugin"]


def forget_kernels() -> None:
    """As in a new process."""
    jit._loaded.clear()
    backend._kernel.cache_clear()
    registry.forget()


def test_c15_what_ran_before_changes_nothing(emulated_gpu):
    """C15: width 64, 128, 64; bf16, then fp32; M = 1, 127, 128: bits as with empty caches."""
    emulated_gpu("sm_100a", sms=4)
    cases = [
        (torch.randn(m, width).to(dtype), torch.randn(64, width).to(dtype))
        for width in (64, 128, 64)
        for dtype in (torch.bfloat16, torch.float32)
        for m in (1, 127, 128)
    ]
    forget_kernels()
    one_process = [mx_linear(x, w, backend="sm100") for x, w in cases]
    for (x, w), got in list(zip(cases, one_process, strict=True))[::-2]:
        if x.shape[0] == 128:
            forget_kernels()
        assert torch.equal(got, mx_linear(x, w, backend="sm100"))


@pytest.mark.parametrize("target", ["sm_100a", "sm_103a"])
def test_c15_warm_disk_cache(monkeypatch, tmp_path, target):
    """C15: a second process finds the kernels of the first, each under its own key."""
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MX_DISK_CACHE", raising=False)
    keys = [
        GemmKey("fprop", "bf16", "bf16", out, True, True, False, TileConfig(128, 64, 1))
        for out in ("bf16", "fp32")
    ]

    def load():
        forget_kernels()
        for key in keys:
            assert callable(jit.compiled(key, target, GroupedGemm(key).build))

    load()
    assert len(list(tmp_path.rglob("*.o"))) == len(keys)
    monkeypatch.setattr(jit, "_compile", lambda *_: pytest.fail("compiled again"))
    load()
    forget_kernels()


@pytest.mark.parametrize(
    ("tile", "sms", "cluster"),
    [
        (TileConfig(256, 256, 2, 2), 8, (2, 2, 1)),
        (TileConfig(256, 256, 2, 2), 3, (2, 1, 1)),
        (TileConfig(256, 128), 1, (1, 1, 1)),
        (TileConfig(128, 64, 2, 2), 1, (1, 1, 1)),
    ],
    ids=str,
)
def test_smaller_cluster_where_a_cluster_does_not_fit(emulated_gpu, tile, sms, cluster):
    gpu = emulated_gpu("sm_100a", sms=sms)
    with forced_tile(tile):
        check_exact(gemm("fprop", (150, 0, 70), 80, 96))
    grid = gpu.launches[-1].config.grid
    assert gpu.launches[-1].config.cluster == cluster
    assert grid == (*cluster[:2], sms // (cluster[0] * cluster[1]))


def test_no_tile_is_chosen_that_does_not_fit(emulated_gpu):
    gpu = emulated_gpu("sm_100a", sms=1)
    check_exact(gemm("dgrad", (150, 0, 70), 80, 96))
    assert gpu.launches[-1].config.cluster == (1, 1, 1)


@pytest.mark.parametrize("mode", ["fprop", "wgrad"])
def test_autotuned_tile_runs(emulated_gpu, monkeypatch, tmp_path, mode):
    """Measured (by a planted timer) at the first call, into a scratch result; the fastest is what runs from then on."""
    monkeypatch.setenv("MX_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(autotune, "_chosen", {})
    tiles = (TileConfig(128, 64, 1), TileConfig(256, 64), TileConfig(128, 128, 1))
    monkeypatch.setattr(config, "candidates", lambda *_: tiles)
    gpu = emulated_gpu("sm_100a", sms=4)
    seconds = iter([3.0, 1.0, 2.0])

    def timer(run, device):
        run()
        return next(seconds)

    out_dtype = torch.float32 if mode == "wgrad" else torch.bfloat16
    case = gemm(mode, (40, 0, 90), 80, 96, out_dtype=out_dtype)
    a, b = case.operands()
    added = {}
    if mode == "wgrad":
        added = {"out": torch.ones(case.shape), "accumulate": True}
    with autotune.enabled(timer):
        got = case.run(a, b, **added)
        assert [launch.config.cluster[0] for launch in gpu.launches] == [1, 2, 1, 2]
        again = case.run(a, b, **{**added, "out": torch.ones(case.shape)} if added else {})
        assert [launch.config.cluster[0] for launch in gpu.launches[4:]] == [2]
    want = (case.expected(a, b) + (1 if added else 0)).to(out_dtype)
    assert torch.equal(got, want), "measuring has written into the result"
    assert torch.equal(again, want)


def test_every_tile_gives_the_same_bits(emulated_gpu):
    """Sums that depend on their order: all tiles add along K in the same one, so a tuner changes no result."""
    emulated_gpu("sm_100a", sms=4)
    case = gemm("fprop", (130, 5), 40, 416)
    a, b = case.operands(exact=False)
    results = []
    for tile in (*config.TILES[::2], TileConfig(128, 64, 2, 2)):
        with forced_tile(tile):
            results.append(case.run(a, b))
    assert all(torch.equal(result, results[0]) for result in results[1:])

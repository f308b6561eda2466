"""Races in global memory between clusters (opt-in), and between the lanes of one store."""

from __future__ import annotations

import numpy as np
import ptxsim
import pytest
import torch
from emulator.conformance.dsl import example
from emulator.core.ptx_kernel import run
from ptxsim import __main__

SCHEDULES = ("early", "late", "random")
ME = ".reg .b32 cta; mov.u32 cta, %ctaid.x; setp.eq.u32 p, cta, 0; shl.b32 t0, tx, 2; cvt.u64.u32 w, t0; add.u64 w, a0, w; "


def words(n: int = 64) -> np.ndarray:
    return np.zeros(n, np.uint32)


def launch(
    body: str, schedule: str = "early", *, seed: int = 1, global_races: bool = True, grid: int = 2
) -> None:
    run(ME + body, words(), words(), grid=grid, schedule=schedule, seed=seed, global_races=global_races)


def racy(body: str, message: str = "race on global memory, byte .* of argument 0") -> None:
    for schedule in SCHEDULES:
        with pytest.raises(ptxsim.Race, match=message):
            launch(body, schedule)
    launch(body, global_races=False)


def clean(body: str) -> None:
    for schedule in SCHEDULES:
        launch(body, schedule)


def test_two_ctas_write_the_same_word() -> None:
    racy("st.global.u32 [w], cta;", "write by cluster .*store by CTA")


def test_one_reads_what_the_other_writes() -> None:
    racy(
        "@p st.global.u32 [w], 7; @!p ld.global.u32 t1, [w];", "(write|read) by cluster .*(load|store) by CTA"
    )


def test_each_its_own_bytes() -> None:
    clean(
        "mad.lo.u32 t1, cta, 32, tx; cvt.u64.u32 w, t1; add.u64 w, a0, w; st.global.u8 [w], cta; ld.global.u8 t2, [w];"
    )
    clean("ld.global.u32 t1, [w];")


FLAG = "setp.eq.u32 q, tx, 0; "
SPIN = "SPIN: ld{sem}.global.u32 t1, [a1]; setp.eq.u32 r, t1, 0; @r bra SPIN; "


@pytest.mark.parametrize(
    ("release", "acquire"),
    [(".release.gpu", ".acquire.gpu"), (".relaxed.gpu", ".relaxed.gpu"), (".volatile", ".volatile")],
)
def test_a_flag_orders(release: str, acquire: str) -> None:
    body = f"""
      @!p bra READ; st.global.u32 [w], 5; bar.warp.sync -1; fence.acq_rel.gpu; {FLAG} @q st{release}.global.u32 [a1], 1; bra END;
      READ: {SPIN.format(sem=acquire)} fence.acq_rel.gpu; ld.global.u32 t2, [w]; END:
    """
    clean(body)
    racy(body.replace(SPIN.format(sem=acquire), ""))


def test_the_last_one_to_arrive_may_read_everything() -> None:
    """The classic: store, fence, count; whoever counts last sums up."""
    body = f"""
      mad.lo.u32 t1, cta, 32, tx; cvt.u64.u32 w1, t1; add.u64 w1, a0, w1; st.global.u8 [w1+32], tx;
      bar.warp.sync -1; fence.acq_rel.gpu; mov.b32 t2, 0; {FLAG} @q atom.global.add.u32 t2, [a1], 1;
      shfl.sync.idx.b32 t2, t2, 0, 31, -1; setp.ne.u32 r, t2, 1; @r bra END; fence.acq_rel.gpu; ld.global.u32 t3, [a0+32]; ld.global.u32 t3, [a0+64];
      END:
    """
    clean(body)
    racy(body.replace("@r bra END;", ""))


def test_tensor_stores_of_two_ctas() -> None:
    """The example GEMM's tiles do not overlap."""
    gemm = example("blockscaled_gemm")
    operands = gemm.operands(256, 256, 256, exact=True)
    with ptxsim.gpu("sm_100a", schedule="random", global_races=True) as gpu:
        d = gemm.gemm(*operands, gemm.BlockscaledGemm(1), max_ctas=3)
    assert gpu.launches[-1].config.grid == (3, 1, 1)
    assert torch.equal(d, gemm.reference(*operands).to(torch.bfloat16))


@pytest.mark.parametrize("options", [[], ["--global-races"]])
def test_the_command_line_asks_for_it(monkeypatch, options) -> None:
    asked = {}

    def gpu(*_, **kwargs):
        asked.update(kwargs)
        raise InterruptedError

    monkeypatch.setattr(__main__.api, "gpu", gpu)
    with pytest.raises(InterruptedError):
        __main__.main(["run", *options, "script.py"])
    assert asked["global_races"] == bool(options)


STORES = {
    "shared, one address": "st.shared.u32 [smem], {};",
    "shared, pairs of lanes": "and.b32 t1, tx, 30; shl.b32 t1, t1, 2; add.u32 t1, t1, smem; st.shared.u32 [t1], {};",
    "shared, vectors": "and.b32 t1, tx, 30; shl.b32 t1, t1, 4; add.u32 t1, t1, smem; st.shared.v4.u32 [t1], {{cta, cta, cta, {}}};",
    "global, one address": "st.global.u32 [a0], {};",
    "global, pairs of lanes": "and.b32 t1, tx, 30; shl.b32 t1, t1, 2; cvt.u64.u32 w, t1; add.u64 w, a0, w; st.global.u32 [w], {};",
}


@pytest.mark.parametrize("name", STORES)
def test_lanes_of_one_store(name: str) -> None:
    """Several lanes may write the same value to one place, but not different ones: which is kept is not defined."""
    same, other = STORES[name].format("cta"), STORES[name].format("tx")
    launch(same, grid=1)
    with pytest.raises(ptxsim.Race, match="race between lanes"):
        launch(other, grid=1)
    run(ME + other, words(), words(), checks=False)

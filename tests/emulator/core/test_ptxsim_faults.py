"""Each kind of misuse, planted once, is reported with warp, PTX line and place."""

from __future__ import annotations

import numpy as np
import ptxsim
import pytest
from emulator.core.ptx_kernel import run

ONE = "setp.eq.u32 p, tx, 0; "
INIT = (
    ONE + "@p mbarrier.init.shared.b64 [smem+1024], 1; @p fence.mbarrier_init.release.cluster; bar.sync 0; "
)


def words(n=64):
    return np.arange(n, dtype=np.uint32)


FAULTS = [
    # name, body, message
    ("global past the end", "mul.wide.u32 w, tx, 4; add.u64 w, a0, w; ld.global.u32 t0, [w+132];", "4 bytes past the end of argument 0|0 bytes past"),
    ("global store past the end", "st.global.u32 [a0+256], tx;", "past the end of argument 0"),
    ("global before the start", "ld.global.u32 t0, [a0-4];", "before argument 0"),
    ("misaligned global", "ld.global.u32 t0, [a0+2];", "misaligned global load of 4 bytes"),
    ("misaligned vector", "ld.global.v4.u32 {t0,t1,t2,t3}, [a0+8];", "misaligned global load of 16 bytes"),
    ("misaligned shared", "st.shared.u32 [smem+2], tx;", "misaligned shared store"),
    ("shared beyond", "add.u32 t0, smem, 4096; st.shared.u32 [t0], tx;", "beyond"),
    ("uninitialised shared", "ld.shared.u32 t0, [smem+64];", "nobody wrote"),
    ("trap", "trap;", "trap"),
    ("no such CTA", "mapa.shared::cluster.u32 t0, smem, 1; ld.shared::cluster.u32 t1, [t0];", "no CTA of rank 1"),
    ("mbarrier never initialised", ONE + "@p mbarrier.arrive.shared.b64 _, [smem];", "never initialised"),
    ("mbarrier initialised twice", INIT + "@p mbarrier.init.shared.b64 [smem+1024], 1;", "already initialised"),
    ("mbarrier too many arrivals", INIT + "@p mbarrier.arrive.shared.b64 _, [smem+1024], 2;", "more arrivals than its count 1"),
    ("mbarrier noComplete completes", INIT + "@p mbarrier.arrive.noComplete.shared.b64 w, [smem+1024], 1;", "noComplete completes the phase"),
    ("mbarrier init by a warp", "mbarrier.init.shared.b64 [smem], 1;", "32 lanes at once"),
    ("mbarrier misplaced", ONE + "@p mbarrier.init.shared.b64 [smem+4], 1;", "misplaced"),
    ("store over an mbarrier", INIT + "st.shared.u32 [smem+1024], tx;", "mbarrier object"),
    ("barrier count", "bar.sync 1, 20;", "multiple of 32"),
    ("barrier number", "mov.b32 t0, 16; bar.sync t0, 32;", "does not exist"),
    ("un-elected bulk load", INIT + "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [a0], 16, [smem+1024];", "un-elected bulk load: 32 lanes"),
    ("un-elected bulk store", "st.shared.u32 [smem], 1; fence.proxy.async.shared::cta; cp.async.bulk.global.shared::cta.bulk_group [a0], [smem], 16;", "un-elected|nobody"),
    ("bulk size", INIT + "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [a0], 24, [smem+1024];", "multiples of 16"),
    ("bulk load past the tensor", INIT + "@p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [a0], 512, [smem+1024];", "past the end|outside"),
    ("exit with a bulk store unread", ONE + """@p st.shared.v4.u32 [smem], {tx, tx, tx, tx}; fence.proxy.async.shared::cta;
       @p cp.async.bulk.global.shared::cta.bulk_group [a0], [smem], 16; @p cp.async.bulk.commit_group;""", "wait_group.read"),
    ("exit with an uncommitted bulk store", ONE + """@p st.shared.v4.u32 [smem], {tx, tx, tx, tx}; fence.proxy.async.shared::cta;
       @p cp.async.bulk.global.shared::cta.bulk_group [a0], [smem], 16;""", "uncommitted"),
    ("not a tensor map", INIT + """@p cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes
       [smem], [a0, {tx, tx}], [smem+1024];""", "not a tensor map|64-byte aligned|element strides"),
    ("shuffle with a lane that left", "setp.lt.u32 p, lane, 4; @p shfl.sync.idx.b32 t0, tx, 0, 31, 0x3;", "not in its mask"),
    ("ldmatrix by part of a warp", "setp.lt.u32 p, lane, 4; @p ldmatrix.sync.aligned.m8n8.x1.shared.b16 {t0}, [smem];", "all lanes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "message"), FAULTS, ids=[f[0] for f in FAULTS])
def test_fault(name, body, message):
    with pytest.raises(ptxsim.Fault, match=message):
        run(body, words(), max_instructions=20000)


def test_report_names_cta_warp_and_line():
    with pytest.raises(
        ptxsim.Fault, match=r"CTA \(1,0,0\) warp 1, line \d+ `ld\.shared\.u32 t0, \[smem\+64\]`"
    ):
        run(
            "mov.u32 t1, %ctaid.x; mul.lo.u32 t2, t1, tx; setp.lt.u32 p, t2, 32; @p bra E; ld.shared.u32 t0, [smem+64]; E:",
            words(),
            grid=2,
            block=64,
        )


def test_missing_expect_tx_is_seen_late():
    """Without expect_tx the phase completes before the bytes arrive."""
    body = (
        INIT
        + """
      @!p bra WAIT; mbarrier.arrive.shared.b64 _, [smem+1024];
      WAIT: mbarrier.try_wait.parity.shared.b64 q, [smem+1024], 0; @!q bra WAIT;
    """
    )
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [a0], 16, [smem+1024]; "
    with pytest.raises(ptxsim.Fault, match="issued in phase 0"):
        run(body.replace("mbarrier.arrive.shared", copy + "mbarrier.arrive.shared"), words(), schedule="late")


def test_deadlock_report_lists_every_warp():
    body = (
        INIT
        + """
      setp.lt.u32 q, tx, 32; @q bra ONLY;
      bar.sync 2, 64;
      ONLY: W: mbarrier.try_wait.parity.shared.b64 q, [smem+1024], 0; @!q bra W;
    """
    )
    with pytest.raises(ptxsim.Deadlock) as error:
        run(body, words(), block=64)
    message = str(error.value)
    assert "warp 0 (32 lanes) waits at" in message
    assert "mbarrier 0x800, parity 0 (phase 0, pending 1/1, tx 0)" in message
    assert "warp 1 (32 lanes) waits at" in message
    assert "barrier 2 (32/64 threads arrived)" in message


def test_one_thread_may_work_while_its_warp_waits():
    """As on an H200: lane 0 runs a copy loop, the other lanes already wait at bar.sync."""
    body = INIT + """
      mov.b32 t0, 0; @!p bra DONE;
      LOOP: mbarrier.arrive.expect_tx.shared.b64 _, [smem+1024], 128;
      shl.b32 t1, t0, 7; add.u32 t1, smem, t1;
      cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [t1], [a0], 128, [smem+1024];
      and.b32 t2, t0, 1;
      W: mbarrier.try_wait.parity.shared.b64 q, [smem+1024], t2; @!q bra W;
      add.u32 t0, t0, 1; setp.lt.u32 r, t0, 4; @r bra LOOP;
      DONE: bar.sync 0; shl.b32 t3, tx, 2; add.u32 t4, smem, t3; ld.shared.u32 t5, [t4+384];
      cvt.u64.u32 w, t3; add.u64 w, a1, w; st.global.u32 [w], t5;
    """  # fmt: skip
    for schedule in ("early", "late", "random"):
        out = np.zeros(32, np.uint32)
        run(body, words(), out, schedule=schedule)
        assert out.tolist() == list(range(32))


ALLOC = "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [smem], 32; ld.shared.u32 t0, [smem]; "
FREE = "tcgen05.dealloc.cta_group::1.sync.aligned.b32 t0, 32; "
STORE = "tcgen05.st.sync.aligned.32x32b.x1.b32 [t0], {tx}; tcgen05.wait::st.sync.aligned; "
LOAD = "tcgen05.ld.sync.aligned.32x32b.x1.b32 {t1}, [t0]; "
WAIT = "tcgen05.wait::ld.sync.aligned; "
OUT = "mul.wide.u32 w, tx, 4; add.u64 w, a0, w; st.global.u32 [w], t1; "

TMEM = [
    ("not freed", ALLOC, "exits with TMEM columns still allocated"),
    ("freed twice", ALLOC + FREE + FREE, "dealloc"),
    ("freed with another size", ALLOC + FREE.replace("32;", "64;"), "dealloc of 64 columns"),
    ("used after free", ALLOC + STORE + FREE + LOAD + WAIT, "not allocated"),
    ("never allocated", "mov.b32 t0, 0; " + LOAD + WAIT, "not allocated"),
    ("size", ALLOC.replace("32;", "48;"), "power of two"),
    ("after relinquish", "tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned; " + ALLOC, "after relinquish"),
    ("nobody wrote", ALLOC + LOAD + WAIT + FREE, "nobody wrote"),
    ("other lanes", ALLOC + "add.u32 t0, t0, 0x200000; " + LOAD, "reaches lanes 0…31 only"),
    ("load overwritten", ALLOC + STORE + LOAD + "mov.b32 t1, 0; " + OUT + WAIT + FREE, "overwritten"),
    ("store without wait", ALLOC + STORE.replace("tcgen05.wait::st.sync.aligned; ", "") + LOAD + WAIT + FREE, "race"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "body", "message"), TMEM, ids=[t[0] for t in TMEM])
@pytest.mark.parametrize("schedule", ["early", "late"])
def test_tmem_misuse(name, body, message, schedule):
    with pytest.raises(ptxsim.Fault, match=message):
        run(body, words(), schedule=schedule)


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_tmem_round_trip(schedule):
    out = np.zeros(32, np.uint32)
    run(ALLOC + STORE + LOAD + WAIT + OUT + FREE, out, schedule=schedule)
    assert out.tolist() == list(range(32))


EXIT = """
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem+512], 1; @p fence.mbarrier_init.release.cluster;
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
  mov.u32 t0, %cluster_ctarank; setp.eq.and.u32 q, t0, 0, p; mov.b16 h, 3;
  @q tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [smem+512], h;
  WAIT
"""


@pytest.mark.parametrize("schedule", ["early", "late", "random"])
def test_a_cta_outlives_the_commits_of_another(schedule):
    wait = "W: mbarrier.try_wait.parity.shared::cta.b64 r, [smem+512], 0; @!r bra W;"
    run(EXIT.replace("WAIT", wait), words(), grid=2, cluster=2, schedule=schedule)
    with pytest.raises(ptxsim.Fault, match=r"CTA \(1,0,0\).* (may exit before|which has exited)"):
        run(EXIT.replace("WAIT", ""), words(), grid=2, cluster=2, schedule=schedule)

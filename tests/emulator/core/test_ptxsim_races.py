"""The race detector: each missing piece of synchronisation is reported, and the whole program is clean."""

from __future__ import annotations

import numpy as np
import ptxsim
import pytest
from emulator.core.ptx_kernel import run

SCHEDULES = ("early", "late", "random")
MINE = (
    "shl.b32 t0, tx, 2; add.u32 t1, smem, t0; xor.b32 t2, tx, 32; shl.b32 t2, t2, 2; add.u32 t2, smem, t2; "
)
BAR = "bar.sync 0; "


def words(n=256):
    return np.arange(n, dtype=np.uint32)


def expect(body, message, **options):
    """The body races under every schedule."""
    for schedule in SCHEDULES:
        with pytest.raises(ptxsim.Race, match=message):
            run(body, words(), words(), schedule=schedule, **{"uninitialized": False, **options})


def clean(body, **options):
    for schedule in SCHEDULES:
        for seed in range(3 if schedule == "random" else 1):
            run(body, words(), words(), schedule=schedule, seed=seed, **options)


def test_write_then_read_by_another_warp():
    body = MINE + "st.shared.u32 [t1], tx; {} ld.shared.u32 t3, [t2];"
    clean(body.format(BAR), block=64)
    expect(body.format(""), "race on shared memory", block=64)


def test_both_sides_are_named():
    body = MINE + "st.shared.u32 [t1], tx; ld.shared.u32 t3, [t2];"
    with pytest.raises(ptxsim.Race) as error:
        run(body, words(), block=64, uninitialized=False)
    message = str(error.value)
    assert "warp 0, line" in message
    assert "warp 1, line" in message
    assert "`st.shared.u32 [t1], tx`" in message
    assert "`ld.shared.u32 t3, [t2]`" in message
    assert "0x4" in message


def test_read_then_overwrite():
    body = MINE + "st.shared.u32 [t1], tx; bar.sync 0; ld.shared.u32 t3, [t2]; {} st.shared.u32 [t1], t3;"
    clean(body.format(BAR), block=64)
    expect(body.format(""), "race on", block=64)


def test_two_writers():
    expect("shr.u32 t0, tx, 5; st.shared.u32 [smem], t0;", "write by .*write by", block=64)


def test_neighbouring_bytes_do_not_race():
    clean("add.u32 t0, smem, tx; st.shared.u8 [t0], tx; bar.sync 0; ld.shared.u8 t1, [t0];", block=64)


def test_atomics_do_not_race_with_each_other_but_with_stores():
    begin = "setp.eq.u32 p, tx, 0; @p st.shared.u32 [smem], 0; bar.sync 0; red.shared.add.u32 [smem], 1; "
    clean(begin + "bar.sync 0; ld.shared.u32 t0, [smem];", block=64)
    expect(begin + "ld.shared.u32 t0, [smem];", "race", block=64)


def test_named_barrier_of_a_subset():
    """Producer arrives, consumer syncs: ordered; the other way round is not."""
    body = MINE + """
      setp.lt.u32 p, tx, 32; @!p bra CONSUME;
      st.shared.u32 [t1], tx; bar.{0} 1, 64; bra END;
      CONSUME: bar.{1} 1, 64; ld.shared.u32 t3, [t2];
      END: bar.sync 0;
    """  # fmt: skip
    clean(body.format("arrive", "sync"), block=64)
    expect(body.format("sync", "arrive"), "race", block=64)


MBARRIER = """
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem+2048], 1;
  @p fence.mbarrier_init.release.cluster; bar.sync 0;
  shl.b32 t0, tx, 4; add.u32 t1, smem, t0;
"""
FILL = """
  @!p bra WAIT;
  mbarrier.arrive.expect_tx.shared.b64 _, [smem+2048], 512;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [a0], 512, [smem+2048];
  WAIT:
"""
WAIT0 = "W0: mbarrier.try_wait.parity.shared.b64 q, [smem+2048], 0; @!q bra W0; "


def test_bulk_load_without_waiting():
    body = MBARRIER + FILL + "{} ld.shared.v4.u32 {{t2, t3, t4, t5}}, [t1];"
    clean(body.format(WAIT0))
    expect(body.format(""), "write by asynchronous copies of mbarrier .*bulk load.*read by")


def test_bulk_load_over_data_still_being_read():
    body = MBARRIER + """
      st.shared.v4.u32 [t1], {{tx, tx, tx, tx}}; fence.proxy.async.shared::cta; bar.sync 0;
      xor.b32 t6, t0, 512; add.u32 t6, smem, t6; ld.shared.u32 t2, [t6]; {}
    """ + FILL.replace("512", "1024") + WAIT0  # fmt: skip
    clean(body.format(BAR), block=64)
    expect(body.format(""), "bulk load", block=64)


def test_bulk_load_over_a_store_without_proxy_fence():
    body = (
        MBARRIER
        + "st.shared.v4.u32 [t1], {{tx, tx, tx, tx}}; {} bar.sync 0;"
        + FILL.replace("{", "{{").replace("}", "}}")
        + WAIT0
    )
    clean(body.format("fence.proxy.async.shared::cta;"))
    expect(body.format(""), "missing proxy fence")


STORE = """
  setp.eq.u32 p, tx, 0; @!p bra END;
  cp.async.bulk.global.shared::cta.bulk_group [a1], [smem], 512; cp.async.bulk.commit_group; {}
  END: bar.sync 0; {}
  @p cp.async.bulk.wait_group.read 0;
"""


def test_bulk_store_needs_a_proxy_fence():
    fill = (
        "shl.b32 t0, tx, 4; add.u32 t1, smem, t0; st.shared.v4.u32 [t1], {{tx, tx, tx, tx}}; {} bar.sync 0;"
    )
    clean(fill.format("fence.proxy.async.shared::cta;") + STORE.format("", ""))
    clean(fill.format("fence.proxy.async;") + STORE.format("", ""))
    expect(fill.format("") + STORE.format("", ""), "missing proxy fence")
    expect(fill.format("fence.proxy.async.global;") + STORE.format("", ""), "missing proxy fence")


def test_bulk_store_must_be_read_before_the_buffer_is_reused():
    fill = "shl.b32 t0, tx, 4; add.u32 t1, smem, t0; st.shared.v4.u32 [t1], {tx, tx, tx, tx}; fence.proxy.async.shared::cta; bar.sync 0;"
    again = "st.shared.u32 [t1], tx;"
    clean(fill + STORE.format("cp.async.bulk.wait_group.read 0;", again))
    expect(fill + STORE.format("", again), "bulk stores of .*write by")


def test_cp_async_needs_its_wait():
    body = """
      shl.b32 t0, tx, 4; add.u32 t1, smem, t0; cvt.u64.u32 w, t0; add.u64 w, a0, w;
      cp.async.cg.shared.global [t1], [w], 16; cp.async.commit_group; {} ld.shared.u32 t2, [t1];
    """  # fmt: skip
    clean(body.format("cp.async.wait_group 0;"))
    clean(body.format("cp.async.wait_all;"))
    expect(body.format("cp.async.wait_group 1;"), "cp.async of .*read by")


def test_mbarrier_init_must_be_synchronised():
    body = """
      setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem], 64; {} mbarrier.arrive.shared.b64 _, [smem];
    """
    clean(body.format(BAR), block=64)
    for schedule in SCHEDULES:
        with pytest.raises(ptxsim.Fault, match=r"without synchronisation after its init|never initialised"):
            run(body.format(""), words(), block=64, schedule=schedule)


CLUSTER = MINE.replace("xor.b32 t2, tx, 32;", "mov.u32 t2, tx;") + """
  mov.u32 t5, %cluster_ctarank; xor.b32 t5, t5, 1; mapa.shared::cluster.u32 t6, t1, t5;
  st.shared.u32 [t1], tx; {} ld.shared::cluster.u32 t7, [t6];
  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
"""  # fmt: skip


def test_distributed_shared_memory():
    sync = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
    clean(CLUSTER.format(sync), grid=2, cluster=2)
    fenced = (
        "fence.acq_rel.cluster; barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;"
    )
    clean(CLUSTER.format(fenced), grid=2, cluster=2)
    expect(CLUSTER.format("bar.sync 0;"), "race|nobody wrote", grid=2, cluster=2, uninitialized=False)
    relaxed = "barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.aligned;"
    expect(CLUSTER.format(relaxed), "race", grid=2, cluster=2)


def test_without_checks_nothing_is_reported():
    run(MINE + "st.shared.u32 [t1], tx; ld.shared.u32 t3, [t2];", words(), block=64, checks=False)


def test_in_flight_data_are_poison():
    """With the detector off, a missing wait still shows as a wrong value when copies are late."""
    body = MBARRIER + FILL + "ld.shared.v4.u32 {t2, t3, t4, t5}, [t1]; cvt.u64.u32 w, t0; add.u64 w, a1, w; st.global.v4.u32 [w], {t2, t3, t4, t5};" + WAIT0  # fmt: skip
    out = words()
    run(body, words(), out, schedule="late", checks=False)
    assert (out[:128] == 0xFFFFFFFF).all()
    run(body, words(), out, schedule="early", checks=False)
    assert (out[:128] == np.arange(128)).all()

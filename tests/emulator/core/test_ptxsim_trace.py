"""Timelines and counts."""

from __future__ import annotations

import json

import numpy as np
from emulator.core.ptx_kernel import run
from ptxsim.trace import Trace

PIPELINE = """
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem+2048], 1; @p fence.mbarrier_init.release.cluster; bar.sync 0;
  setp.ge.u32 q, tx, 32; @q bra USE;
  @p mbarrier.arrive.expect_tx.shared.b64 _, [smem+2048], 512;
  @p cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [a0], 512, [smem+2048];
  bra END;
  USE: mbarrier.try_wait.parity.shared.b64 q, [smem+2048], 0; @!q bra USE;
  ld.shared.u32 t0, [smem];
  END: bar.sync 0;
"""


def test_waits_copies_and_roles(tmp_path):
    trace = Trace()
    run(PIPELINE, np.zeros(128, np.uint32), block=64, schedule="timed", trace=trace)
    launch = trace.launches[-1]
    assert launch.roles() == {0: "load", 1: "compute"}
    assert launch.waits[1][1] > 600  # warp 1 waits for the copy
    assert launch.moved[("bulk_load", "argument 0")] == 512
    copies = [s for s in launch.spans if s.kind == "tma"]
    waits = [s for s in launch.spans if s.kind == "wait" and "mbarrier" in s.name]
    assert len(copies) == 1
    assert waits
    assert waits[0].end >= copies[0].end
    text = trace.summary()
    assert "512 bytes  argument 0" in text
    trace.write(str(tmp_path / "t.json"))
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert {"CTA (0,0,0)", "warp 0 (load)"} <= names
    assert all(e["dur"] > 0 for e in events if e["ph"] == "X")
    trace.draw(str(tmp_path / "t.png"))
    assert (tmp_path / "t.png").stat().st_size > 1000


def conflicts(body):
    trace = Trace()
    run(body, np.zeros(64, np.uint32), smem=16384, trace=trace)
    return [tuple(v) for v in trace.launches[-1].conflicts.values()]


def test_bank_conflicts():
    """32 banks of 4 bytes: a stride of 128 bytes serialises a warp, 16-byte accesses go by quarter warps."""
    assert conflicts("shl.b32 t0, tx, 2; add.u32 t1, smem, t0; st.shared.u32 [t1], tx;") == [(1, 1, 1)]
    assert conflicts("shl.b32 t0, tx, 7; add.u32 t1, smem, t0; st.shared.u32 [t1], tx;") == [(1, 32, 1)]
    assert conflicts("shl.b32 t0, tx, 3; add.u32 t1, smem, t0; st.shared.u32 [t1], tx;") == [(1, 2, 1)]
    assert conflicts("shl.b32 t0, tx, 4; add.u32 t1, smem, t0; st.shared.v4.u32 [t1], {tx,tx,tx,tx};") == [
        (1, 4, 4)
    ]
    assert conflicts("shl.b32 t0, tx, 7; add.u32 t1, smem, t0; st.shared.v4.u32 [t1], {tx,tx,tx,tx};") == [
        (1, 32, 4)
    ]


def test_conflicts_are_in_the_summary():
    trace = Trace()
    run(
        "shl.b32 t0, tx, 7; add.u32 t1, smem, t0; st.shared.u32 [t1], tx;",
        np.zeros(1, np.uint32),
        smem=16384,
        trace=trace,
    )
    assert "31 extra wavefronts" in trace.summary()
    assert "32.0x over 1 accesses: line" in trace.summary()

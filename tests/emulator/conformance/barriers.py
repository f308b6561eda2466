"""mbarriers and named barriers: a pipeline, state tokens, counts, arrive/sync hand-over."""

from __future__ import annotations

import numpy as np
from emulator.conformance.case import Buffers, Case, random_bits

# Warp 0 brings 16 tiles of 1 KB through 3 stages; warps 1 to 3 fold them into one word per thread, with a named
# barrier of their own. full[i] is at smem+4096+8i, empty[i] at smem+4120+8i.
_RING = """
  setp.eq.u32 p, tx, 0;
  @p mbarrier.init.shared.b64 [smem+4096], 1; @p mbarrier.init.shared.b64 [smem+4104], 1; @p mbarrier.init.shared.b64 [smem+4112], 1;
  @p mbarrier.init.shared.b64 [smem+4120], 96; @p mbarrier.init.shared.b64 [smem+4128], 96; @p mbarrier.init.shared.b64 [smem+4136], 96;
  @p fence.mbarrier_init.release.cluster; bar.sync 0;
  .reg .b32 stage, phase, tile, fold, full, empty;
  mov.b32 stage, 0; mov.b32 phase, 0; mov.b32 tile, 0; mov.b32 fold, 0;
  setp.ge.u32 q, tx, 32; @q bra CONSUME;
  {skip}
  PRODUCE:
  shl.b32 s, stage, 3; add.u32 full, s, smem; add.u32 full, full, 4096; add.u32 empty, full, 24; xor.b32 t0, phase, 1;
  EMPTY: mbarrier.try_wait.parity.shared::cta.b64 r, [empty], t0; @!r bra EMPTY;
  {guard} mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 1024;
  mul.wide.u32 w, tile, 1024; add.u64 w0, src, w; shl.b32 s, stage, 10; add.u32 s, s, smem;
  {guard} cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [w0], 512, [full];
  add.u64 w0, w0, 512; add.u32 s, s, 512;
  {guard} cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [w0], 512, [full];
  add.u32 tile, tile, 1; add.u32 stage, stage, 1; setp.eq.u32 r, stage, 3; @r mov.b32 stage, 0; @r xor.b32 phase, phase, 1;
  setp.lt.u32 r, tile, 16; @r bra PRODUCE;
  bra DONE;
  CONSUME:
  shl.b32 s, stage, 3; add.u32 full, s, smem; add.u32 full, full, 4096; add.u32 empty, full, 24;
  FULL: mbarrier.try_wait.parity.shared::cta.b64 r, [full], phase; @!r bra FULL;
  shl.b32 s, stage, 10; add.u32 s, s, smem; sub.u32 t0, tx, 32; shl.b32 t0, t0, 3; add.u32 s, s, t0;
  ld.shared.v2.u32 {{t1,t2}}, [s]; mad.lo.u32 fold, fold, 31, t1; xor.b32 fold, fold, t2;
  bar.sync 1, 96;
  mbarrier.arrive.shared::cta.b64 _, [empty];
  add.u32 tile, tile, 1; add.u32 stage, stage, 1; setp.eq.u32 r, stage, 3; @r mov.b32 stage, 0; @r xor.b32 phase, phase, 1;
  setp.lt.u32 r, tile, 16; @r bra CONSUME;
  DONE: bar.sync 0;
  mul.wide.u32 w, tx, 4; add.u64 w1, out, w; st.global.u32 [w1], fold;"""

_TOKEN = """
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem], 160; bar.sync 0;
  shl.b32 s, tx, 2; add.u32 s, s, smem; mul.lo.u32 t0, tx, 7; st.shared.u32 [s+64], t0;
  setp.lt.u32 q, tx, 32; @q mbarrier.arrive.shared.b64 w2, [smem], 2; @!q mbarrier.arrive.shared.b64 w2, [smem];
  WAIT: mbarrier.test_wait.shared.b64 q, [smem], w2; @!q bra WAIT;
  xor.b32 t1, tx, 127; shl.b32 s, t1, 2; add.u32 s, s, smem; ld.shared.u32 t2, [s+64];
  bar.sync 0;
  setp.lt.u32 q, tx, 64; @!q bra SECOND;
  shl.b32 s, tx, 2; add.u32 s, s, smem; st.shared.u32 [s+64], tx; bar.arrive 3, 128; bra STORE;
  SECOND: bar.sync 3, 128; sub.u32 t3, tx, 64; shl.b32 t3, t3, 2; add.u32 t3, t3, smem; ld.shared.u32 t3, [t3+64]; add.u32 t2, t2, t3;
  STORE: mul.wide.u32 w, tx, 4; add.u64 w1, out, w; st.global.u32 [w1], t2;"""

_DROP_AND_EXPECT = """  // arrive_drop lowers later counts; expect_tx and complete_tx by hand; a noComplete arrival and pending_count
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem], 4; @p mbarrier.init.shared.b64 [smem+8], 2; bar.sync 0;
  mov.b32 t0, 0; @!p bra JOIN;
  mbarrier.arrive_drop.shared.b64 w2, [smem]; mbarrier.arrive.shared.b64 _, [smem], 3;
  mbarrier.test_wait.shared.b64 q, [smem], w2; selp.b32 t0, 1, 0, q;
  mbarrier.arrive.shared.b64 w2, [smem], 2; mbarrier.test_wait.shared.b64 q, [smem], w2; selp.b32 t1, 2, 0, q; or.b32 t0, t0, t1;
  mbarrier.arrive.shared.b64 w3, [smem]; mbarrier.test_wait.shared.b64 q, [smem], w2; selp.b32 t1, 4, 0, q; or.b32 t0, t0, t1;
  mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [smem+8], 64;
  mbarrier.arrive.shared.b64 w4, [smem+8], 2; mbarrier.test_wait.shared.b64 q, [smem+8], w4; selp.b32 t1, 8, 0, q; or.b32 t0, t0, t1;
  mbarrier.complete_tx.relaxed.cta.shared::cta.b64 [smem+8], 64; mbarrier.test_wait.shared.b64 q, [smem+8], w4; selp.b32 t1, 16, 0, q; or.b32 t0, t0, t1;
  mbarrier.arrive.noComplete.shared.b64 w5, [smem+8], 1; mbarrier.pending_count.b64 t1, w5; shl.b32 t1, t1, 8; or.b32 t0, t0, t1;
  JOIN: mul.wide.u32 w, tx, 4; add.u64 w1, out, w; st.global.u32 [w1], t0;"""

_ONE_THREAD_LOOP = """  // one lane works while the rest of its warp waits at the block's barrier
  setp.ne.u32 p, tx, 5; @p bra JOIN;
  mov.b32 t0, 0; mov.b32 t1, 1;
  LOOP: mul.lo.u32 t1, t1, 1664525; add.u32 t1, t1, 1013904223; add.u32 t0, t0, 1; setp.lt.u32 q, t0, 200; @q bra LOOP;
  st.shared.u32 [smem], t1;
  JOIN: barrier.sync 0;
  ld.shared.u32 t2, [smem]; mul.wide.u32 w, tx, 4; add.u64 w1, out, w; st.global.u32 [w1], t2;"""

_GROUPS = """  // four warps in two named barriers, thread counts given, then swapped partners
  shl.b32 s, tx, 2; add.u32 s, s, smem; st.shared.u32 [s], tx;
  shr.u32 t0, tx, 6; add.u32 t1, t0, 1; barrier.sync t1, 64;
  xor.b32 t2, tx, 32; shl.b32 u, t2, 2; add.u32 u, u, smem; ld.shared.u32 t3, [u];
  bar.sync 0; st.shared.u32 [s], t3;
  shr.u32 t0, tx, 5; and.b32 t0, t0, 1; add.u32 t1, t0, 8; barrier.sync.aligned t1, 64;
  xor.b32 t2, tx, 64; shl.b32 u, t2, 2; add.u32 u, u, smem; ld.shared.u32 t4, [u]; mad.lo.u32 t4, t4, 256, t3;
  mul.wide.u32 w, tx, 4; add.u64 w1, out, w; st.global.u32 [w1], t4;"""


def _buffers(rng: np.random.Generator) -> Buffers:
    return {"src": random_bits(rng, 16 * 256), "out": np.zeros(128, np.uint32)}


def cases() -> list[Case]:
    """All bit for bit."""
    one_lane = _RING.format(skip="@!p bra DONE;", guard="")
    whole_warp = _RING.format(skip="", guard="@p")
    return [
        Case("barriers/ring.one_lane_produces", one_lane, _buffers, smem=8192),
        Case("barriers/ring.whole_warp_waits", whole_warp, _buffers, smem=8192),
        Case("barriers/token", _TOKEN, _buffers, smem=1024),
        Case("barriers/drop_and_expect", _DROP_AND_EXPECT, _buffers, smem=64),
        Case("barriers/one_thread_loop", _ONE_THREAD_LOOP, _buffers, smem=64),
        Case("barriers/groups", _GROUPS, _buffers, smem=512),
    ]

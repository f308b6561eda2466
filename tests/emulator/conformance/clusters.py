"""Thread-block clusters: distributed shared memory, remote barriers, multicast, special registers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from emulator.conformance.case import Buffers, Case, TensorMap, random_bits

_CLUSTER_SYNC = "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
_RANK = ".reg .b32 rank, ranks; mov.u32 rank, %cluster_ctarank; mov.u32 ranks, %cluster_nctarank;"

# Every CTA writes a pattern, reads its neighbour's, stores into it, and adds into rank 0's memory.
_NEIGHBOURS = f"""
  {_RANK}
  shl.b32 s, tx, 2; add.u32 s, s, smem; mad.lo.u32 t0, rank, 1000, tx;
  st.shared.u32 [s], t0; st.shared.u32 [s+512], rank; mov.b32 t1, 0; st.shared.u32 [s+1024], t1;
  {_CLUSTER_SYNC}
  add.u32 t1, rank, 1; rem.u32 t1, t1, ranks; mapa.shared::cluster.u32 u, s, t1; ld.shared::cluster.u32 t2, [u];
  mul.lo.u32 t3, t2, 3; st.shared::cluster.u32 [u+512], t3;
  mapa.shared::cluster.u32 t4, smem, 0; and.b32 t3, tx, 15; shl.b32 t3, t3, 2; add.u32 t4, t4, t3; red.shared::cluster.add.u32 [t4+1024], t2;
  {_CLUSTER_SYNC}
  ld.shared.u32 t3, [s+512]; ld.shared.u32 t1, [s+1024]; mov.u32 t0, %clusterid.x; shl.b32 t0, t0, 8; or.b32 t0, t0, rank;
  mul.wide.u32 w, gi, 16; add.u64 w1, out, w; st.global.v4.u32 [w1], {{t2,t3,t1,t0}};"""

_GENERIC = f"""
  {_RANK}
  shl.b32 s, tx, 2; add.u32 s, s, smem; mad.lo.u32 t0, rank, 1000, tx; st.shared.u32 [s], t0;
  {_CLUSTER_SYNC}
  xor.b32 t1, rank, 1; cvt.u64.u32 w0, s; cvta.shared.u64 w0, w0; mapa.u64 w0, w0, t1; ld.u32 t2, [w0];
  mul.wide.u32 w, gi, 4; add.u64 w1, out, w; st.global.u32 [w1], t2;
  {_CLUSTER_SYNC}"""

_SPECIAL_REGISTERS = """
  mov.u32 t0, %cluster_ctaid.x; mov.u32 t1, %cluster_ctaid.y; mad.lo.u32 t0, t0, 10, t1;
  mov.u32 t1, %clusterid.x; mov.u32 u, %clusterid.y; mad.lo.u32 t1, t1, 10, u;
  mov.u32 t2, %cluster_ctarank; mov.u32 u, %cluster_nctaid.y; mad.lo.u32 t2, t2, 10, u;
  mov.u32 t3, %nclusterid.x; mov.u32 u, %nclusterid.y; mad.lo.u32 t3, t3, 10, u;
  mov.u32 u, %ctaid.y; mad.lo.u32 u, u, 4, bx; mad.lo.u32 u, u, 32, tx; mul.wide.u32 w, u, 16; add.u64 w1, out, w;
  st.global.v4.u32 [w1], {t0,t1,t2,t3};"""

_REMOTE_ARRIVE = f"""
  {_RANK}
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem], 2; @p fence.mbarrier_init.release.cluster;
  {_CLUSTER_SYNC}
  @!p bra WAIT;
  mapa.shared::cluster.u32 u, smem, 0; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [u];
  mapa.shared::cluster.u32 u, smem, 1; mbarrier.arrive.release.cluster.shared::cluster.b64 _, [u];
  WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [smem], 0; @!q bra WAIT;
  mul.wide.u32 w, gi, 4; add.u64 w1, out, w; st.global.u32 [w1], rank;
  {_CLUSTER_SYNC}"""

# A 512-byte transfer into the peer's (or both CTAs') memory, counted by the receiver's mbarrier.
_BEFORE = f"""
  {_RANK}
  setp.eq.u32 p, tx, 0; shl.b32 s, tx, 2; add.u32 s, s, smem; mad.lo.u32 t0, rank, 1000, tx;
  st.shared.u32 [s], t0; st.shared.u32 [s+1024], t0; fence.proxy.async.shared::cta;
  @p mbarrier.init.shared.b64 [smem+512], 1; @p fence.mbarrier_init.release.cluster;
  @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+512], 512;
  {_CLUSTER_SYNC}
  xor.b32 t1, rank, 1;
"""
_AFTER = f"""
  WAIT: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 q, [smem+512], 0; @!q bra WAIT;
  mul.wide.u32 w, gi, 4; add.u64 w1, out, w; ld.shared.u32 t0, [s]; st.global.u32 [w1], t0;
  {_CLUSTER_SYNC}"""
_TRANSFERS = {
    "bulk.multicast": "mov.b16 h, 3; setp.ne.u32 q, rank, 0; @q bra WAIT; @!p bra WAIT; cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [smem], [src], 512, [smem+512], h;",
    "bulk.shared_to_peer": "@!p bra WAIT; mapa.shared::cluster.u32 u, smem, t1; add.u32 t2, u, 512; add.u32 t3, smem, 1024; cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [u], [t3], 512, [t2];",
    "st.async": "mapa.shared::cluster.u32 u, s, t1; mapa.shared::cluster.u32 t2, smem, t1; add.u32 t2, t2, 512; st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [u], tx, [t2];",
}  # fmt: skip

_ASYNC_REDUCTIONS = {  # every thread into one of 16 words of the peer; the order does not matter
    "add.u32": "tx", "add.s32": "t0", "min.u32": "tx", "max.s32": "tx", "and.b32": "tx", "or.b32": "tx", "xor.b32": "t0",
    "inc.u32": "1000000", "dec.u32": "1000000",
}  # fmt: skip
_TRANSFERS |= {
    f"red.async.{op}": "and.b32 t2, tx, 15; shl.b32 t2, t2, 2; add.u32 t2, t2, smem; mapa.shared::cluster.u32 u, t2, t1; "
    f"mapa.shared::cluster.u32 t2, smem, t1; add.u32 t2, t2, 512; mov.b32 t3, {value}; "
    f"red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.{op} [u], t3, [t2];"
    for op, value in _ASYNC_REDUCTIONS.items()
}
_TRANSFERS["red.async.add.u64"] = (
    "and.b32 t2, tx, 15; shl.b32 t2, t2, 3; add.u32 t2, t2, smem; mapa.shared::cluster.u32 u, t2, t1; setp.ge.u32 q, tx, 64; "
    "mapa.shared::cluster.u32 t2, smem, t1; add.u32 t2, t2, 512; mul.wide.u32 w, tx, 0x80000001; @q bra WAIT; "
    "red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u64 [u], w, [t2];"
)


def _multicast(ranks: int, mask: int) -> Case:
    """Each CTA loads its 16 rows of a 2-D tensor into every CTA of the mask."""
    size = 2048 * ranks
    body = f"""
  {_RANK}
  setp.eq.u32 p, tx, 0; mov.b32 t0, -1; mov.u32 s, tx;
  FILL: shl.b32 t1, s, 2; add.u32 t1, t1, smem; st.shared.u32 [t1], t0; add.u32 s, s, 128; setp.lt.u32 q, s, {size // 4}; @q bra FILL;
  fence.proxy.async.shared::cta;
  @p mbarrier.init.shared.b64 [smem+{size}], 1; @p fence.mbarrier_init.release.cluster;
  {_CLUSTER_SYNC}
  .reg .b32 mine; shr.u32 mine, {mask}, rank; and.b32 mine, mine, 1;
  @!p bra WAIT;
  setp.eq.u32 q, mine, 1; @q mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+{size}], {size};
  shl.b32 t2, rank, 4; shl.b32 s, rank, 11; add.u32 s, s, smem; mov.b16 h, {mask}; mov.b32 t3, 64;
  cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [s], [map, {{t3, t2}}], [smem+{size}], h;
  WAIT: setp.eq.u32 q, mine, 0; @q bra BACK;
  POLL: mbarrier.try_wait.parity.shared::cta.b64 q, [smem+{size}], 0; @!q bra POLL;
  BACK: {_CLUSTER_SYNC}
  mul.wide.u32 w, bx, {size}; add.u64 w1, out, w; mov.u32 s, tx;
  COPY: shl.b32 t1, s, 2; add.u32 t1, t1, smem; ld.shared.u32 t0, [t1]; mul.wide.u32 w, s, 4; add.u64 w2, w1, w; st.global.u32 [w2], t0;
  add.u32 s, s, 128; setp.lt.u32 q, s, {size // 4}; @q bra COPY;"""

    def buffers(rng: np.random.Generator) -> Buffers:
        return {
            "tensor": rng.integers(0, 256, 256 * 64, dtype=np.uint8),
            "map": TensorMap("tensor", "u8", (256, 64), (256,), (128, 16), 3),
            "out": np.zeros(ranks * size, np.uint8),
        }

    return Case(f"clusters/multicast{ranks}.mask{mask}", body, buffers, grid=(ranks, 1, 1), cluster=(ranks, 1, 1), smem=size + 128)  # fmt: skip


def _out(n: int) -> Callable[[np.random.Generator], Buffers]:
    return lambda rng: {"src": random_bits(rng, 8192), "out": np.full(n, 99, np.uint32)}


def cases() -> list[Case]:
    """All bit for bit."""
    pair = {"grid": (2, 1, 1), "cluster": (2, 1, 1)}
    return [
        *(Case(f"clusters/neighbours{n}", _NEIGHBOURS, _out(16 * 512), grid=(16, 1, 1), cluster=(n, 1, 1), smem=2048) for n in (2, 4, 8)),
        Case("clusters/generic_address", _GENERIC, _out(256), **pair, smem=2048),
        Case("clusters/special_registers", _SPECIAL_REGISTERS, _out(16 * 128), grid=(4, 4, 1), block=32, cluster=(2, 2, 1)),
        Case("clusters/remote_arrive", _REMOTE_ARRIVE, _out(256), **pair, smem=64),
        *(Case(f"clusters/{name}", _BEFORE + text + _AFTER, _out(256), **pair, smem=2048) for name, text in _TRANSFERS.items()),
        *(_multicast(n, mask) for n, mask in ((2, 3), (4, 15), (4, 5), (2, 2))),
    ]  # fmt: skip

"""What is not modelled is refused, and the message names the modifier or operand."""

from __future__ import annotations

import numpy as np
import ptxsim
import pytest
from emulator.core.ptx_kernel import run

REFUSED = [
    # body, part of the message
    ("add.rn.foo.f32 t0, t1, t2;", r"\.foo"),
    ("frobnicate.b32 t0, t1;", "frobnicate"),
    ("add.rz.f16 h, h, h;", r"\.rz"),
    ("add.sat.u32 t0, t1, t2;", r"\.sat"),
    ("min.relu.f32 t0, t1, t2;", r"\.relu"),
    ("cvt.rn.satfinite.e4m3x2.f32 h, t1, t2, t3;", "3 sources"),
    ("cvt.rs.bf16x2.f32 t0, t1, t2, t3;", r"\.rs"),
    ("cvt.rn.scaled::n2::ue8m0.f16x2.e4m3x2 t0, h;", "scaled"),
    ("ld.global.b128 t0, [a0];", "128"),
    ("ld.shared.foo.u32 t0, [smem];", r"\.foo"),
    ("atom.global.add.noftz.foo.f16x2 t0, [a0], t1;", r"\.foo"),
    ("ldmatrix.sync.aligned.m16n16.x1.trans.shared.b8 {t0, t1}, [smem];", "b16|m8n8"),
    ("shfl.sync.idx.b32.foo t0, t1, 0, 31, -1;", r"\.foo"),
    ("cp.async.bulk.tensor.2d.shared::cluster.global.im2col.mbarrier::complete_tx::bytes [smem], [a0, {t0, t1}], [smem];", "im2col"),
    ("cp.async.bulk.global.shared::cta.bulk_group.cp_mask [a0], [smem], 16, h;", "cp_mask"),
    ("tcgen05.ld.sync.aligned.16x32bx2.x1.b32 {t0}, [t1], 2;", "32x32b, .16x64b"),
    ("tcgen05.ld.red.sync.aligned.32x32b.x1.b32.min {t0}, [t1];", "red|min"),
    ("tcgen05.shift.cta_group::1.down [t0];", "shift"),
    ("tcgen05.cp.cta_group::1.128x256b.b8x16.b6x16_p32 [t0], w;", "b8x16"),
    ("tcgen05.mma.sp.cta_group::1.kind::f16 [t0], w, w, [t1], t2, p;", "sp"),
    ("tcgen05.mma.ws.cta_group::1.kind::f16 [t0], w, w, t2, p;", "ws"),
    ("tcgen05.mma.cta_group::1.kind::f16.ashift [t0], [t1], w, t2, p;", "ashift"),
    ("tcgen05.mma.cta_group::1.kind::mxf4nvf4.block_scale.scale_vec::1X [t0], w, w, t2, [t3], [t4], p;", "scale_vec::1X"),
    ("wgmma.mma_async.sp.sync.aligned.m64n8k32.f32.bf16.bf16 {t0,t1,t2,t3}, w, w, t4, 0, 1, 1, 1, 0, 0;", "sp|sparse"),
    ("call foo;", "call"),
    ("tex.1d.v4.f32.f32 {t0,t1,t2,t3}, [a0, {t4}];", "tex"),
    ("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {t0,t1,t2,t3}, {t4,t5,t6,t7}, {t8,t9}, {t0,t1,t2,t3};", "mma"),
    ("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.min.b32 [smem], t0, [smem];", "min.b32"),
    ("red.async.release.gpu.global.mbarrier::complete_tx::bytes.add.u32 [a0], t0, [smem];", "relaxed"),
    ("setmaxnreg.inc.sync.aligned.u32 100;", "multiple of 8"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "message"), REFUSED, ids=[r[0].split(" ")[0] for r in REFUSED])
def test_refused_by_name(body, message):
    with pytest.raises(ptxsim.Unsupported, match=message):
        run(body, np.zeros(64, np.uint32))


def test_message_has_line_and_text():
    with pytest.raises(ptxsim.Unsupported, match=r"line \d+: add\.rn\.foo\.f32 t0, t1, t2"):
        run("\nadd.rn.foo.f32 t0, t1, t2;", np.zeros(1, np.uint32))


def test_unknown_schedule_and_architecture():
    with pytest.raises(ValueError, match="schedule"):
        ptxsim.gpu(schedule="never")
    with pytest.raises(ValueError, match="arch"):
        ptxsim.gpu("sm_75")

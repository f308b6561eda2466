"""One table row per instruction form; expected values follow the PTX ISA's own words."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.core.ptx_kernel import as_f32, evaluate, f32, run

U = lambda *v: np.array([x & 0xFFFFFFFF for x in v], np.uint32)  # noqa: E731
W = lambda *v: np.array([x & (1 << 64) - 1 for x in v], np.uint64)  # noqa: E731

INTEGER = [
    # code, inputs, expected
    ("add.u32 $0, $1, $2;", [U(1, -1), U(2, 2)], U(3, 1)),
    ("sub.s32 $0, $1, $2;", [U(1, 0), U(2, 1)], U(-1, -1)),
    ("add.sat.s32 $0, $1, $2;", [U(0x7FFFFFFF, 0x80000000), U(1, -1)], U(0x7FFFFFFF, 0x80000000)),
    ("add.cc.u32 $0, $1, $2; addc.u32 $0, $3, 0;", [U(-1, 1), U(1, 1), U(5, 5)], U(6, 5)),
    ("sub.cc.u32 $0, $1, $2; subc.u32 $0, $3, 0;", [U(0, 1), U(1, 1), U(5, 5)], U(4, 5)),
    ("mul.lo.s32 $0, $1, $2;", [U(-3, 70000), U(5, 70000)], U(-15, 70000 * 70000)),
    ("mul.hi.u32 $0, $1, $2;", [U(-1), U(-1)], U(0xFFFFFFFE)),
    ("mul.hi.s32 $0, $1, $2;", [U(-1, -2), U(-1, 3)], U(0, -1)),
    ("mad.lo.s32 $0, $1, $2, $3;", [U(3), U(-4), U(5)], U(-7)),
    ("mul24.lo.s32 $0, $1, $2;", [U(0x800000), U(2)], U(-0x1000000)),
    ("div.s32 $0, $1, $2;", [U(-7, 7, 7), U(2, -2, 0)], U(-3, -3, -1)),
    ("rem.s32 $0, $1, $2;", [U(-7, 7), U(2, -2)], U(-1, 1)),
    ("rem.u32 $0, $1, $2;", [U(7, 7), U(4, 0)], U(3, -1)),
    ("min.s32 $0, $1, $2;", [U(-1, 3), U(1, 2)], U(-1, 2)),
    ("max.u32 $0, $1, $2;", [U(-1, 3), U(1, 2)], U(-1, 3)),
    ("max.s32.relu $0, $1, $2;".replace("s32.relu", "relu.s32"), [U(-5, 1), U(-3, 2)], U(0, 2)),
    ("abs.s32 $0, $1;", [U(-5, 0x80000000)], U(5, 0x80000000)),
    ("neg.s32 $0, $1;", [U(5)], U(-5)),
    ("shl.b32 $0, $1, $2;", [U(1, 1, 1), U(4, 31, 32)], U(16, 1 << 31, 0)),
    ("shr.u32 $0, $1, $2;", [U(0x80000000, 1), U(31, 40)], U(1, 0)),
    ("shr.s32 $0, $1, $2;", [U(0x80000000, 0x80000000), U(31, 40)], U(-1, -1)),
    ("shf.l.wrap.b32 $0, $1, $2, $3;", [U(0x80000000), U(1), U(33)], U(3)),
    ("shf.r.clamp.b32 $0, $1, $2, $3;", [U(0xAAAA), U(0x1234), U(32)], U(0x1234)),
    ("and.b32 $0, $1, $2; xor.b32 $0, $0, $3;", [U(12), U(10), U(1)], U(9)),
    ("not.b32 $0, $1;", [U(0)], U(-1)),
    ("cnot.b32 $0, $1;", [U(0, 7)], U(1, 0)),
    ("lop3.b32 $0, $1, $2, $3, 0x96;", [U(12), U(10), U(6)], U(12 ^ 10 ^ 6)),
    ("prmt.b32 $0, $1, $2, $3;", [U(0x33221100, 0x80), U(0x77665544, 0), U(0x0427, 0x8)], U(0x00442277, 0x808080FF)),
    ("prmt.b32.f4e $0, $1, $2, $3;", [U(0x33221100), U(0x77665544), U(1)], U(0x44332211)),
    ("bfe.u32 $0, $1, $2, $3;", [U(0xABCD, 0xFF), U(4, 28), U(8, 8)], U(0xBC, 0)),
    ("bfe.s32 $0, $1, $2, $3;", [U(0xF0), U(4), U(4)], U(-1)),
    ("bfi.b32 $0, $1, $2, $3, 8;", [U(0xAB), U(0), U(4)], U(0xAB0)),
    ("bmsk.clamp.b32 $0, $1, $2;", [U(4, 30), U(3, 8)], U(0x70, 0xC0000000)),
    ("szext.clamp.s32 $0, $1, $2;", [U(0x8), U(4)], U(-8)),
    ("popc.b32 $0, $1;", [U(0xF0F0)], U(8)),
    ("clz.b32 $0, $1;", [U(0, 1)], U(32, 31)),
    ("brev.b32 $0, $1;", [U(1)], U(1 << 31)),
    ("bfind.u32 $0, $1;", [U(0, 0x100)], U(-1, 8)),
    ("bfind.s32 $0, $1;", [U(-1, -2)], U(-1, 0)),
    ("bfind.shiftamt.u32 $0, $1;", [U(0x100)], U(23)),
    ("fns.b32 $0, $1, 0, 2;", [U(0b1010)], U(3)),
    ("dp4a.s32.s32 $0, $1, $2, $3;", [U(0x01FF0203), U(0x01010101), U(10)], U(10 + 1 - 1 + 2 + 3)),
    ("sad.u32 $0, $1, $2, $3;", [U(3), U(10), U(1)], U(8)),
    ("add.u16x2 $0, $1, $2;", [U(0x0001FFFF), U(0x00010001)], U(0x00020000)),
    ("min.s16x2 $0, $1, $2;", [U(0x0001FFFF), U(0x00020001)], U(0x0001FFFF)),
    ("slct.b32.s32 $0, $1, $2, $3;", [U(1, 1), U(2, 2), U(0, -1)], U(1, 2)),
    ("setp.lt.s32 p|q, $1, $2; selp.b32 $0, 1, 0, p; @q or.b32 $0, $0, 2;", [U(-1, 1), U(0, 0)], U(1, 2)),
    ("setp.ne.u32 z, $3, 0; setp.lo.and.u32 p, $1, $2, z; selp.b32 $0, 1, 0, p;", [U(1, 1), U(-1, -1), U(1, 0)], U(1, 0)),
    ("set.lt.u32.s32 $0, $1, $2;", [U(-1, 1), U(0, 0)], U(-1, 0)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "inputs", "expected"), INTEGER, ids=[c[0].split(" ")[0] + f"#{i}" for i, c in enumerate(INTEGER)]
)
def test_integer(code, inputs, expected):
    assert evaluate(code, *inputs).tolist() == expected.tolist()


WIDE = [
    ("add.u64 $0, $1, $2;", [W(-1), W(1)], W(0)),
    ("mul.hi.u64 $0, $1, $2;", [W(-1), W(-1)], W(-2)),
    ("mul.hi.s64 $0, $1, $2;", [W(-1), W(3)], W(-1)),
    ("shr.s64 $0, $1, 63;", [W(1 << 63)], W(-1)),
    ("min.s64 $0, $1, $2;", [W(-1), W(1)], W(-1)),
    ("bfe.u64 $0, $1, 32, 8;", [W(0xAB_00000000)], W(0xAB)),
    ("{.reg .b32 x, y; mov.b64 {x, y}, $1; mov.b64 $0, {y, x};}", [W(0x1122334455667788)], W(0x5566778811223344)),
    ("{.reg .b32 x; cvt.u32.u64 x, $1; mul.wide.s32 $0, x, x;}", [W(-3)], W(9)),
    ("{.reg .b32 x; cvt.u32.u64 x, $1; cvt.s64.s32 $0, x;}", [W(0x80000000)], W(-(1 << 31))),
]  # fmt: skip


@pytest.mark.parametrize(("code", "inputs", "expected"), WIDE, ids=[str(i) for i in range(len(WIDE))])
def test_wide_integer(code, inputs, expected):
    assert evaluate(code, *inputs, wide=True).tolist() == expected.tolist()


INF, NAN = float("inf"), float("nan")
FLOAT = [
    ("add.rn.f32 $0, $1, $2;", [f32(1, INF), f32(2**-24, -INF)], f32(1, NAN)),
    ("add.rp.f32 $0, $1, $2;", [f32(1), f32(2**-30)], f32(np.nextafter(np.float32(1), np.float32(2)))),
    ("add.rz.f32 $0, $1, $2;", [f32(-1), f32(2**-30)], f32(np.nextafter(np.float32(-1), np.float32(0)))),
    ("add.rm.f32 $0, $1, $2;", [f32(1), f32(-1)], U(0x80000000)),
    ("fma.rn.f32 $0, $1, $2, $3;", [f32(1 + 2**-12), f32(1 - 2**-12), f32(-1)], f32(-(2.0**-24))),
    ("mul.ftz.f32 $0, $1, $2;", [f32(2**-100), f32(2**-40)], f32(0)),
    ("add.sat.f32 $0, $1, $2;", [f32(0.75, -1, NAN), f32(0.5, 0.5, 0)], f32(1, 0, 0)),
    ("min.f32 $0, $1, $2;", [U(0x80000000, *f32(NAN)), U(0, *f32(3))], U(0x80000000, *f32(3))),
    ("max.NaN.f32 $0, $1, $2;", [f32(NAN), f32(3)], U(0x7FFFFFFF)),
    ("max.f32 $0, $1, $2, $3;", [f32(1), f32(2), f32(3)], f32(3)),
    ("min.xorsign.abs.f32 $0, $1, $2;", [f32(-3), f32(2)], f32(-2)),
    ("abs.f32 $0, $1;", [f32(-2)], f32(2)),
    ("div.rn.f32 $0, $1, $2;", [f32(1, 1), f32(3, 0)], f32(1 / 3, INF)),
    ("div.rz.f32 $0, $1, $2;", [f32(2), f32(3)], f32(np.nextafter(np.float32(2 / 3), np.float32(0)))),
    ("sqrt.rn.f32 $0, $1;", [f32(2, -1)], f32(np.sqrt(np.float32(2)), NAN)),
    ("ex2.approx.f32 $0, $1;", [f32(3, -1)], f32(8, 0.5)),
    ("rcp.approx.ftz.f32 $0, $1;", [f32(4, 2**-130)], f32(0.25, INF)),
    ("copysign.f32 $0, $1, $2;", [f32(-1), f32(5)], f32(-5)),
    ("testp.subnormal.f32 p, $1; selp.b32 $0, 1, 0, p;", [f32(2**-130, 0, 1)], U(1, 0, 0)),
    ("setp.lt.f32 p, $1, $2; selp.b32 $0, 1, 0, p;", [f32(1, NAN), f32(2, 1)], U(1, 0)),
    ("setp.ltu.f32 p, $1, $2; selp.b32 $0, 1, 0, p;", [f32(3, NAN), f32(2, 1)], U(0, 1)),
    ("add.rn.f32.bf16 $0, h, $2;", [U(0x3F80), f32(2)], f32(3)),
    ("fma.rn.bf16x2 $0, $1, $2, $3;", [U(0x3F803F80), U(0x40004000), U(0x3F803F80)], U(0x40404040)),
    ("add.rn.f16x2 $0, $1, $2;", [U(0x3C003C00), U(0x40003C00)], U(0x42004000)),
    ("fma.rn.relu.bf16x2 $0, $1, $2, $3;", [U(0xBF80BF80), U(0x3F803F80), U(0)], U(0)),
]  # fmt: skip


@pytest.mark.parametrize(
    ("code", "inputs", "expected"), FLOAT, ids=[c[0].split(" ")[0] + f"#{i}" for i, c in enumerate(FLOAT)]
)
def test_floating(code, inputs, expected):
    if " h," in code:
        code = "cvt.u16.u32 h, $1; " + code
    got = evaluate(code, *inputs)
    same = (got == expected) | (np.isnan(as_f32(got)) & np.isnan(as_f32(expected)) & (got == 0x7FFFFFFF))
    assert same.all(), [hex(int(x)) for x in got]


def test_f32x2():
    a = f32(1.5, 2.5).view(np.uint64)
    b = f32(2, 4).view(np.uint64)
    got = evaluate("mul.rn.f32x2 $0, $1, $2;", a, b, wide=True)
    assert got.view(np.float32).tolist() == [3, 10]
    got = evaluate("fma.rn.f32x2 $0, $1, $2, $1;", a, b, wide=True)
    assert got.view(np.float32).tolist() == [4.5, 12.5]


LANES = np.arange(32, dtype=np.uint32)
WARP = [
    ("shfl.sync.idx.b32 $0, $1, 5, 31, -1;", np.full(32, 5)),
    ("shfl.sync.up.b32 $0, $1, 1, 0, -1;", np.maximum(np.arange(32) - 1, 0)),
    ("shfl.sync.down.b32 $0, $1, 4, 31, -1;", np.where(np.arange(32) + 4 < 32, np.arange(32) + 4, np.arange(32))),
    ("shfl.sync.bfly.b32 $0, $1, 16, 31, -1;", np.arange(32) ^ 16),
    ("shfl.sync.bfly.b32 $0, $1, 1, 0x181f, -1;", np.arange(32) ^ 1),
    ("{.reg .b32 x; mov.b32 x, 7; shfl.sync.idx.b32 x|p, x, 20, 0x0007, -1; selp.b32 $0, 1, 0, p;}", np.zeros(32)),
    ("setp.lt.u32 p, $1, 3; vote.sync.ballot.b32 $0, p, -1;", np.full(32, 7)),
    ("setp.lt.u32 p, $1, 3; vote.sync.any.pred q, p, -1; selp.b32 $0, 1, 0, q;", np.ones(32)),
    ("redux.sync.add.u32 $0, $1, -1;", np.full(32, 496)),
    ("redux.sync.max.s32 $0, $1, -1;", np.full(32, 31)),
    ("{.reg .b32 x; and.b32 x, $1, 1; match.any.sync.b32 $0, x, -1;}", np.where(np.arange(32) % 2, 0xAAAAAAAA, 0x55555555)),
    ("elect.sync $0|p, -1; selp.b32 $0, 1, 0, p;", np.arange(32) == 0),
    ("activemask.b32 $0;", np.full(32, 0xFFFFFFFF)),
    ("mov.u32 $0, %lanemask_lt;", (1 << np.arange(32)) - 1),
]  # fmt: skip


@pytest.mark.parametrize(("code", "expected"), WARP, ids=[str(i) for i in range(len(WARP))])
def test_warp(code, expected):
    assert evaluate(code, LANES).tolist() == np.asarray(expected).astype(np.uint32).tolist()


def test_partial_member_mask():
    code = "setp.lt.u32 p, $1, 16; mov.b32 $0, 0; @p redux.sync.add.u32 $0, $1, 0x0000ffff; @!p redux.sync.add.u32 $0, $1, 0xffff0000;"
    assert evaluate(code, LANES).tolist() == [120] * 16 + [376] * 16


def test_sync_instruction_waits_for_a_diverged_lane():
    """Lanes that reach a shuffle at different times exchange values all the same."""
    code = """
      mov.b32 $0, $1; setp.lt.u32 p, $1, 8; @!p bra MEET;
      add.u32 $0, $0, 100;
      MEET: shfl.sync.bfly.b32 $0, $0, 31, 31, -1;
    """
    expected = [(31 - i) + (100 if 31 - i < 8 else 0) for i in range(32)]
    assert evaluate(code, LANES).tolist() == expected


def test_loop_and_divergence():
    """Each lane counts its own trips."""
    code = """
      mov.b32 $0, 0;
      LOOP: setp.ge.u32 p, $0, $1; @p bra END;
      add.u32 $0, $0, 1; bra LOOP; END:
    """
    assert evaluate(code, LANES).tolist() == list(range(32))


def test_local_memory_and_vectors():
    body = """
      .local .align 16 .b8 stack[64];
      mov.u64 w, stack; mul.wide.u32 w1, lane, 16; add.u64 w2, a0, w1;
      st.local.v4.u32 [w], {lane, 1, 2, 3}; ld.local.v2.u32 {t0, t1}, [w+8]; ld.local.u32 t2, [w];
      st.global.v4.u32 [w2], {t0, t1, t2, 9};
    """
    out = np.zeros((32, 4), np.uint32)
    run(body, out)
    assert (out == np.stack([np.full(32, 2), np.full(32, 3), np.arange(32), np.full(32, 9)], 1)).all()


def test_sub_word_loads_extend():
    data = np.array([0x80, 0x7F, 0xFF, 0x01], np.uint8)
    out = np.zeros(4, np.uint64)
    body = """
      .reg .s64 x; ld.global.s8 t0, [a0]; ld.global.u8 t1, [a0]; cvt.u64.u32 w, t0; st.global.u64 [a1], w;
      cvt.u64.u32 w, t1; st.global.u64 [a1+8], w; ld.global.s32 x, [a0]; st.global.u64 [a1+16], x;
      ld.global.s16 t2, [a0+2]; cvt.u64.u32 w, t2; st.global.u64 [a1+24], w;
    """
    run(body, data, out)
    assert out.tolist() == [0xFFFFFF80, 0x80, 0x01FF7F80, 0x1FF]


ATOMICS = [
    ("add.u32", 5, 3, 8), ("min.s32", 5, -3, -3), ("max.u32", 5, 9, 9), ("and.b32", 12, 10, 8), ("or.b32", 12, 10, 14),
    ("xor.b32", 12, 10, 6), ("exch.b32", 5, 7, 7), ("inc.u32", 5, 5, 0), ("inc.u32", 4, 5, 5), ("dec.u32", 0, 5, 5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "old", "value", "new"), ATOMICS, ids=[a[0] + str(i) for i, a in enumerate(ATOMICS)]
)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(op, old, value, new, space):
    cell, out = U(old), U(0)
    place = "[a0]" if space == "global" else "[smem]"
    body = f"""
      setp.ne.u32 p, tx, 0; @p bra END; ld.global.u32 t0, [a0]; st.shared.u32 [smem], t0;
      atom.{space}.{op} t1, {place}, {value}; st.global.u32 [a1], t1;
      ld.shared.u32 t0, [smem]; {"st.global.u32 [a0], t0;" if space == "shared" else ""} END:
    """
    run(body, cell, out)
    assert (int(cell[0]), int(out[0])) == (new & 0xFFFFFFFF, old)


def test_atomic_add_f32_flushes_in_global_memory_only():
    for space, expected in (("global", 0.0), ("shared", 2.0**-130)):
        cell = f32(0)
        body = f"""
          setp.ne.u32 p, tx, 0; @p bra END; mov.b32 t0, 0; st.shared.u32 [smem], t0;
          red.{space}.add.f32 {"[a0]" if space == "global" else "[smem]"}, 0f00080000;
          ld.shared.u32 t0, [smem]; {"st.global.u32 [a0], t0;" if space == "shared" else ""} END:
        """
        run(body, cell)
        assert as_f32(cell)[0] == expected


def test_ldmatrix_stmatrix_and_movmatrix():
    """An 8x8 tile of 16-bit elements, transposed in three ways."""
    tile = np.arange(64, dtype=np.uint16).reshape(8, 8)
    out = np.zeros((3, 8, 8), np.uint16)
    body = """
      shl.b32 t0, lane, 2; cvt.u64.u32 w, t0; add.u64 w1, a0, w; ld.global.u32 t1, [w1];
      add.u32 t2, smem, t0; st.shared.u32 [t2], t1; bar.warp.sync -1;
      and.b32 t3, lane, 7; shl.b32 t3, t3, 4; add.u32 t3, smem, t3;
      ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {t4}, [t3];
      ldmatrix.sync.aligned.m8n8.x1.shared.b16 {t5}, [t3];
      movmatrix.sync.aligned.m8n8.trans.b16 t6, t5;
      add.u32 t7, t3, 128; stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [t7], {t5}; bar.warp.sync -1;
      ld.shared.u32 t8, [t2+128];
      add.u64 w2, a1, w; st.global.u32 [w2], t4; st.global.u32 [w2+128], t6; st.global.u32 [w2+256], t8;
    """
    run(body, tile, out)
    for i in range(3):
        assert (out[i] == tile.T).all()

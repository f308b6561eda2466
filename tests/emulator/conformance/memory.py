"""Memory: global and shared loads and stores, ldmatrix and stmatrix, atomics and reductions, cp.async."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from emulator.conformance.case import Buffers, Case, f32_bits, random_bits

_THREADS = 512


def _words(n_in: int, n_out: int, fill: int = 0) -> Callable[[np.random.Generator], Buffers]:
    return lambda rng: {"src": random_bits(rng, n_in), "out": np.full(n_out, fill, np.uint32)}


# ---- global memory -------------------------------------------------------------------------------------------------

_GLOBAL = {  # name: (bytes between threads, instructions; w0 is the thread's source address, w1 its destination)
    "v4.b32": (16, "ld.global.v4.b32 {t0,t1,t2,t3}, [w0]; st.global.v4.b32 [w1], {t0,t1,t2,t3};"),
    "nc.v4.u32": (16, "ld.global.nc.v4.u32 {t0,t1,t2,t3}, [w0]; st.global.cs.v4.u32 [w1], {t3,t2,t1,t0};"),
    "v2.b64": (16, "ld.global.v2.b64 {w2,w3}, [w0]; st.global.v2.b64 [w1], {w3,w2};"),
    "v2.u16": (4, "ld.global.v2.u16 {h0,h1}, [w0]; st.global.v2.u16 [w1], {h1,h0};"),
    "v4.u8": (4, "ld.global.v4.u8 {h0,h1,h2,h3}, [w0]; st.global.v4.u8 [w1], {h3,h2,h1,h0};"),
    "s8": (4, "ld.global.s8 t0, [w0+1]; st.global.b32 [w1], t0;"),
    "s16": (4, "ld.global.s16 t0, [w0+2]; st.global.b32 [w1], t0;"),
    "u8": (4, "ld.global.u8 t0, [w0+3]; st.global.b32 [w1], t0;"),
    "s32_in_64": (8, "ld.global.s32 w2, [w0]; st.global.b64 [w1], w2;"),
    "no_allocate.b64": (8, "ld.global.L1::no_allocate.b64 w2, [w0]; st.global.b64 [w1], w2;"),
    "nc.hinted.v4": (
        16,
        "ld.global.nc.L1::no_allocate.L2::256B.v4.b32 {t0,t1,t2,t3}, [w0]; st.global.v4.b32 [w1], {t1,t0,t3,t2};",
    ),
    "generic": (16, "ld.v4.u32 {t0,t1,t2,t3}, [w0]; st.v4.u32 [w1], {t1,t0,t3,t2};"),
    "predicated": (
        16,
        "ld.global.u32 t2, [w0]; and.b32 t1, t2, 1; setp.ne.u32 p, t1, 0; mov.b32 t0, -7; @p ld.global.u32 t0, [w0+4];"
        "@!p st.global.b32 [w1+4], t0; @p st.global.v2.b32 [w1], {t0,t2};",
    ),
    "narrow_stores": (
        4,
        "ld.global.u32 t0, [w0]; st.global.u8 [w1], t0; shr.u32 t0, t0, 8; st.global.u16 [w1+2], t0;",
    ),
    "few_lanes": (
        4,
        "setp.lt.u32 p, tx, 5; mov.b32 t0, 0; @p ld.global.u32 t0, [w0]; @p st.global.b32 [w1], t0;",
    ),
    "ordered": (
        16,
        "ld.relaxed.gpu.global.u32 t0, [w0]; ld.acquire.gpu.global.u32 t1, [w0+4]; ld.volatile.global.u32 t2, [w0+8];"
        "st.release.gpu.global.u32 [w1], t0; st.relaxed.gpu.global.u32 [w1+4], t1; st.volatile.global.u32 [w1+8], t2;",
    ),
}


def _global_cases() -> list[Case]:
    setup = "mul.wide.u32 w, gi, {}; add.u64 w0, src, w; add.u64 w1, out, w; "
    n = 4 * _THREADS
    return [
        Case(
            f"memory/global.{name}",
            setup.format(pitch) + text,
            _words(n, n, 0xABABABAB),
            grid=(_THREADS // 128, 1, 1),
        )
        for name, (pitch, text) in _GLOBAL.items()
    ]


# ---- shared memory -------------------------------------------------------------------------------------------------

_FILL_SHARED = """  // every thread stores 16 bytes, swizzled by 128 bytes
  mul.wide.u32 w, tx, 16; add.u64 w0, src, w; add.u64 w1, out, w;
  ld.global.v4.u32 {t0,t1,t2,t3}, [w0];
  shl.b32 s, tx, 4; shr.u32 u, s, 3; and.b32 u, u, 0x70; xor.b32 s, s, u; add.u32 s, s, smem;
  st.shared.v4.b32 [s], {t0,t1,t2,t3};
  bar.sync 0;
"""
_SHARED = {
    "swizzled.v4": "xor.b32 u, tx, 37; shl.b32 s, u, 4; add.u32 s, s, smem; ld.shared.v4.b32 {t0,t1,t2,t3}, [s]; st.global.v4.b32 [w1], {t0,t1,t2,t3};",
    "bytes": "mul.lo.u32 s, tx, 13; add.u32 s, s, smem; ld.shared.s8 t0, [s]; ld.shared.u8 t1, [s+1]; st.global.v2.b32 [w1], {t0,t1};",
    "v2.b16": "xor.b32 u, tx, 21; mul.lo.u32 s, u, 12; add.u32 s, s, smem; ld.shared.v2.b16 {h0,h1}, [s]; mov.b32 t0, {h1,h0}; st.global.b32 [w1], t0;",
    "v2.b64": "xor.b32 u, tx, 21; shl.b32 s, u, 4; add.u32 s, s, smem; ld.shared.v2.b64 {w2,w3}, [s]; add.s64 w2, w2, w3; st.global.b64 [w1], w2;",
    "generic": "shl.b32 s, tx, 4; add.u32 s, s, smem; cvt.u64.u32 w2, s; cvta.shared.u64 w2, w2; ld.v4.u32 {t0,t1,t2,t3}, [w2]; isspacep.shared p, w2; isspacep.global q, w2; selp.b32 t0, t0, 0, p; selp.b32 t1, 0, t1, q; st.global.v4.b32 [w1], {t0,t1,t2,t3};",
    "v2.b8": "setp.eq.u32 p, tx, 0; bar.sync 0; @p st.shared.b8 [smem+1], 7; bar.sync 0; mul.lo.u32 s, tx, 6; add.u32 s, s, smem; ld.shared.v2.b8 {h0,h1}, [s]; cvt.u32.u16 t0, h1; ld.shared.b8 h0, [s+5]; cvt.u32.u16 t1, h0; st.global.v2.b32 [w1], {t0,t1};",
    "broadcast": "ld.shared.v4.u32 {t0,t1,t2,t3}, [smem+48]; st.global.v4.b32 [w1], {t0,t1,t2,t3};",
    "predicated_store": "bar.sync 0; setp.gt.u32 p, tx, 99; shl.b32 s, tx, 2; add.u32 s, s, smem; @p st.shared.u16 [s+1024], tx; bar.sync 0; ld.shared.u32 t0, [s+1024]; st.global.b32 [w1], t0;",
    "one_lane_store": "bar.sync 0; setp.eq.u32 p, tx, 77; @p st.shared.u32 [smem], tx; bar.sync 0; ld.shared.u32 t0, [smem]; st.global.b32 [w1], t0;",
}  # fmt: skip


def _shared_cases() -> list[Case]:
    return [
        Case(f"memory/shared.{name}", _FILL_SHARED + text, _words(512, 512), smem=2048)
        for name, text in _SHARED.items()
    ]


# ---- ldmatrix, stmatrix, movmatrix ---------------------------------------------------------------------------------

_FILL_ROWS = """  // 256 rows of 16 bytes; u is the address of the row this lane names
  shl.b32 s, tx, 4; add.u32 s, s, smem; mul.wide.u32 w, tx, 16; add.u64 w0, src, w; add.u64 w1, out, w;
  ld.global.v4.u32 {t0,t1,t2,t3}, [w0]; st.shared.v4.b32 [s], {t0,t1,t2,t3};
  ld.global.v4.u32 {t0,t1,t2,t3}, [w0+2048]; st.shared.v4.b32 [s+2048], {t0,t1,t2,t3};
  bar.sync 0;
  mul.wide.u32 w, tx, 4; add.u64 w2, rows, w; ld.global.u32 u, [w2]; shl.b32 u, u, 4; add.u32 u, u, smem;
  mov.b32 t0, 0; mov.b32 t1, 0; mov.b32 t2, 0; mov.b32 t3, 0;
"""


def _any_rows(rng: np.random.Generator) -> Buffers:
    return {
        "src": random_bits(rng, 1024),
        "rows": rng.integers(0, 256, 128).astype(np.uint32),
        "out": np.zeros(512, np.uint32),
    }


def _distinct_rows(rng: np.random.Generator) -> Buffers:
    rows = np.concatenate([rng.permutation(32) + 64 * w for w in range(4)]).astype(np.uint32)
    return {"src": random_bits(rng, 1024), "rows": rows, "out": np.zeros(1024, np.uint32)}


def _matrix_cases() -> list[Case]:
    cases = []
    for count, registers in ((1, "{t0}"), (2, "{t0,t1}"), (4, "{t0,t1,t2,t3}")):
        for trans in ("", ".trans"):
            load = f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {registers}, [u]; st.global.v4.b32 [w1], {{t0,t1,t2,t3}};"
            store = f"""
  ld.global.v4.u32 {{t0,t1,t2,t3}}, [w0];
  bar.sync 0;
  stmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 [u], {registers};
  bar.sync 0;
  ld.shared.v4.b32 {{t4,t5,t6,t7}}, [s]; st.global.v4.b32 [w1], {{t4,t5,t6,t7}};
  ld.shared.v4.b32 {{t4,t5,t6,t7}}, [s+2048]; st.global.v4.b32 [w1+2048], {{t4,t5,t6,t7}};"""
            cases.append(Case(f"memory/ldmatrix.x{count}{trans}", _FILL_ROWS + load, _any_rows, smem=4096))
            cases.append(
                Case(f"memory/stmatrix.x{count}{trans}", _FILL_ROWS + store, _distinct_rows, smem=4096)
            )
    move = "movmatrix.sync.aligned.m8n8.trans.b16 t0, u; st.global.b32 [w1], t0;"
    # u holds an address, which differs between machines: take the row number instead
    cases.append(Case("memory/movmatrix", _FILL_ROWS + "sub.u32 u, u, smem; " + move, _any_rows, smem=4096))
    return cases


# ---- atomics -------------------------------------------------------------------------------------------------------

_ATOMIC_32 = [
    ("add", "u32"), ("add", "s32"), ("add", "f32"), ("min", "u32"), ("max", "u32"), ("min", "s32"), ("max", "s32"), ("and", "b32"),
    ("or", "b32"), ("xor", "b32"), ("exch", "b32"), ("inc", "u32"), ("dec", "u32"), ("cas", "b32"), ("add.noftz", "f16x2"), ("add.noftz", "bf16x2"),
]  # fmt: skip
_ATOMIC_64 = [("add", "u64"), ("max", "u64"), ("min", "s64"), ("add", "f64"), ("cas", "b64"), ("exch", "b64")]
_SPECIAL = np.array(
    [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x00800000, 0x80800001, 0x3F800000, 0x7F800000, 0xFF800000, 0x7FC00001,
     0x7F7FFFFF, 0xFFFFFFFF, 0x7FFFFFFF, 5, 0x12345678], np.uint32,
)  # fmt: skip


def _pairs(rng: np.random.Generator) -> Buffers:
    special = np.stack(np.meshgrid(_SPECIAL, _SPECIAL, indexing="ij"), -1).reshape(-1, 2)
    both = np.concatenate(
        [
            special,
            np.stack([random_bits(rng, 128), random_bits(rng, 128)], 1),
            f32_bits(rng.standard_normal((128, 2))),
        ]
    )
    return {"src": both[:, 1].copy(), "dst": both[:, 0].copy(), "out": np.zeros(len(both), np.uint32)}


def _double_pairs(rng: np.random.Generator) -> Buffers:
    words = _pairs(rng)
    return {
        "src": np.roll(np.resize(words["src"], 1024), 3),
        "dst": np.resize(words["dst"], 1024),
        "out": np.zeros(1024, np.uint32),
    }


def _atomic_cases() -> list[Case]:
    cases = []
    address = "mul.wide.u32 w, gi, {}; add.u64 w0, dst, w; add.u64 w1, src, w; add.u64 w2, out, w; "
    for op, ty in _ATOMIC_32:
        compare = ", t1" if op == "cas" else ""
        load = address.format(4) + "ld.global.u32 t0, [w1]; and.b32 t1, t0, 0xff; "
        in_global = f"atom.global.{op}.{ty} t2, [w0], t0{compare}; st.global.u32 [w2], t2;"
        in_shared = f"""
  shl.b32 s, tx, 2; add.u32 s, s, smem; ld.global.u32 t3, [w0]; st.shared.u32 [s], t3;
  atom.shared.{op}.{ty} t2, [s], t0{compare};
  ld.shared.u32 t3, [s]; st.global.u32 [w0], t3; st.global.u32 [w2], t2;"""
        for space, text in (("global", in_global), ("shared", in_shared)):
            cases.append(
                Case(
                    f"memory/atom.{space}.{op}.{ty}", load + text, _pairs, ("dst", "out"), (4, 1, 1), smem=512
                )
            )
    for op, ty in (("add", "f32"), ("add", "u32"), ("max", "s32"), ("add.noftz", "bf16x2")):
        text = f"ld.global.u32 t0, [w1]; red.relaxed.gpu.global.{op}.{ty} [w0], t0;"
        cases.append(Case(f"memory/red.{op}.{ty}", address.format(4) + text, _pairs, ("dst",), (4, 1, 1)))
    for ty in ("f16", "bf16"):
        text = f"ld.global.u16 h, [w1]; atom.global.add.noftz.{ty} h, [w0], h; cvt.u32.u16 t0, h; st.global.u32 [w2], t0;"
        cases.append(
            Case(f"memory/atom.global.add.{ty}", address.format(4) + text, _pairs, ("dst", "out"), (4, 1, 1))
        )
    for op, ty in _ATOMIC_64:
        compare = ", 7" if op == "cas" else ""
        text = f"ld.global.b64 w3, [w1]; atom.global.{op}.{ty} w3, [w0], w3{compare}; st.global.b64 [w2], w3;"
        cases.append(
            Case(
                f"memory/atom.global.{op}.{ty}",
                address.format(8) + text,
                _double_pairs,
                ("dst", "out"),
                (4, 1, 1),
            )
        )
    for ty, op in (("f32", "add"), ("bf16x2", "add.noftz")):
        text = f"ld.global.v4.u32 {{t0,t1,t2,t3}}, [w1]; red.global.{op}.v4.{ty} [w0], {{t0,t1,t2,t3}};"
        cases.append(Case(f"memory/red.v4.{ty}", address.format(16) + text, _pairs, ("dst",), (1, 1, 1)))
    contend = """
  mul.wide.u32 w, gi, 4; add.u64 w1, src, w; ld.global.u32 t0, [w1]; and.b32 t1, t0, 7; mul.wide.u32 w, t1, 16; add.u64 w0, dst, w;
  atom.global.add.u32 t2, [w0], t0; red.global.max.u32 [w0+4], t0; red.global.xor.b32 [w0+8], t0; atom.global.inc.u32 t2, [w0+12], 1000;"""
    cases.append(Case("memory/atom.contended", contend, lambda rng: {**_pairs(rng), "dst": np.zeros(32, np.uint32)}, ("dst",), (4, 1, 1)))  # fmt: skip
    return cases


# ---- cp.async ------------------------------------------------------------------------------------------------------


def _cp_async_cases() -> list[Case]:
    cases = []
    for size, cache in ((4, "ca"), (8, "ca"), (16, "ca"), (16, "cg")):
        for variant, operand in (("", ""), (".zfill", ", u"), (".ignore", ", p")):
            back = "".join(
                f"ld.shared.u32 t0, [s+{512 * i}]; st.global.u32 [w1+{512 * i}], t0; ld.shared.u32 t0, [s+{2048 + 512 * i}]; st.global.u32 [w1+{2048 + 512 * i}], t0;\n"
                for i in range(size // 4)
            )
            body = f"""
  mul.wide.u32 w, tx, {size}; add.u64 w0, src, w; mul.lo.u32 s, tx, {size}; add.u32 s, s, smem; mov.b32 t0, -1; st.shared.b32 [s], t0;
  bar.sync 0;
  rem.u32 u, tx, {size + 1}; setp.gt.u32 p, u, 2;
  cp.async.{cache}.shared.global [s], [w0], {size}{operand}; cp.async.commit_group;
  cp.async.{cache}.shared.global [s+2048], [w0+4096], {size}; cp.async.commit_group;
  cp.async.wait_group 1; cp.async.wait_all;
  bar.sync 0;
  shl.b32 s, tx, 2; add.u32 s, s, smem; mul.wide.u32 w, tx, 4; add.u64 w1, out, w;
  {back}"""
            cases.append(Case(f"memory/cp.async.{cache}{size}{variant}", body, _words(4096, 1024), smem=4096))
    predicated = """
  mul.wide.u32 w, tx, 16; add.u64 w0, src, w; add.u64 w1, out, w; shl.b32 s, tx, 4; add.u32 s, s, smem; and.b32 u, tx, 3; setp.ne.u32 p, u, 1;
  mov.b32 t0, 3; mov.b32 t1, 5; st.shared.v4.b32 [s], {t0,t1,t0,t1};
  @p cp.async.cg.shared.global.L2::128B [s], [w0], 16; cp.async.commit_group; cp.async.wait_group 0; bar.sync 0;
  xor.b32 s, tx, 55; shl.b32 s, s, 4; add.u32 s, s, smem; ld.shared.v4.u32 {t0,t1,t2,t3}, [s]; st.global.v4.u32 [w1], {t0,t1,t2,t3};"""
    cases.append(Case("memory/cp.async.predicated", predicated, _words(4096, 512), smem=4096))
    for noinc, count in ((".noinc", 128), ("", 1)):
        # without .noinc the instruction's own arrival is taken back: only thread 0's plain arrival counts
        arrive = "" if noinc else "@p mbarrier.arrive.shared.b64 w2, [smem+2048];"
        body = f"""
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem+2048], {count}; bar.sync 0;
  mul.wide.u32 w, tx, 16; add.u64 w0, src, w; add.u64 w1, out, w; shl.b32 s, tx, 4; add.u32 s, s, smem;
  cp.async.cg.shared.global [s], [w0], 16;
  cp.async.mbarrier.arrive{noinc}.shared.b64 [smem+2048];
  bar.sync 0;
  {arrive}
  WAIT: mbarrier.try_wait.parity.shared.b64 q, [smem+2048], 0; @!q bra WAIT;
  xor.b32 s, tx, 55; shl.b32 s, s, 4; add.u32 s, s, smem; ld.shared.v4.u32 {{t0,t1,t2,t3}}, [s]; st.global.v4.u32 [w1], {{t0,t1,t2,t3}};"""
        cases.append(Case(f"memory/cp.async.mbarrier{noinc}", body, _words(4096, 512), smem=4096))
    return cases


def cases() -> list[Case]:
    """All bit for bit."""
    return [*_global_cases(), *_shared_cases(), *_matrix_cases(), *_atomic_cases(), *_cp_async_cases()]

"""Bulk copies: 1-D, tensor maps of one to five dimensions, swizzles, clipping, fills, type conversions, reductions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from emulator.conformance.case import TENSOR_MAP_TYPES, Buffers, Case, TensorMap, f32_bits, random_bits

# ---- 1-D bulk copies -----------------------------------------------------------------------------------------------

_BULK_LOAD = """
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem+8192], 1; @p fence.mbarrier_init.release.cluster; bar.sync 0;
  @!p bra WAIT;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+8192], 2048;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [smem], [src], 1024, [smem+8192];
  add.u32 s, smem, 1024; add.u64 w0, src, 4096;
  cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [s], [w0], 1024, [smem+8192];
  WAIT: mbarrier.try_wait.parity.shared::cta.b64 q, [smem+8192], 0; @!q bra WAIT;
  shl.b32 s, tx, 4; add.u32 s, s, smem; mul.wide.u32 w, tx, 16; add.u64 w1, out, w;
  ld.shared.v4.u32 {t0,t1,t2,t3}, [s]; st.global.v4.u32 [w1], {t0,t1,t2,t3};"""
_FILL = """
  shl.b32 s, tx, 4; add.u32 s, s, smem; mul.wide.u32 w, tx, 16; add.u64 w0, src, w;
  ld.global.v4.u32 {t0,t1,t2,t3}, [w0]; st.shared.v4.u32 [s], {t0,t1,t2,t3};
  fence.proxy.async.shared::cta; bar.sync 0; setp.eq.u32 p, tx, 0; @!p bra END;
"""
_BULK_STORE = """
  add.u64 w1, out, 512;
  cp.async.bulk.global.shared::cta.bulk_group [w1], [smem+16], 1008;
  cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
  END:"""


def _bulk_cases() -> list[Case]:
    words = lambda rng: {"src": random_bits(rng, 4096), "out": np.full(1024, 0xCDCDCDCD, np.uint32)}  # noqa: E731
    cases = [
        Case("tma/bulk.load", _BULK_LOAD, words, smem=9216),
        Case("tma/bulk.store", _FILL + _BULK_STORE, words, smem=9216),
    ]
    for op in ("add.f32", "add.u32", "add.noftz.bf16", "add.noftz.f16", "max.s32", "and.b32"):
        text = f"""
  cp.reduce.async.bulk.global.shared::cta.bulk_group.{op} [out], [smem], 2048;
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
  END:"""

        def buffers(rng: np.random.Generator, op: str = op) -> Buffers:
            if op in ("add.f32", "add.noftz.bf16"):
                x = f32_bits(rng.standard_normal(1024) * 3)
                return {"src": x, "out": np.roll(x, 5)}
            x, y = random_bits(rng, 1024), random_bits(rng, 1024)
            return {"src": x & 0x7BFF7BFF, "out": y & 0xBBFFBBFF} if "f16" in op else {"src": x, "out": y}

        cases.append(Case(f"tma/bulk.reduce.{op}", _FILL + text, buffers, smem=9216))
    return cases


# ---- tensor copies: one block per set of coordinates ---------------------------------------------------------------


def _body(mode: str, rank: int, image: int, box_bytes: int, reduction: str | None, cached: bool) -> str:
    """`boxes` is an image of shared memory per block; `coordinates` eight words per block."""
    coordinates = ", ".join(f"t{i}" for i in range(rank))
    setup = f"""
  mul.wide.u32 w, bx, 32; add.u64 w0, coordinates, w;
  ld.global.v4.b32 {{t0,t1,t2,t3}}, [w0]; ld.global.b32 t4, [w0+16];
  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem+{image}], 1; @p fence.mbarrier_init.release.cluster;
  mul.wide.u32 w, bx, {image}; add.u64 w1, boxes, w;
  mov.u32 s, tx;
  FILL: mul.wide.u32 w, s, 4; add.u64 w2, w1, w; ld.global.b32 t5, [w2]; shl.b32 u, s, 2; add.u32 u, u, smem; st.shared.b32 [u], t5;
  add.u32 s, s, 128; setp.lt.u32 q, s, {image // 4}; @q bra FILL;
  fence.proxy.async.shared::cta; bar.sync 0;
"""
    hint, policy = (".L2::cache_hint", ", w3") if cached else ("", "")
    state = "shared::cta" if cached else "shared::cluster"
    setup += "  createpolicy.fractional.L2::evict_first.b64 w3, 1.0;\n" if cached else ""
    if mode == "load":
        return (
            setup
            + f"""
  @!p bra WAIT;
  mbarrier.arrive.expect_tx.shared::cta.b64 _, [smem+{image}], {box_bytes};
  cp.async.bulk.tensor.{rank}d.{state}.global.tile.mbarrier::complete_tx::bytes{hint} [smem], [map, {{{coordinates}}}], [smem+{image}]{policy};
  WAIT: mbarrier.try_wait.parity.shared::cta.b64 q, [smem+{image}], 0; @!q bra WAIT;
  bar.sync 0;
  mov.u32 s, tx;
  BACK: mul.wide.u32 w, s, 4; add.u64 w2, w1, w; shl.b32 u, s, 2; add.u32 u, u, smem; ld.shared.b32 t5, [u]; st.global.b32 [w2], t5;
  add.u32 s, s, 128; setp.lt.u32 q, s, {image // 4}; @q bra BACK;"""
        )
    instruction = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{reduction}" if reduction else f"cp.async.bulk.tensor.{rank}d.global.shared::cta"  # fmt: skip
    return (
        setup
        + f"""
  @!p bra END;
  {instruction}.tile.bulk_group{hint} [map, {{{coordinates}}}], [smem]{policy};
  cp.async.bulk.commit_group; cp.async.bulk.wait_group.read 0; cp.async.bulk.wait_group 0;
  END:"""
    )


def _tensor_case(
    name: str,
    dtype: str,
    dims: Sequence[int],
    box: Sequence[int],
    swizzle: int,
    coordinates: Sequence[Sequence[int]],
    *,
    mode: str = "load",
    reduction: str | None = None,
    nan_fill: bool = False,
    data: str = "bytes",
    cached: bool = False,
) -> Case:
    size = TENSOR_MAP_TYPES[dtype][1]
    pitches = [-(-dims[0] * size // 16) * 16]
    for d in dims[1:]:
        pitches.append(pitches[-1] * d)
    total = -(-pitches[-1] // 128) * 128 + 128
    box_bytes = int(np.prod(box)) * size
    span = {0: 0, 1: 32, 2: 64, 3: 128}[swizzle]
    stored = max(
        box_bytes, int(np.prod(box[1:])) * span
    )  # a box narrower than its swizzle keeps the span as pitch
    image = -(-stored // 1024) * 1024

    def buffers(rng: np.random.Generator) -> Buffers:
        where = np.zeros((len(coordinates), 8), np.int32)
        where[:, : len(dims)] = coordinates
        return {
            "tensor": _fill(rng, data, dtype, total),
            "map": TensorMap(
                "tensor", dtype, tuple(dims), tuple(pitches[:-1]), tuple(box), swizzle, nan_fill
            ),
            "coordinates": where,
            "boxes": _fill(rng, data, dtype, len(coordinates) * image).reshape(len(coordinates), image),
        }

    return Case(
        f"tma/{name}", _body(mode, len(dims), image, box_bytes, reduction, cached), buffers, ("boxes",) if mode == "load" else ("tensor",),
        grid=(len(coordinates), 1, 1), smem=image + 128,
    )  # fmt: skip


def _fill(rng: np.random.Generator, data: str, dtype: str, n_bytes: int) -> np.ndarray:
    """Bytes of random values of the type; "special" adds subnormals, infinities and NaNs."""
    if data == "bytes":
        return rng.integers(0, 256, n_bytes, dtype=np.uint8)
    if dtype in ("u32", "s32"):
        return rng.integers(0, 1 << 32, n_bytes // 4, dtype=np.uint64).astype(np.uint32).view(np.uint8)
    if dtype == "f16":
        x = rng.standard_normal(n_bytes // 2).astype(np.float16).view(np.uint16)
        special = [0, 0x8000, 1, 0x8001, 0x3FF, 0x7C00, 0xFC00, 0x7E01, 0xFD55]
    elif dtype == "bf16":
        x = (f32_bits(rng.standard_normal(n_bytes // 2)) >> 16).astype(np.uint16)
        special = [0, 0x8000, 1, 0x8001, 0x7F, 0x7F80, 0xFF80, 0x7FC1, 0xFFA0]
    else:
        x = f32_bits(rng.standard_normal(n_bytes // 4) * 2.0 ** rng.integers(-3, 3, n_bytes // 4))
        special = [0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x7F800000, 0xFF800000, 0x7FC00001, 0x807FFFFF, 0x7FA00000, 0x7F800001, 0xFFC12345]  # fmt: skip
    x[::4] = rng.choice(np.array(special, x.dtype), len(x[::4]))
    return x.view(np.uint8)


_SHAPES = [  # name, type, dims, box, swizzle, coordinates (the hardware wants the first a multiple of 16 bytes)
    ("1d.u8", "u8", [1000], [256], 0, [[0], [256], [896], [-112], [2000], [-304]]),
    ("1d.f32", "f32", [300], [64], 0, [[0], [64], [280], [-4], [296], [-64]]),
    ("2d.u8.128", "u8", [256, 64], [128, 32], 3, [[0, 0], [128, 32], [64, 50], [-16, -5], [208, 60], [304, 0], [16, 3]]),
    ("2d.u8.64", "u8", [256, 64], [64, 32], 2, [[0, 0], [32, 50], [-16, -5], [224, 10]]),
    ("2d.u8.32", "u8", [256, 64], [32, 32], 1, [[0, 0], [16, 50], [-16, -5], [240, 10]]),
    ("2d.u8.none", "u8", [256, 64], [48, 20], 0, [[0, 0], [16, 50], [-16, -5], [240, 10]]),
    ("2d.bf16.128", "bf16", [200, 100], [64, 16], 3, [[0, 0], [64, 96], [-8, 3], [184, 99], [192, -15], [200, 0]]),
    ("2d.bf16.64", "bf16", [200, 100], [32, 16], 2, [[0, 0], [8, 96], [-8, 3], [184, 99]]),
    ("2d.bf16.32", "bf16", [200, 100], [16, 24], 1, [[0, 0], [8, 96], [-8, 3], [184, 99]]),
    ("2d.bf16.narrow16", "bf16", [200, 100], [8, 8], 3, [[0, 0], [8, 96], [-8, 3], [184, 99]]),
    ("2d.bf16.narrow48", "bf16", [200, 100], [24, 8], 3, [[0, 0], [8, 96], [184, 99]]),
    ("2d.f32.128", "f32", [100, 40], [32, 8], 3, [[0, 0], [88, 36], [-32, -7]]),
    ("3d.u8.128", "u8", [128, 20, 6], [128, 8, 3], 3, [[0, 0, 0], [0, 16, 4], [64, -3, -1], [-128, 0, 0], [0, 5, 5]]),
    ("3d.bf16.64", "bf16", [64, 20, 6], [32, 5, 2], 2, [[0, 0, 0], [32, 17, 5], [16, -3, -1], [0, 19, 6]]),
    ("3d.f32.32", "f32", [40, 10, 6], [8, 5, 4], 1, [[0, 0, 0], [36, 8, 4], [4, -3, -1]]),
    ("4d.u16", "u16", [32, 6, 5, 4], [16, 3, 2, 2], 1, [[0, 0, 0, 0], [16, 5, 4, 3], [-8, -1, 1, -1]]),
    ("5d.u8", "u8", [32, 6, 5, 4, 3], [16, 3, 2, 2, 2], 0, [[0, 0, 0, 0, 0], [16, 5, 4, 3, 2], [-16, -1, 1, -1, 1]]),
]  # fmt: skip


_RAGGED = [  # stores past an innermost extent that is no multiple of 16 bytes: are the rest of its 16 bytes written?
    ("1d.f32", "f32", [250], [64], [[0], [192]]),
    ("2d.u8", "u8", [100, 40], [64, 16], [[0, 0], [64, 16], [96, 32]]),
    ("2d.bf16", "bf16", [52, 20], [32, 8], [[0, 0], [32, 8], [48, 16]]),
    ("2d.f32", "f32", [33, 20], [16, 8], [[0, 0], [32, 8], [16, 16]]),
    ("3d.u8", "u8", [72, 6, 3], [64, 4, 2], [[0, 0, 0], [64, 4, 1]]),
]  # fmt: skip


def _storable(coordinates: Sequence[Sequence[int]], box: Sequence[int]) -> list[Sequence[int]]:
    """Boxes that do not overlap (their order is free) and start inside (the hardware traps on negative ones)."""
    kept: list[Sequence[int]] = []
    for c in coordinates:
        if min(c) >= 0 and all(any(abs(x - y) >= b for x, y, b in zip(c, d, box, strict=True)) for d in kept):
            kept.append(c)
    return kept


_REDUCTIONS = {
    "add": ("u32", "s32", "f32", "bf16", "f16", "f32ftz"),
    "min": ("u32", "s32", "bf16", "f16"),
    "max": ("u32", "s32", "bf16", "f16"),
    **dict.fromkeys(("inc", "dec", "and", "or", "xor"), ("u32",)),
}


# What a warp does when several lanes reach a bulk reduction with the same operands: once, or once a lane? The sum tells.
_WHOLE_WARP = """
  shl.b32 s, tx, 4; add.u32 s, s, smem; mul.wide.u32 w, tx, 16; add.u64 w0, src, w;
  ld.global.v4.u32 {t0,t1,t2,t3}, [w0]; st.shared.v4.u32 [s], {t0,t1,t2,t3};
  fence.proxy.async.shared::cta; bar.sync 0; setp.ge.u32 p, tx, LANES; @p bra END;
  COPY
  cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;
  END:"""
_COPIES = {
    "bulk": "cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [out], [smem], 2048;",
    "tensor": "mov.b32 t4, 0; cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group [map, {t4, t4}], [smem];",
}


def _whole_warp_case(copy: str, lanes: int) -> Case:
    def buffers(rng: np.random.Generator) -> Buffers:
        out = random_bits(rng, 1024)
        return {
            "src": random_bits(rng, 512),
            "out": out,
            "map": TensorMap("out", "u32", (32, 32), (128,), (32, 16), 0),
        }

    body = _WHOLE_WARP.replace("LANES", str(lanes)).replace("COPY", _COPIES[copy])
    return Case(f"tma/unelected.{copy}.{lanes}lanes", body, buffers, smem=2048)


def cases() -> list[Case]:
    """All bit for bit."""
    cases = [*_bulk_cases(), *(_whole_warp_case(copy, lanes) for copy in _COPIES for lanes in (1, 2, 32))]
    for name, dtype, dims, box, swizzle, coordinates in _SHAPES:
        cases.append(_tensor_case(f"load.{name}", dtype, dims, box, swizzle, coordinates))
        cases.append(
            _tensor_case(
                f"store.{name}", dtype, dims, box, swizzle, _storable(coordinates, box), mode="store"
            )
        )
    for name, dtype, dims, box, where in _RAGGED:
        cases.append(_tensor_case(f"store.ragged.{name}", dtype, dims, box, 0, where, mode="store"))
    cases.append(
        _tensor_case(
            "reduce.add.ragged.2d.f32",
            "f32",
            [33, 20],
            [16, 8],
            0,
            [[0, 0], [32, 8]],
            mode="reduce",
            reduction="add",
            data="special",
        )
    )
    cases += [
        _tensor_case(
            f"{m}.3d.bf16.cached",
            "bf16",
            [64, 20, 6],
            [64, 5, 2],
            3,
            [[0, 0, 0], [0, 15, 4]],
            mode=m,
            cached=True,
        )
        for m in ("load", "store")
    ]
    for dtype in ("f32", "f32ftz", "tf32", "tf32ftz"):
        where = [[0, 0], [32, 8], [48, 60], [-8, 3]]
        cases.append(_tensor_case(f"convert.{dtype}", dtype, [64, 64], [32, 8], 3, where, data="special"))
    for dtype in ("f32", "bf16", "f16", "tf32", "f32ftz", "tf32ftz"):
        box, where = [128 // TENSOR_MAP_TYPES[dtype][1], 8], [[16, 25], [-8, -3], [0, 40]]
        cases.append(_tensor_case(f"nan_fill.{dtype}", dtype, [40, 30], box, 3, where, nan_fill=True))
    for op, dtypes in _REDUCTIONS.items():
        for dtype in dtypes:
            wide = TENSOR_MAP_TYPES[dtype][1] == 4
            where = [[0, 0], [32, 8], [48, 17]] if wide else [[0, 0], [0, 8], [24, 17]]
            cases.append(_tensor_case(f"reduce.{op}.{dtype}", dtype, [64, 24], [32 if wide else 64, 8], 3, where, mode="reduce", reduction=op, data="special"))  # fmt: skip
    return cases


def descriptor_specs(count: int = 200) -> list[tuple[TensorMap, int]]:
    """Random tensor maps and addresses (nothing is read there), to compare the 128 bytes that the driver writes."""
    rng = np.random.default_rng(77)
    specs = []
    for _ in range(count):
        rank, dtype, swizzle = (
            int(rng.integers(1, 6)),
            str(rng.choice(list(TENSOR_MAP_TYPES))),
            int(rng.integers(0, 4)),
        )
        size = TENSOR_MAP_TYPES[dtype][1]
        dims = [int(x) for x in rng.integers(1, 300, rank)]
        strides, pitch = [], -(-dims[0] * size // 16) * 16
        for d in dims[1:]:
            strides.append(pitch + 16 * int(rng.integers(0, 4)))
            pitch = strides[-1] * d
        span = {0: 256, 1: 32, 2: 64, 3: 128}[swizzle]
        inner = min(int(rng.integers(1, span // 16 + 1)) * 16 // size, 256)
        box = [inner, *(int(x) for x in rng.integers(1, 9, rank - 1))]
        nan_fill = bool(rng.integers(0, 2)) and dtype in (
            "f16",
            "f32",
            "bf16",
            "f32ftz",
            "tf32",
            "tf32ftz",
            "f64",
        )
        address = 0x7F0000000000 + int(rng.integers(0, 1 << 30)) * 16
        specs.append(
            (TensorMap("", dtype, tuple(dims), tuple(strides), tuple(box), swizzle, nan_fill), address)
        )
    return specs

"""wgmma through raw descriptors: accumulation, special values, and what every descriptor field means.

One block (one warpgroup) is one experiment: it copies an image into shared memory, loads its accumulator, runs one or
more k-steps and dumps the accumulator registers as `out[block][register][thread]`.
"""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
from emulator.conformance.case import Buffers, Case
from numpy.typing import NDArray

K_OF = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
NUMPY_OF = {
    "bf16": ml_dtypes.bfloat16,
    "f16": np.float16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}
FLOAT_TYPES = ("bf16", "f16", "tf32", "e4m3", "e5m2")


def _bytes_of(x: NDArray, kind: str) -> NDArray[np.uint8]:
    if kind == "tf32":
        return np.ascontiguousarray(x, np.float32).view(np.uint8)
    if kind in ("s8", "u8"):
        return np.asarray(x).astype(np.int64).astype(np.uint8)
    return np.ascontiguousarray(np.asarray(x).astype(NUMPY_OF[kind])).view(np.uint8)


def fragment_index(n: int) -> tuple[NDArray, NDArray]:
    """Row and column of accumulator register i of thread t, as (n/2, 128) arrays (PTX ISA, wgmma D fragment)."""
    t, i = np.arange(128), np.arange(n // 2)[:, None]
    lane = t % 32
    return 16 * (t // 32) + lane // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (lane % 4) + i % 2


def to_registers(c_EMN: NDArray, accumulator: str) -> NDArray[np.uint32]:
    """(E, 64, N) accumulators → (E, registers, 128) words."""
    rows, columns = fragment_index(c_EMN.shape[-1])
    fragment = c_EMN[:, rows, columns]
    if accumulator == "f16":
        words = fragment.astype(np.float16).view(np.uint16).astype(np.uint32)
        return np.ascontiguousarray(words[:, 0::2] | (words[:, 1::2] << 16))
    return np.ascontiguousarray(fragment).view(np.uint32)


def _k_major(x: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(rows, bytes) → the unswizzled K-major image: 8×16-byte core matrices, along K first."""
    rows, width = x.shape
    return x.reshape(rows // 8, 8, width // 16, 16).transpose(0, 2, 1, 3).reshape(-1)


def _body(
    a_type: str, b_type: str, n: int, steps: int, accumulator: str, image_words: int, *,
    one_image: bool, a_registers: bool, modifiers: tuple[int, ...],
) -> str:  # fmt: skip
    registers = n // 4 if accumulator == "f16" else n // 2
    kind = "f32" if accumulator == "f32" else "b32"
    acc = [f"acc{i}" for i in range(registers)]
    lines = [
        f"  .reg .{kind} acc<{registers}>; .reg .b32 ra<{4 * steps}>; .reg .b64 da, db, step_a, step_b;",
        f"  mul.wide.u32 w, {'0' if one_image else 'bx'}, {4 * image_words}; add.u64 w0, image, w; mov.u32 s, tx;",
        "  FILL: mul.wide.u32 w, s, 4; add.u64 w1, w0, w; ld.global.b32 t0, [w1]; shl.b32 u, s, 2; add.u32 u, u, smem; st.shared.b32 [u], t0;",
        f"  add.u32 s, s, 128; setp.lt.u32 q, s, {image_words}; @q bra FILL;",
        "  fence.proxy.async.shared::cta; bar.sync 0;",
        "  // parameters: descriptor words of A and B without the base address, their steps along K, scale-d",
        "  mul.wide.u32 w, bx, 32; add.u64 w0, parameters, w; ld.global.v4.b32 {t0,t1,t2,t3}, [w0]; ld.global.v4.b32 {t4,t5,t6,t7}, [w0+16];",
        "  and.b32 u, smem, 0x3ffff; shr.u32 u, u, 4; add.u32 t0, t0, u; mov.b64 da, {t0,t1}; add.u32 t2, t2, u; mov.b64 db, {t2,t3};",
        "  cvt.u64.u32 step_a, t4; cvt.u64.u32 step_b, t5; setp.ne.b32 p, t6, 0; setp.eq.b32 q, 0, 0;",
        f"  mul.lo.u32 s, bx, {registers * 128}; add.u32 s, s, tx; mul.wide.u32 w, s, 4; add.u64 w2, acc_in, w; add.u64 w3, out, w;",
        *(f"  ld.global.{kind} {r}, [w2+{512 * i}];" for i, r in enumerate(acc)),
    ]
    if a_registers:
        lines.append(
            f"  mul.lo.u32 s, bx, {4 * steps * 128}; add.u32 s, s, tx; mul.wide.u32 w, s, 4; add.u64 w4, a_in, w;"
        )
        lines += [f"  ld.global.b32 ra{i}, [w4+{512 * i}];" for i in range(4 * steps)]
    lines.append("  wgmma.fence.sync.aligned;")
    tail = "".join(f", {m}" for m in modifiers)
    for step in range(steps):
        a = "{" + ",".join(f"ra{4 * step + i}" for i in range(4)) + "}" if a_registers else "da"
        lines.append(
            f"  wgmma.mma_async.sync.aligned.m64n{n}k{K_OF[a_type]}.{accumulator}.{a_type}.{b_type}"
            f" {{{','.join(acc)}}}, {a}, db, {'p' if step == 0 else 'q'}{tail}; add.s64 da, da, step_a; add.s64 db, db, step_b;"
        )
    lines.append("  wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;")
    lines += [f"  st.global.{kind} [w3+{512 * i}], {r};" for i, r in enumerate(acc)]
    return "\n".join(lines)


def _modifiers(
    a_type: str,
    *,
    a_registers: bool = False,
    negate: tuple[int, int] = (1, 1),
    mn_major: tuple[int, int] = (0, 0),
) -> tuple[int, ...]:
    if a_type in ("s8", "u8"):
        return ()
    majors = () if a_type not in ("bf16", "f16") else mn_major[1:] if a_registers else mn_major
    return (*negate, *majors)


Operands = tuple[
    NDArray, NDArray, "NDArray | None"
]  # A (E, 64, K·steps), B (E, N, K·steps), C (E, 64, N) or None


def _values_case(
    name: str, a_type: str, b_type: str, n: int, steps: int, operands: Callable[[np.random.Generator], Operands],
    accumulator: str = "f32", *, raw: bool = False,
) -> Case:  # fmt: skip
    """Operands given as values (or as codes, with `raw`), laid out K-major without swizzle."""
    a_bytes, b_bytes = 64 * 32, n * 32  # one k-step is 32 bytes wide in every type
    image_bytes = -(-steps * (a_bytes + b_bytes) // 512) * 512

    def buffers(rng: np.random.Generator) -> Buffers:
        a, b, c = operands(rng)
        images = []
        for a_one, b_one in zip(a, b, strict=True):
            parts = []
            for x, kind in ((a_one, a_type), (b_one, b_type)):
                for step in range(steps):
                    k = slice(step * K_OF[kind], (step + 1) * K_OF[kind])
                    block = np.ascontiguousarray(x[:, k])
                    parts.append(
                        _k_major(
                            (block.view(np.uint8) if raw else _bytes_of(block, kind)).reshape(len(x), 32)
                        )
                    )
            image = np.concatenate(parts)
            images.append(np.pad(image, (0, image_bytes - len(image))))
        descriptor = 8 << 16  # leading offset 128 bytes; stride offset 256 bytes in the high word
        row = [
            descriptor,
            16,
            descriptor | (a_bytes * steps) >> 4,
            16,
            a_bytes >> 4,
            b_bytes >> 4,
            int(c is not None),
            0,
        ]
        start = (
            np.zeros((len(a), 64, n), np.float32)
            if c is None
            else c.astype(np.float32 if accumulator != "s32" else np.int32)
        )
        return {
            "image": np.stack(images).view(np.uint32),
            "parameters": np.tile(np.array(row, np.uint32), (len(a), 1)),
            "acc_in": (registers := to_registers(start, accumulator)),
            "out": np.full_like(registers, 0xDEADBEEF),
        }

    body = _body(a_type, b_type, n, steps, accumulator, image_bytes // 4, one_image=False, a_registers=False, modifiers=_modifiers(a_type))  # fmt: skip
    experiments = len(operands(np.random.default_rng(0))[0])
    return Case(f"wgmma/{name}", body, buffers, grid=(experiments, 1, 1), smem=image_bytes)


# ---- accumulation --------------------------------------------------------------------------------------------------


def draw(rng: np.random.Generator, shape: tuple[int, ...], kind: str, spread: str) -> NDArray[np.float64]:
    """Values representable in `kind`: normal, wide (exponents over the type's range) or positive (0.5 to 2)."""
    if spread == "normal":
        x = rng.standard_normal(shape)
    elif spread == "wide":
        low, high = {
            "bf16": (-20, 20),
            "f16": (-12, 12),
            "tf32": (-20, 20),
            "e4m3": (-9, 8.7),
            "e5m2": (-15, 14),
        }[kind]
        x = rng.choice([-1, 1], shape) * 2.0 ** rng.uniform(low, high, shape)
    else:
        x = rng.uniform(0.5, 2, shape)
    if kind == "tf32":
        return x.astype(np.float32).astype(np.float64)
    return x.astype(NUMPY_OF[kind]).astype(np.float64)


def _random_cases() -> list[Case]:
    cases = []
    for a_type, b_type in (
        ("bf16", "bf16"),
        ("f16", "f16"),
        ("e4m3", "e4m3"),
        ("e5m2", "e4m3"),
        ("tf32", "tf32"),
    ):
        for spread in ("normal", "wide", "positive"):
            for steps, with_c in ((1, True), (4, False)):

                def operands(
                    rng, a_type=a_type, b_type=b_type, spread=spread, steps=steps, with_c=with_c
                ) -> Operands:
                    k = K_OF[a_type] * steps
                    c = rng.standard_normal((1, 64, 32)) * 4 if with_c else None
                    return draw(rng, (1, 64, k), a_type, spread), draw(rng, (1, 32, k), b_type, spread), c

                cases.append(
                    _values_case(
                        f"sum.{a_type}.{b_type}.{spread}.steps{steps}", a_type, b_type, 32, steps, operands
                    )
                )
    for kind in ("f16", "e4m3", "e5m2"):

        def operands16(rng, kind=kind) -> Operands:
            c = rng.standard_normal((1, 64, 32)).astype(np.float16).astype(np.float64)
            return (
                draw(rng, (1, 64, K_OF[kind]), kind, "normal"),
                draw(rng, (1, 32, K_OF[kind]), kind, "normal"),
                c,
            )

        cases.append(_values_case(f"sum.f16_accumulator.{kind}", kind, kind, 32, 1, operands16, "f16"))
    for a_type, b_type in (("s8", "s8"), ("u8", "s8"), ("u8", "u8")):

        def integers(rng) -> Operands:
            c = rng.integers(-(2**31), 2**31, (1, 64, 32))
            return rng.integers(0, 256, (1, 64, 64)), rng.integers(0, 256, (1, 32, 64)), c

        cases.append(_values_case(f"sum.{a_type}.{b_type}", a_type, b_type, 32, 2, integers, "s32"))
    return cases


def _probe_cases() -> list[Case]:
    """Where the grid lies: one big product, its negative, and a small one whose exponent sweeps down with the row."""
    cases = []
    for kind in FLOAT_TYPES:
        k_dim, big = K_OF[kind], {"bf16": 1.0, "tf32": 1.0}.get(kind, 256.0)
        smallest = {"f16": -14, "e5m2": -14, "e4m3": -8}.get(kind, -60)

        def align(_rng, kind=kind, k_dim=k_dim, big=big, smallest=smallest) -> Operands:
            places = [
                (0, 1, 2),
                (1, 0, 2),
                (0, k_dim - 1, 1),
                (0, k_dim // 2, 1),
                (k_dim - 1, 0, 1),
                (0, 3, 1),
            ]
            experiments = [(p, m) for p in places for m in (1.0, -1.5)]
            a, b = np.zeros((len(experiments), 64, k_dim)), np.zeros((len(experiments), 32, k_dim))
            for i, ((plus, small, minus), mantissa) in enumerate(experiments):
                a[i, :, plus], a[i, :, minus], b[i, :, plus], b[i, :, minus] = big, -big, big, big
                exponents = int(np.log2(big * big)) - np.arange(64)
                ok = exponents - np.clip(exponents, smallest, 0) >= smallest
                a[i, :, small] = np.where(ok, mantissa * 2.0 ** np.clip(exponents, smallest, 0), 0)
                b[i, :, small] = 2.0 ** (np.arange(32) % 16 - 8.0)
            return a, b, None

        def cancel(_rng, kind=kind, k_dim=k_dim) -> Operands:
            deepest = {"e4m3": -9, "f16": -14, "e5m2": -14}.get(kind, -60)
            step = np.arange(64) if kind in ("bf16", "tf32") else np.arange(64) % 16
            a, b, c = np.zeros((4, 64, k_dim)), np.ones((4, 32, k_dim)), np.zeros((4, 64, 32))
            for i, mantissa in enumerate((1.0, 1.5, -1.0, -1.5)):
                a[i, :, 1], a[i, :, 0] = mantissa * 2.0 ** np.maximum(-step, deepest), -1.0
                b[i, :, 0] = 2.0 ** (np.arange(32) % 8)
                c[i] = 2.0 ** (np.arange(32) % 8)
            c[:, :, 16:] *= 1 + 2.0**-23
            return a, b, c

        def final(rng, kind=kind, k_dim=k_dim) -> Operands:
            a, b = np.zeros((2, 64, k_dim)), np.ones((2, 32, k_dim))
            bits = rng.integers(0, 1 << 32, (2, 64, 32), dtype=np.uint64).astype(np.uint32).view(np.float32)
            bits[1] = rng.standard_normal((64, 32))
            a[1, :, 0], b[1] = 2.0 ** -(np.arange(64) % (10 if kind == "e4m3" else 15)), 2.0**-6
            return a, b, bits

        cases += [
            _values_case(f"probe.align.{kind}", kind, kind, 32, 1, align),
            _values_case(f"probe.cancel.{kind}", kind, kind, 32, 1, cancel),
            _values_case(f"probe.final.{kind}", kind, kind, 32, 1, final),
        ]
    return cases


_SPECIAL_CODES = {
    "bf16": [0, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 1, 0x8001, 0x7F7F, 0xFF7F, 0x3F80, 0xBF80, 0x80, 0x7E00, 0xFF],
    "f16": [0, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0xFE01, 0x7C01, 1, 0x8001, 0x7BFF, 0xFBFF, 0x3C00, 0xBC00, 0x400, 0x7800, 0x3FF],
    "e4m3": [0, 0x80, 0x7F, 0xFF, 0x7E, 0xFE, 1, 0x81, 7, 0x38, 0xB8, 8, 0x40, 0x77, 0xF7, 0x0F],
    "e5m2": [0, 0x80, 0x7C, 0xFC, 0x7D, 0xFE, 0x7F, 1, 0x81, 0x7B, 0xFB, 0x3C, 0xBC, 4, 3, 0x78],
}  # fmt: skip


def special_operands(kind: str) -> Operands:
    """NaN, infinity, their sums and products with zero, -0, subnormals, overflow; operands as codes."""
    codes = np.array(_SPECIAL_CODES[kind], np.uint16 if kind in ("bf16", "f16") else np.uint8)
    k_dim, m, n = K_OF[kind], np.arange(64), np.arange(32)
    a, b = np.zeros((2, 64, k_dim), codes.dtype), np.zeros((2, 32, k_dim), codes.dtype)
    a[0, :, 0], a[0, :, 3] = codes[m % 16], codes[m // 16 * 5 % 16]
    a[1, :, 0], a[1, :, -1] = codes[m % 16], codes[(m // 16 * 3 + 2) % 16]
    b[:, :, 0], b[:, :, 3], b[:, :, -1] = (
        codes[n % 16],
        codes[(n // 16 * 9 + 11) % 16],
        codes[(n // 16 * 2 + 9) % 16],
    )
    c = np.zeros((2, 64, 32), np.float32)
    c[1, ::3, ::2], c[1, 1::3, ::3], c[1, 2::5, 1::2] = np.inf, np.nan, 3e38
    c[1, 3::5], c[1, 4::5] = np.array([1], np.uint32).view(np.float32)[0], -0.0
    return a, b, c


def _special_cases() -> list[Case]:
    return [
        _values_case(
            f"special.{kind}", kind, kind, 32, 1, lambda _rng, kind=kind: special_operands(kind), raw=True
        )
        for kind in _SPECIAL_CODES
    ]


# ---- descriptors ---------------------------------------------------------------------------------------------------

_IMAGE_BYTES = 98304
_PITCH = {0: 16, 1: 128, 2: 64, 3: 32}  # bytes of a row, by the descriptor's swizzle field


def _descriptor_case(kind: str, n: int, mn_a: int, mn_b: int, a_registers: int) -> Case:
    """Small integers everywhere (sums are exact); start, leading and stride offset, swizzle and major vary at random."""
    accumulator, steps, experiments = ("s32" if kind == "s8" else "f32"), 2, 8

    def buffers(rng: np.random.Generator) -> Buffers:
        size = 2 if kind in ("bf16", "f16") else 1
        parameters = np.zeros((experiments, 8), np.uint32)
        for e in range(experiments):
            swizzles = [e, e] if e < 4 else [int(x) for x in rng.integers(0, 4, 2)]
            for side, (swizzle, mn, start) in enumerate(zip(swizzles, (mn_a, mn_b), (0, 16384), strict=True)):
                leading, stride = (int(x) * 16 for x in rng.integers(1, 24, 2))
                if e % 2 == 0 or mn:
                    unit = max(_PITCH[swizzle] * 8, 128)
                    leading, stride = (unit * int(x) for x in rng.integers(1, 3, 2))
                parameters[e, 2 * side] = (start >> 4) | (leading >> 4) << 16
                parameters[e, 2 * side + 1] = (stride >> 4) | swizzle << 30
                parameters[e, 4 + side] = _PITCH[swizzle] if mn else 2
            parameters[e, 6] = e % 2
        registers = n // 2
        acc = rng.integers(-9, 9, (experiments, registers, 128))
        a_words = _bytes_of(rng.integers(-3, 4, (experiments, 4 * steps, 128, 4 // size)), kind).view(
            np.uint32
        )
        return {
            "image": _bytes_of(rng.integers(-3, 4, _IMAGE_BYTES // size), kind).view(np.uint32),
            "parameters": parameters,
            "acc_in": (acc.astype(np.int32) if kind == "s8" else acc.astype(np.float32)).view(np.uint32),
            "a_in": a_words.reshape(experiments, 4 * steps, 128),
            "out": np.full((experiments, registers, 128), 0xDEADBEEF, np.uint32),
        }

    body = _body(
        kind, kind, n, steps, accumulator, _IMAGE_BYTES // 4, one_image=True, a_registers=bool(a_registers),
        modifiers=_modifiers(kind, a_registers=bool(a_registers), mn_major=(mn_a, mn_b)),
    )  # fmt: skip
    name = (
        f"wgmma/descriptor.{kind}.n{n}.{'MK'[not mn_a]}{'NK'[not mn_b]}{'.registers' if a_registers else ''}"
    )
    return Case(name, body, buffers, grid=(experiments, 1, 1), smem=_IMAGE_BYTES)


def _descriptor_cases() -> list[Case]:
    k_major = [(8, 0, 0, 0), (24, 0, 0, 1), (64, 0, 0, 0), (128, 0, 0, 1), (256, 0, 0, 0)]
    mn_major = [(64, 1, 0, 0), (64, 0, 1, 0), (128, 1, 1, 0), (96, 0, 1, 1), (8, 1, 1, 0)]
    cases = [_descriptor_case("bf16", *shape) for shape in k_major + mn_major]
    cases += [_descriptor_case("f16", *shape) for shape in k_major[:2] + mn_major[2:4]]
    cases += [_descriptor_case("e4m3", *shape) for shape in k_major]
    cases += [_descriptor_case("s8", *shape) for shape in ((16, 0, 0, 0), (64, 0, 0, 0), (128, 0, 0, 1))]
    return cases


def cases() -> list[Case]:
    """All bit for bit."""
    return [*_random_cases(), *_probe_cases(), *_special_cases(), *_descriptor_cases()]

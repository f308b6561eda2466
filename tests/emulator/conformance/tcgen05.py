"""tcgen05 against the PTX ISA (9.7.16): no hardware of ours has it, so what is right comes from the manual's own words.

Operands are laid out in shared memory by the *canonical layouts* of 9.7.16.3.3, descriptors packed by the tables of
9.7.16.4, accumulators read back by the data-path layouts of 9.7.16.10.5. Values are small integers and powers of two,
so that every sum is exact and every comparison bitwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from emulator.conformance.case import Buffers, Case
from numpy.typing import NDArray


@dataclass(frozen=True)
class Expected:
    """A case and what its output must be."""

    case: Case
    want: Callable[[Buffers], NDArray]


# ---- shared text -----------------------------------------------------------------------------------------------------


def _with_tensor_memory(body: str, group: int = 1, columns: int = 512) -> str:
    """Warp 0 allocates all of tensor memory and frees it; `tmem` holds its address, `lanes` the warp's own lanes."""
    sync = "bar.sync 0;" if group == 1 else "barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;"
    return f"""
  .reg .b32 tmem, lanes; .reg .pred first;
  setp.lt.u32 first, tx, 32;
  @!first bra ALLOCATED;
  tcgen05.alloc.cta_group::{group}.sync.aligned.shared::cta.b32 [smem], {columns};
  tcgen05.relinquish_alloc_permit.cta_group::{group}.sync.aligned;
  ALLOCATED: tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
  ld.shared.b32 tmem, [smem];
  shr.u32 lanes, tx, 5; shl.b32 lanes, lanes, 21; add.u32 lanes, lanes, tmem;
{body}
  tcgen05.fence::before_thread_sync; {sync} tcgen05.fence::after_thread_sync;
  @!first bra FREED;
  tcgen05.dealloc.cta_group::{group}.sync.aligned.b32 tmem, {columns};
  FREED:"""


def _registers(name: str, count: int) -> str:
    return "{" + ", ".join(f"{name}{i}" for i in range(count)) + "}"


def _load_words(name: str, buffer: str, count: int) -> list[str]:
    """`name`i = buffer[i][global thread]."""
    return [
        "  mov.u32 t0, %nctaid.x; mul.lo.u32 t0, t0, 512; mul.wide.u32 w, gi, 4; add.u64 w0, "
        + buffer
        + ", w; cvt.u64.u32 w1, t0;",
        *(f"  ld.global.b32 {name}{i}, [w0]; add.u64 w0, w0, w1;" for i in range(count)),
    ]


def _store_words(name: str, buffer: str, count: int) -> list[str]:
    return [
        "  mov.u32 t0, %nctaid.x; mul.lo.u32 t0, t0, 512; mul.wide.u32 w, gi, 4; add.u64 w0, "
        + buffer
        + ", w; cvt.u64.u32 w1, t0;",
        *(f"  st.global.b32 [w0], {name}{i}; add.u64 w0, w0, w1;" for i in range(count)),
    ]


# ---- ld and st (9.7.16.8; fragments of 9.7.16.2.3.1) -------------------------------------------------------------------


def _fragment(shape: str, num: int) -> tuple[NDArray, NDArray]:
    """Lane (of the warp's 32, or of 16) and column of register r in thread t, as (registers, 32) arrays."""
    t = np.arange(32)
    if shape == "32x32b":
        return np.tile(t, (num, 1)), np.tile(np.arange(num)[:, None], (1, 32))
    if shape == "16x64b":
        r = np.arange(num)[:, None]
        return np.tile(t // 4 + 8 * (t % 2), (num, 1)), 2 * r + t // 2 % 2
    per = {"16x128b": 2, "16x256b": 4}[shape]
    r = np.arange(num * per)[:, None]
    if shape == "16x128b":
        return t // 4 + 8 * (r % 2), 4 * (r // 2) + t % 4
    return t // 4 + 8 * (r % 4 // 2), 8 * (r // 4) + 2 * (t % 4) + r % 2


def _load_store(shape: str, num: int, *, store: bool) -> Expected:
    """One shape against 32x32b: stored with one, read with the other, both halves of the warp's lanes."""
    frag_lane, frag_column = _fragment(shape, num)
    count, columns = len(frag_lane), int(frag_column.max()) + 1
    halves = (0,) if shape == "32x32b" else (0, 16)
    body = [f"  .reg .b32 x<{columns}>, y<{count * len(halves)}>;"]
    shaped = [
        (f"[lanes+{h << 16}]", "{" + ", ".join(f"y{i + n * count}" for i in range(count)) + "}")
        for n, h in enumerate(halves)
    ]
    plain = _registers("x", columns)
    if store:
        body += _load_words("y", "src", count * len(halves))
        body += [f"  tcgen05.st.sync.aligned.{shape}.x{num}.b32 {a}, {regs};" for a, regs in shaped]
        body += [
            "  tcgen05.wait::st.sync.aligned;",
            f"  tcgen05.ld.sync.aligned.32x32b.x{columns}.b32 {plain}, [lanes];",
        ]
        body += ["  tcgen05.wait::ld.sync.aligned;", *_store_words("x", "out", columns)]
    else:
        body += _load_words("x", "src", columns)
        body += [
            f"  tcgen05.st.sync.aligned.32x32b.x{columns}.b32 [lanes], {plain};",
            "  tcgen05.wait::st.sync.aligned;",
        ]
        body += [f"  tcgen05.ld.sync.aligned.{shape}.x{num}.b32 {regs}, {a};" for a, regs in shaped]
        body += ["  tcgen05.wait::ld.sync.aligned;", *_store_words("y", "out", count * len(halves))]

    rows_in, rows_out = (count * len(halves), columns) if store else (columns, count * len(halves))

    def buffers(rng: np.random.Generator) -> Buffers:
        return {
            "src": rng.integers(0, 1 << 32, (rows_in, 128), dtype=np.uint64).astype(np.uint32),
            "out": np.zeros((rows_out, 128), np.uint32),
        }

    def want(b: Buffers) -> NDArray:
        src, out = np.asarray(b["src"]), np.zeros((rows_out, 128), np.uint32)
        for warp in range(4):
            for n, half in enumerate(halves):
                for r in range(count):
                    shaped_at, plain_at = (
                        (r + n * count, 32 * warp + np.arange(32)),
                        (frag_column[r], 32 * warp + half + frag_lane[r]),
                    )
                    if store:
                        out[plain_at] = src[shaped_at]
                    else:
                        out[shaped_at] = src[plain_at]
        return out

    name = f"tcgen05/{'st' if store else 'ld'}.{shape}.x{num}"
    return Expected(
        Case(name, _with_tensor_memory("\n".join(body)), buffers, smem=64, target="sm_100a"), want
    )


# ---- mma ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """One `.kind` with its operand types: (descriptor field, decoder of 32-byte rows)."""

    name: str
    a_type: str
    b_type: str
    accumulator: str = "f32"

    @property
    def scaled(self) -> bool:
        return self.name.startswith("mxf")


_FIELD = {  # atype / btype of tables 42 to 44
    "f16": {"f16": 0, "bf16": 1},
    "tf32": {"tf32": 2},
    "f8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "mxf8f6f4": {"e4m3": 0, "e5m2": 1, "e2m3": 3, "e3m2": 4, "e2m1": 5},
    "i8": {"u8": 0, "s8": 1},
    "mxf4": {"e2m1": 1},
    "mxf4nvf4": {"e2m1": 1},
}
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
_SUB_BYTE = {  # bits of a code, and its value by the OCP MX formats: sign, exponent (bias 1, 3, 1), mantissa
    "e2m3": (6, lambda c: _value(c, 2, 3, 1)),
    "e3m2": (6, lambda c: _value(c, 3, 2, 3)),
    "e2m1": (4, lambda c: _value(c, 2, 1, 1)),
}


def _value(codes: NDArray, exponent_bits: int, mantissa_bits: int, bias: int) -> NDArray[np.float64]:
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    fraction = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    magnitude = np.where(
        exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias)
    )
    return np.where(codes >> (exponent_bits + mantissa_bits), -magnitude, magnitude)


_NUMPY = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "u8": np.uint8, "s8": np.int8}  # fmt: skip


def _padded(codes: NDArray, bits: int) -> NDArray[np.uint8]:
    """16 codes of 4 or 6 bits, packed from bit 0 on, to each 16 bytes (9.7.16.3.2); what pads them must not matter: 0xa5."""
    stream = (codes.reshape(len(codes), 2, 16, 1) >> np.arange(bits) & 1).astype(np.uint8)
    packed = np.packbits(stream.reshape(len(codes), 2, -1), axis=-1, bitorder="little")
    return np.pad(packed, ((0, 0), (0, 0), (0, 16 - 2 * bits)), constant_values=0xA5).reshape(len(codes), 32)


def _operand(
    rng: np.random.Generator, rows: int, dtype: str, kind: str
) -> tuple[NDArray[np.float64], NDArray[np.uint8]]:
    """Random small values (rows, K) and their bytes (rows, 32); two e2m1 to a byte, the first in the low half."""
    if dtype in _SUB_BYTE and kind.endswith("f8f6f4"):
        bits, values_of = _SUB_BYTE[dtype]
        codes = rng.integers(0, 1 << bits, (rows, 32))
        return values_of(codes), _padded(codes, bits)
    if dtype == "e2m1":
        codes = rng.integers(0, 16, (rows, 64))
        values = _E2M1[codes & 7] * np.where(codes & 8, -1, 1)
        return values, (codes[:, 0::2] | codes[:, 1::2] << 4).astype(np.uint8)
    k = 32 // np.dtype(_NUMPY[dtype]).itemsize
    values = rng.integers(0 if dtype == "u8" else -3, 4, (rows, k)).astype(np.float64)
    return values, np.ascontiguousarray(values.astype(_NUMPY[dtype])).view(np.uint8)


@dataclass(frozen=True)
class Layout:
    """A canonical layout (9.7.16.3.3): swizzle width in bytes (0: none) and major."""

    swizzle: int
    mn_major: bool = False

    def offsets(self, rows: int, size: int, leading: int, stride: int) -> NDArray[np.int64]:
        """Byte offset of byte (row, k byte) of an operand whose elements have `size` bytes, (rows, 32)."""
        row, byte = np.arange(rows)[:, None], np.arange(32)[None, :]
        if self.mn_major:
            k, within = byte // size, byte % size
            mn = row * size + within  # byte along M or N
            if self.swizzle == 0:
                offset = mn % 16 + mn // 16 * stride + k % 8 * 16 + k // 8 * leading
            else:
                offset = (
                    mn % self.swizzle + mn // self.swizzle * leading + k % 8 * self.swizzle + k // 8 * stride
                )
        elif self.swizzle == 0:
            offset = row % 8 * 16 + row // 8 * stride + byte // 16 * leading + byte % 16
        else:
            offset = row % 8 * self.swizzle + row // 8 * stride + byte
        mask = {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]
        return offset ^ ((offset >> 7 & mask) << 4)

    def descriptor(self, start: int, leading: int, stride: int) -> int:
        """Table 40, without the shared-memory base that the kernel adds."""
        code = {0: 0, 128: 2, 64: 4, 32: 6}[self.swizzle]
        return start >> 4 | (leading >> 4) << 16 | (stride >> 4) << 32 | 1 << 46 | code << 61


@dataclass(frozen=True)
class Mma:
    """One tcgen05.mma."""

    kind: Kind
    m: int = 128
    n: int = 64
    group: int = 1
    a_layout: Layout = Layout(128)
    b_layout: Layout = Layout(128)
    negate: tuple[int, int] = (0, 0)
    accumulate: bool = True
    scale_ids: tuple[int, int] = (0, 0)
    extra: str = ""  # "lanes": disable-output-lane; "scale": scale-input-d of 3

    @property
    def name(self) -> str:
        parts = [self.kind.name, self.kind.a_type, self.kind.b_type, f"m{self.m}n{self.n}"]
        for side, layout in (("a", self.a_layout), ("b", self.b_layout)):
            parts.append(f"{side}{'mn' if layout.mn_major else 'k'}{layout.swizzle}")
        if self.negate != (0, 0):
            parts.append(f"neg{self.negate[0]}{self.negate[1]}")
        if not self.accumulate:
            parts.append("fresh")
        if self.kind.scaled:
            parts.append(f"id{self.scale_ids[0]}{self.scale_ids[1]}")
        return ".".join(
            [f"tcgen05/mma{'2' if self.group == 2 else ''}", *parts, *([self.extra] if self.extra else [])]
        )

    def instruction_descriptor(self) -> int:
        """Tables 42 to 44."""
        k = self.kind
        bits = (
            _FIELD[k.name][k.a_type] << 7
            | _FIELD[k.name][k.b_type] << 10
            | self.negate[0] << 13
            | self.negate[1] << 14
        )
        bits |= int(self.a_layout.mn_major) << 15 | int(self.b_layout.mn_major) << 16 | (self.n >> 3) << 17
        if k.scaled:
            scale_type = 0 if k.name == "mxf4nvf4" else 1
            return (
                bits
                | self.scale_ids[1] << 4
                | scale_type << 23
                | (self.m >> 7) << 27
                | self.scale_ids[0] << 29
            )
        return bits | {"f32": 1, "s32": 2, "f16": 0}[k.accumulator] << 4 | (self.m >> 4) << 24


_A_AT, _B_AT, _SFA_AT, _SFB_AT, _BARRIER_AT = 1024, 17408, 50176, 50688, 51712  # in shared memory
_IMAGE = _BARRIER_AT - 1024  # bytes filled from the image
_SFA_COLUMN, _SFB_COLUMN = 256, 272  # in tensor memory; the accumulator starts at 0


def _by_columns(x: Mma, line: Callable[[int, str], list[str]]) -> list[str]:
    """`line` for every group of columns of the accumulator: (first column, its registers)."""
    width = 32 if x.n % 32 == 0 else 16
    return [text for column in range(0, x.n, width) for text in line(column, _registers("acc", width))]


def _mma_body(x: Mma) -> str:
    group, width = f"cta_group::{x.group}", 32 if x.n % 32 == 0 else 16
    threads = 128 * x.group
    lines = [
        f"  .reg .b32 acc<{width}>, idesc, part<4>, sfa, sfb; .reg .b64 da, db; .reg .pred use;",
        "  // the image: operands and scales of this CTA",
        f"  mul.wide.u32 w, bx, {_IMAGE}; add.u64 w0, image, w; mov.u32 s, tx;",
        "  FILL: mul.wide.u32 w, s, 4; add.u64 w1, w0, w; ld.global.b32 t0, [w1]; shl.b32 u, s, 2; add.u32 u, u, smem; st.shared.b32 [u+1024], t0;",
        f"  add.u32 s, s, 128; setp.lt.u32 q, s, {_IMAGE // 4}; @q bra FILL;",
        f"  setp.eq.u32 p, tx, 0; @p mbarrier.init.shared.b64 [smem+{_BARRIER_AT}], 1; @p fence.mbarrier_init.release.cluster;",
        "  fence.proxy.async.shared::cta;",
        "  mul.wide.u32 w, gi, 4; add.u64 w0, acc_in, w; add.u64 w1, out, w;",
        *_by_columns(
            x,
            lambda column, registers: [
                *(f"  ld.global.b32 acc{i}, [w0+{4 * threads * (column + i)}];" for i in range(width)),
                f"  add.u32 u, lanes, {column}; tcgen05.st.sync.aligned.32x32b.x{width}.b32 [u], {registers};",
            ],
        ),
        "  tcgen05.wait::st.sync.aligned; tcgen05.fence::before_thread_sync;",
        "  bar.sync 0;"
        if x.group == 1
        else "  barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;",
        "  tcgen05.fence::after_thread_sync;",
        "  ld.global.b64 da, [parameters]; ld.global.b64 db, [parameters+8]; ld.global.b32 idesc, [parameters+16]; ld.global.b32 t5, [parameters+20];",
        "  and.b32 u, smem, 0x3ffff; shr.u32 u, u, 4; cvt.u64.u32 w2, u; add.u64 da, da, w2; add.u64 db, db, w2; setp.ne.u32 use, t5, 0;",
        "  mov.u32 u, %cluster_ctarank; add.u32 u, u, tx; setp.ne.u32 q, u, 0; @q bra WAIT;",
    ]
    operands, vector = "[tmem], da, db, idesc", ""
    if x.kind.scaled:
        blocks = [
            (_SFA_AT, _SFA_COLUMN),
            (_SFB_AT, _SFB_COLUMN),
            *([(_SFB_AT + 512, _SFB_COLUMN + 4)] if x.n > 128 else []),
        ]
        for at, column in blocks:  # a descriptor without swizzle: 8 rows to the next 8 are 128 bytes apart
            lines.append(
                f"  add.u32 t6, smem, {at}; and.b32 t6, t6, 0x3ffff; shr.u32 t6, t6, 4; mov.b32 t7, {8 | 1 << 14};"
                f" mov.b64 w2, {{t6, t7}}; add.u32 sfa, tmem, {column}; tcgen05.cp.{group}.32x128b.warpx4 [sfa], w2;"
            )
        lines.append(
            f"  add.u32 sfa, tmem, {_SFA_COLUMN | x.scale_ids[0] << 30}; add.u32 sfb, tmem, {_SFB_COLUMN | x.scale_ids[1] << 30};"
        )
        operands += ", [sfa], [sfb]"
        vector = f".block_scale.block{16 if x.kind.name == 'mxf4nvf4' else 32}"
    if x.extra == "lanes":
        lines.append(
            "  mov.b32 part0, 0x0000ffff; mov.b32 part1, 0x12345678; mov.b32 part2, 0; mov.b32 part3, -1;"
        )
        operands += ", {part0, part1, part2, part3}"
    operands += ", use" + (", 3" if x.extra == "scale" else "")
    multicast = (".multicast::cluster", ", h") if x.group == 2 else ("", "")
    lines += [
        f"  tcgen05.mma.{group}.kind::{x.kind.name}{vector} {operands};",
        f"  add.u32 s, smem, {_BARRIER_AT}; mov.b16 h, 3;",
        f"  tcgen05.commit.{group}.mbarrier::arrive::one.shared::cluster{multicast[0]}.b64 [s]{multicast[1]};",
        f"  WAIT: mbarrier.try_wait.parity.shared.b64 q, [smem+{_BARRIER_AT}], 0; @!q bra WAIT;",
        "  tcgen05.fence::after_thread_sync;",
        *_by_columns(
            x,
            lambda column, registers: [
                f"  add.u32 u, lanes, {column}; tcgen05.ld.sync.aligned.32x32b.x{width}.b32 {registers}, [u]; tcgen05.wait::ld.sync.aligned;",
                *(f"  st.global.b32 [w1+{4 * threads * (column + i)}], acc{i};" for i in range(width)),
            ],
        ),
    ]
    return "\n".join(lines)


def _blocked(scale: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """(rows, 4) scale bytes as `tcgen05.cp.32x128b` reads them, 128 rows at a time: row r at (r % 32) · 16 + (r // 32) · 4."""
    return scale.reshape(-1, 4, 32, 4).transpose(0, 2, 1, 3).reshape(-1)


def _strides(layout: Layout, rows: int, size: int) -> tuple[int, int]:
    """(leading, stride) byte offsets that pack the operand densely."""
    if layout.mn_major:
        if layout.swizzle == 0:
            return rows * size // 16 * 128, 128
        return 32 // size // 8 * 8 * layout.swizzle, 8 * layout.swizzle
    return (rows * 16, 128) if layout.swizzle == 0 else (16, 8 * layout.swizzle)


def _mma(x: Mma) -> Expected:
    kind, group = x.kind, x.group
    rows_a, rows_b = x.m // group, x.n // group
    size_a, size_b = (
        1 if t in _SUB_BYTE else np.dtype(_NUMPY[t]).itemsize for t in (kind.a_type, kind.b_type)
    )
    k = 64 if kind.name.startswith("mxf4") else 32 // size_a
    vector = {"mxf8f6f4": 32, "mxf4": 32, "mxf4nvf4": 16}.get(kind.name, k)

    def draw(rng: np.random.Generator) -> tuple[Buffers, NDArray]:
        (a, a_bytes), (b, b_bytes) = (
            _operand(rng, rows, dtype, kind.name) for rows, dtype in ((x.m, kind.a_type), (x.n, kind.b_type))
        )
        sfa, sfb = (rng.integers(124, 131, (rows, 4)).astype(np.uint8) for rows in (256, 256))
        if kind.name == "mxf4nvf4":  # unsigned e4m3 scales: powers of two
            sfa, sfb = ((s - 120 << 3).astype(np.uint8) for s in (sfa, sfb))
        decode = (lambda s: s.view(ml_dtypes.float8_e4m3fn).astype(np.float64)) if kind.name == "mxf4nvf4" else (lambda s: np.exp2(s.astype(np.float64) - 127))  # fmt: skip
        image = np.zeros((group, _IMAGE), np.uint8)
        (lead_a, step_a), (lead_b, step_b) = (
            _strides(x.a_layout, rows_a, size_a),
            _strides(x.b_layout, rows_b, size_b),
        )
        for cta in range(group):
            at = _A_AT - 1024 + x.a_layout.offsets(rows_a, size_a, lead_a, step_a)
            image[cta, at] = a_bytes[cta * rows_a : (cta + 1) * rows_a]
            at = _B_AT - 1024 + x.b_layout.offsets(rows_b, size_b, lead_b, step_b)
            image[cta, at] = b_bytes[cta * rows_b : (cta + 1) * rows_b]
            image[cta, _SFA_AT - 1024 : _SFB_AT - 1024] = _blocked(sfa[cta * 128 : (cta + 1) * 128])
            image[cta, _SFB_AT - 1024 : _IMAGE] = _blocked(sfb)
        if kind.scaled:
            chunks = k // vector
            ids = x.scale_ids
            scale_a = decode(sfa)[: x.m, ids[0] : ids[0] + chunks]
            scale_b = decode(sfb)[: x.n, ids[1] : ids[1] + chunks]
            a, b = a * np.repeat(scale_a, vector, 1), b * np.repeat(scale_b, vector, 1)
        product = (-a if x.negate[0] else a) @ (-b if x.negate[1] else b).T
        start = rng.integers(-9, 10, (x.n, 128 * group))
        descriptors = [
            x.a_layout.descriptor(_A_AT, lead_a, step_a),
            x.b_layout.descriptor(_B_AT, lead_b, step_b),
        ]
        parameters = np.array([*descriptors, x.instruction_descriptor() | int(x.accumulate) << 32], np.uint64)
        words = (
            start.astype(np.int32).view(np.uint32)
            if kind.accumulator == "s32"
            else start.astype(np.float32).view(np.uint32)
        )
        buffers = {
            "image": image.view(np.uint32),
            "parameters": parameters,
            "acc_in": words,
            "out": np.zeros_like(words),
        }
        return buffers, _accumulate(x, product, start)

    case = Case(
        x.name, _with_tensor_memory(_mma_body(x), group), lambda rng: draw(rng)[0], grid=(group, 1, 1), cluster=(group, 1, 1),
        smem=_BARRIER_AT + 16, target="sm_100a",
    )  # fmt: skip

    def want(_: Buffers) -> NDArray:
        return draw(case.rng())[1]

    return Expected(case, want)


def _accumulate(x: Mma, product: NDArray, start: NDArray) -> NDArray:
    """The accumulator registers afterwards, (n, 128 · group) words: lane and column by 9.7.16.10.5."""
    out = start.astype(np.float64)
    rows = x.m // x.group
    enabled = np.ones(128, bool)
    if x.extra == "lanes":
        masks = [0x0000FFFF, 0x12345678, 0, 0xFFFFFFFF]
        enabled = ~np.array([bool(masks[lane // 32] >> lane % 32 & 1) for lane in range(128)])
    for cta in range(x.group):
        part = product[cta * rows : (cta + 1) * rows]  # (rows, n)
        placed = np.full((128, x.n), np.nan)
        if rows == 128:  # layouts A and D: lane = row
            placed[:] = part
        elif x.group == 1:  # layout F: rows in lanes 0-15, 32-47, 64-79, 96-111
            i = np.arange(64)
            placed[i // 16 * 32 + i % 16] = part
        else:  # layout B: the first half of N in lanes 0-63, the second in lanes 64-127
            placed[:64, : x.n // 2], placed[64:, : x.n // 2] = part[:, : x.n // 2], part[:, x.n // 2 :]
        lanes = slice(cta * 128, (cta + 1) * 128)
        before = out[:, lanes].T * (2.0**-3 if x.extra == "scale" else 1.0) * x.accumulate
        touched = ~np.isnan(placed) & enabled[:, None]
        out[:, lanes] = np.where(touched, before + np.nan_to_num(placed), out[:, lanes].T).T
    return (
        out.astype(np.int32).view(np.uint32)
        if x.kind.accumulator == "s32"
        else out.astype(np.float32).view(np.uint32)
    )


KINDS = [
    Kind("f16", "bf16", "bf16"), Kind("f16", "f16", "f16"), Kind("tf32", "tf32", "tf32"), Kind("f8f6f4", "e4m3", "e4m3"),
    Kind("f8f6f4", "e5m2", "e4m3"), Kind("i8", "s8", "s8", "s32"), Kind("i8", "u8", "s8", "s32"), Kind("mxf8f6f4", "e4m3", "e4m3"),
    Kind("mxf8f6f4", "e5m2", "e4m3"), Kind("mxf4", "e2m1", "e2m1"), Kind("mxf4nvf4", "e2m1", "e2m1"),
    *(Kind(kind, a, b) for kind in ("f8f6f4", "mxf8f6f4") for a, b in (("e2m3", "e3m2"), ("e2m1", "e4m3"), ("e5m2", "e2m1"))),
]  # fmt: skip
MX, BF16 = Kind("mxf8f6f4", "e4m3", "e4m3"), Kind("f16", "bf16", "bf16")


def _mmas() -> list[Mma]:
    every = [Mma(kind) for kind in KINDS]
    every += [
        Mma(MX, scale_ids=ids, n=n) for ids, n in (((1, 0), 32), ((2, 3), 64), ((3, 1), 128), ((0, 2), 96))
    ]
    every += [Mma(MX, n=n) for n in (16, 240, 256)]
    every += [
        replace(Mma(kind), a_layout=Layout(s), b_layout=Layout(s)) for kind in (MX, BF16) for s in (0, 32, 64)
    ]
    every += [Mma(kind, a_layout=Layout(s, am), b_layout=Layout(s, bm)) for kind in (MX, BF16) for s in (0, 64, 128) for am, bm in ((True, False), (False, True), (True, True))]  # fmt: skip
    every += [
        Mma(BF16, m=64),
        Mma(Kind("f8f6f4", "e4m3", "e4m3"), m=64, n=32),
        Mma(BF16, negate=(1, 0)),
        Mma(MX, negate=(0, 1)),
        Mma(MX, accumulate=False),
    ]
    every += [Mma(BF16, extra="lanes"), Mma(BF16, extra="scale")]
    every += [Mma(BF16, m=256, group=2), Mma(BF16, m=128, group=2), Mma(MX, m=256, group=2, n=128, scale_ids=(1, 2)), Mma(MX, m=256, group=2, b_layout=Layout(128, True), n=256)]  # fmt: skip
    return every


def cases() -> list[Expected]:
    """Loads, stores and MMAs with their expected outputs."""
    moves = [_load_store(shape, num, store=store) for shape, num in (("32x32b", 1), ("32x32b", 32), ("16x64b", 1), ("16x64b", 8), ("16x128b", 1), ("16x128b", 8), ("16x256b", 1), ("16x256b", 4)) for store in (False, True)]  # fmt: skip
    return [*moves, *(_mma(x) for x in _mmas())]

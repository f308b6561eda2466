"""The fifth-generation tensor core: scale copies, matrix multiplies, commits.

One matrix multiply is a binary64 dot product added to the accumulator and rounded once to f32: the last bit may differ
from hardware. Operations of one warp complete in order, as pipelined tcgen05 instructions do.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ..errors import Fault
from .barriers import find_mbarrier
from .descriptors import E8M0, UE4M3, check_operand, decode_bytes, read_operand
from .memory import who
from .order import Clock
from .state import CTA, OFFSET_MASK, RANK_SHIFT, TMEM_LANES, TMEM_POISON
from .tmem import check_columns, column_index, publish_tensor, stream_clock, tensor_clock
from .values import Array, Mask, Value, count_lanes, first

if TYPE_CHECKING:
    from .state import Warp


# ------------------------------------------------------------------ tensor-core pipe
def _issuing_ctas(W: Warp, m: Mask, group: int, what: str, line: int) -> list[CTA]:
    if count_lanes(m) != 1:
        raise Fault(f"{what} must be issued by one thread, {count_lanes(m)} issue it: {who(W, line)}")
    if group == 1:
        return [W.cta]
    pair = W.cta.pair
    if len(pair) != 2:
        raise Fault(f"{what} with cta_group::2 needs a cluster with an even number of CTAs: {who(W, line)}")
    return pair


def tc_commit(W: Warp, a: Value, mask: Value | None, group: int, m: Mask, line: int) -> None:
    """Arrive on mbarriers when all earlier tensor-core operations of this thread are complete."""
    if count_lanes(m) != 1:
        raise Fault(f"tcgen05.commit must be issued by one thread, {count_lanes(m)} issue it: {who(W, line)}")
    address = first(a, m)
    stream = W.stream("tensor-core operations", "mma")
    epoch = stream.epoch
    stream.epoch += 1
    if mask is None:
        targets = [address]
    else:
        bits = first(mask, m)
        targets = [address & OFFSET_MASK | r << RANK_SHIFT for r in range(16) if bits >> r & 1]
    barriers = [find_mbarrier(W, t, line, asynchronous=True) for t in targets]
    known = W.current().copy()
    publish_tensor(W, known.v)
    if W.tensor is not None:  # what the committed operations are ordered after is complete with them
        np.maximum(known.v[0], W.tensor.v[0], out=known.v[0])

    def arrive() -> None:
        for barrier in barriers:
            barrier.owe("tcgen05.commit", line, W)
            barrier.gather.join(known)
            stream.complete(barrier.gather, epoch)
            barrier.arrive(W.machine, 1, f"tcgen05.commit by {who(W, line)}" if not barrier.pending else "")

    # What was committed is complete; when its arrival is seen, the ISA does not order against that of later commits.
    engine = W.machine.engine

    def complete() -> None:
        engine.issue(arrive, line, None, "mma")

    engine.issue(complete, line, stream.pipe)
    W.machine.count("commit", 1)


_COPY_SHAPES = {
    "128x256b": (128, 32),
    "128x128b": (128, 16),
    "64x128b": (64, 16),
    "32x128b": (32, 16),
    "4x256b": (4, 32),
}


def tc_copy(
    W: Warp, a: Value, descriptor: Value, shape: str, replicate: str | None, group: int, m: Mask, line: int
) -> None:
    """Shared memory → TMEM, in each CTA of the group from its own shared memory."""
    ctas = _issuing_ctas(W, m, group, "tcgen05.cp", line)
    address, d = first(a, m), first(descriptor, m)
    column = address & 0xFFFF
    rows, row_bytes = _COPY_SHAPES[shape]
    words = row_bytes // 4
    if shape == "4x256b" or (replicate and replicate.startswith("warpx2")):
        raise Fault(f"tcgen05.cp.{shape} {replicate or ''} is not modelled: {who(W, line)}")
    if address >> 16 & 0x7F:
        raise Fault(f"tcgen05.cp to lane {address >> 16 & 0x7F}: lane 0 expected: {who(W, line)}")
    stream = W.stream("tensor-core operations", "mma")
    epoch = stream.note(line)
    accessor = f"tcgen05.cp by {W.name}"
    with stream_clock(W, stream) as clock:
        for cta in ctas:
            check_columns(cta, column, words, "tcgen05.cp", W, line)
            check_operand(cta, d, True, False, rows, row_bytes, 1, clock, stream.actor, epoch, line, accessor)
            _ = cta.tmem
            if cta.tmem_shadow:
                index = column_index(0, 3, column, words)
                cta.tmem_shadow.write(tensor_clock(W, clock), 0, index, stream.actor, epoch, line, accessor)
    W.machine.count("tcgen05.cp", 1)

    def land() -> None:
        for cta in ctas:
            data = read_operand(cta, d, True, False, rows, row_bytes, 1).view(np.uint32)
            for start in range(0, TMEM_LANES, rows):
                cta.tmem[start : start + rows, column : column + words] = data

    op = W.machine.engine.issue(land, line, stream.pipe)
    if not op.done:
        for cta in ctas:
            if cta.machine.engine.pending and stream.pipe.ops and stream.pipe.ops[0] is op:
                cta.tmem[:, column : column + words] = TMEM_POISON


# ------------------------------------------------------------------ matrix multiply
_NARROW_FORMATS = {0: "e4m3", 1: "e5m2", 3: "e2m3", 4: "e3m2", 5: "e2m1 padded"}
_KINDS = {
    # kind: element formats, bytes of an element (packed FP4 counts as bytes)
    "mxf8f6f4": (_NARROW_FORMATS, 1),
    "f8f6f4": (_NARROW_FORMATS, 1),
    "mxf4": ({1: "e2m1"}, 1),
    "mxf4nvf4": ({1: "e2m1"}, 1),
    "f16": ({0: "f16", 1: "bf16"}, 2),
    "tf32": ({2: "tf32"}, 4),
    "i8": ({0: "u8", 1: "s8"}, 1),
}
_K_BYTES = 32
"""One instruction multiplies 32 bytes of K in every kind."""


class MmaShape:
    """A decoded instruction descriptor."""

    def __init__(self, kind: str, idesc: int, group: int, block: int):
        formats, self.element = _KINDS[kind]
        a, b = idesc >> 7 & 7, idesc >> 10 & 7
        if a not in formats or b not in formats:
            raise Fault(
                f"kind::{kind}: element formats {a} and {b} of the instruction descriptor are not modelled"
            )
        self.a_format, self.b_format = formats[a], formats[b]
        self.padded_a = formats is _NARROW_FORMATS and a >= 3
        """4- and 6-bit elements, 16 of them padded to 16 bytes of shared memory (PTX ISA 9.7.16.3.2)."""
        if (self.padded_a and idesc >> 15 & 1) or (formats is _NARROW_FORMATS and b >= 3 and idesc >> 16 & 1):
            raise Fault(f"kind::{kind}: MN-major operands of 4 or 6 bits are not modelled")
        self.negate_a, self.negate_b = bool(idesc >> 13 & 1), bool(idesc >> 14 & 1)
        self.a_mn_major, self.b_mn_major = bool(idesc >> 15 & 1), bool(idesc >> 16 & 1)
        self.n = (idesc >> 17 & 63) * 8
        self.m = (idesc >> 24 & 31) * 16
        self.a_scale_id, self.b_scale_id = idesc >> 29 & 3, idesc >> 4 & 3
        self.e8m0 = bool(idesc >> 23 & 1)
        self.k = _K_BYTES // self.element * (2 if kind.startswith("mxf4") else 1)
        if idesc >> 2 & 1:
            raise Fault("sparse MMA is not modelled")
        if not block and kind != "i8" and idesc >> 4 & 3 != 1:
            raise Fault(
                f"accumulator format {idesc >> 4 & 3} of the instruction descriptor is not modelled (f32 is)"
            )
        if idesc >> 3 & 1 and not block:
            raise Fault("saturating MMA is not modelled")
        self.rows_a, self.rows_b = self.m // group, self.n // group
        if self.rows_a not in (64, 128) or self.m not in ((64, 128) if group == 1 else (128, 256)):
            raise Fault(f"M = {self.m} is not valid with cta_group::{group}")
        step = (16 if group == 2 else 8) if self.rows_a == 64 else 16 * group
        if not step <= self.n <= 256 or self.n % step:
            raise Fault(f"N = {self.n} is not valid with M = {self.m} and cta_group::{group}")
        # accumulator placement: (first TMEM lane pattern, first column of D, columns)
        i = np.arange(self.rows_a)
        if self.rows_a == 128:
            self.parts = [(slice(0, 128), 0, self.n)]
        elif group == 1:
            self.parts = [(i // 16 * 32 + i % 16, 0, self.n)]
        else:
            half = self.n // 2
            self.parts = [(slice(0, 64), 0, half), (slice(64, 128), half, half)]
        self.columns = self.parts[0][2]


_shape = lru_cache(maxsize=256)(MmaShape)


def _scales(cta: CTA, address: int, rows: int, byte: int, groups: int, e8m0: bool) -> Array:
    """[rows, groups]: row i is in lane i%32, column base + i//32, byte `byte` and up of the word."""
    column = address & 0x1FF
    words = cta.tmem[:32, column : column + -(-rows // 32)]
    codes = (
        np.ascontiguousarray(words.T)
        .reshape(-1)[:rows]
        .view(np.uint8)
        .reshape(rows, 4)[:, byte : byte + groups]
    )
    return (E8M0 if e8m0 else UE4M3)[codes]


def tc_mma(
    W: Warp,
    kind: str,
    d: Value,
    a: Value,
    a_in_tmem: bool,
    b: Value,
    idesc: Value,
    scale_a: Value | None,
    scale_b: Value | None,
    block: int,
    enable: Value,
    disable: list[Value] | None,
    scale_input: Value | None,
    group: int,
    m: Mask,
    line: int,
) -> None:
    ctas = _issuing_ctas(W, m, group, "tcgen05.mma", line)
    if group == 2 and W.cta.rank & 1:
        raise Fault(f"tcgen05.mma with cta_group::2 issued by the odd CTA of the pair: {who(W, line)}")
    d, a, b, idesc = first(d, m), first(a, m), first(b, m), first(idesc, m)
    accumulate = bool(first(enable, m))
    sfa, sfb = (first(scale_a, m), first(scale_b, m)) if block else (0, 0)
    exponent = first(scale_input, m) if scale_input is not None else 0
    s = _shape(kind, idesc, group, block)
    if a_in_tmem and s.padded_a:
        raise Fault(f"tcgen05.mma: A of 4 or 6 bits in tensor memory is not modelled: {who(W, line)}")
    keep = _kept_lanes(disable, m)
    groups = s.k // block if block else 0
    if groups and (s.a_scale_id + groups > 4 or s.b_scale_id + groups > 4):
        raise Fault(
            f"tcgen05.mma: scale-factor ids {s.a_scale_id}, {s.b_scale_id} with {groups} scales: {who(W, line)}"
        )
    stream = W.stream("tensor-core operations", "mma")
    epoch = stream.note(line)
    with stream_clock(W, stream) as clock:
        _check_mma(
            W, s, ctas, d, a, a_in_tmem, b, sfa, sfb, groups, accumulate, clock, stream.actor, epoch, line
        )
    W.machine.count("mma", 1)

    def run() -> None:
        operands_b = [
            decode_bytes(read_operand(c, b, True, s.b_mn_major, s.rows_b, _K_BYTES, s.element), s.b_format)
            for c in ctas
        ]
        y = operands_b[0] if len(ctas) == 1 else np.concatenate(operands_b)
        if s.negate_b:
            y = -y
        for cta in ctas:
            if a_in_tmem:
                raw = np.ascontiguousarray(cta.tmem[: s.rows_a, a & 0xFFFF : (a & 0xFFFF) + 8]).view(np.uint8)
            else:
                raw = read_operand(cta, a, True, s.a_mn_major, s.rows_a, _K_BYTES, s.element)
            x = decode_bytes(raw, s.a_format)
            if s.negate_a:
                x = -x
            if groups == 0:
                product = x @ y.T
            else:
                sa = _scales(cta, sfa, s.rows_a, s.a_scale_id, groups, s.e8m0)
                sb = _scales(cta, sfb, s.n, s.b_scale_id, groups, s.e8m0)
                product = _scaled_product(x, y, sa, sb, groups)
            _accumulate(cta, s, d & 0xFFFF, product, accumulate, kind == "i8", exponent, keep)
        W.machine.progress += 1

    # for timelines: 16384 FLOP a clock and SM for 8-bit operands
    W.machine.engine.issue(run, line, stream.pipe, ticks=s.rows_a * s.n * 2 * _K_BYTES // 16384)


@lru_cache(maxsize=64)
def _scratch(rows: int, n: int) -> tuple[Array, Array]:
    """Work space for a product, in binary64 and in f32; one instruction runs at a time."""
    return np.empty((rows, n)), np.empty((rows, n), np.float32)


def _scaled_product(x: Array, y: Array, sa: Array, sb: Array, groups: int) -> Array:
    """Σ over scale groups of (x·y)·sa·sb; every scale is applied exactly."""
    step = x.shape[1] // groups
    total, _ = _scratch(x.shape[0], y.shape[0])
    for g in range(groups):
        xg, yg = x[:, g * step : (g + 1) * step], y[:, g * step : (g + 1) * step]
        # powers of two and e4m3 scales: scaling an operand by them is exact in binary64
        xg, yg = xg * sa[:, g, None], yg * sb[:, g, None]
        if g == 0:
            np.matmul(xg, yg.T, out=total)
        else:
            total += xg @ yg.T
    return total


def _kept_lanes(disable: list[Value] | None, m: Mask) -> Array | None:
    if disable is None:
        return None
    bits = np.array([first(v, m) for v in disable], dtype=np.uint32)
    lanes = np.unpackbits(bits.view(np.uint8), bitorder="little").astype(bool)
    return ~lanes if lanes.any() else None


def _check_mma(
    W: Warp,
    s: MmaShape,
    ctas: list[CTA],
    d: int,
    a: int,
    a_in_tmem: bool,
    b: int,
    sfa: int,
    sfb: int,
    groups: int,
    accumulate: bool,
    clock: Clock,
    actor: int,
    epoch: int,
    line: int,
) -> None:
    """Allocation, bounds and ordering of everything the instruction touches."""
    accessor = f"tcgen05.mma by {W.name}"
    for cta in ctas:
        column = d & 0xFFFF
        check_columns(cta, column, s.columns, "tcgen05.mma accumulator", W, line)
        reads = [(column, s.columns)] if accumulate else []
        if groups:
            for address, rows in ((sfa, s.rows_a), (sfb, s.n)):
                reads.append((address & 0x1FF, -(-rows // 32)))
        if a_in_tmem:
            reads.append((a & 0xFFFF, _K_BYTES // 4))
        else:
            check_operand(
                cta, a, True, s.a_mn_major, s.rows_a, _K_BYTES, s.element, clock, actor, epoch, line, accessor
            )
        check_operand(
            cta, b, True, s.b_mn_major, s.rows_b, _K_BYTES, s.element, clock, actor, epoch, line, accessor
        )
        _ = cta.tmem
        shadow = cta.tmem_shadow
        for start, n in reads:
            check_columns(cta, start, n, "tcgen05.mma operand", W, line)
        if shadow and not shadow.repeated(actor, epoch, (column, s.columns, *reads)):
            ordered = tensor_clock(W, clock)
            for start, n in reads:
                shadow.read(ordered, 0, column_index(0, 3, start, n), actor, epoch, line, accessor)
            shadow.write(ordered, 0, column_index(0, 3, column, s.columns), actor, epoch, line, accessor)
            shadow.remember(actor, epoch, (column, s.columns, *reads))


def _accumulate(
    cta: CTA,
    s: MmaShape,
    column: int,
    product: Array,
    accumulate: bool,
    integer: bool,
    exponent: int,
    keep: Array | None,
) -> None:
    """D = product (+ D), rounded once; `product` may be overwritten."""
    for rows, first_n, n in s.parts:
        view = cta.tmem[:, column : column + n]
        part = product[:, first_n : first_n + n]
        if integer:
            old = view[rows].view(np.int32).astype(np.int64) if accumulate else 0
            new = (old + part.astype(np.int64)).astype(np.int32).view(np.uint32)
        else:
            if accumulate:
                old = view[rows].view(np.float32)
                part += np.ldexp(old.astype(np.float64), -exponent) if exponent else old
            _, single = _scratch(*part.shape)
            single[...] = part
            new = single.view(np.uint32)
            if math.isnan(np.dot(single.reshape(-1), single.reshape(-1))):
                new = np.where(np.isnan(single), np.uint32(0x7FFFFFFF), new)
        if keep is not None:
            new = np.where(keep[np.arange(TMEM_LANES)[rows], None], new, view[rows])
        view[rows] = new

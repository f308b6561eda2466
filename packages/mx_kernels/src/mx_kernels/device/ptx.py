"""Every line of inline PTX, but for the conversions of wgmma_dequantize.py.

Plain functions: they run while a kernel is traced and leave one instruction behind. Predicated loads and stores are
written out, because a guarded `if` in the DSL becomes a branch and a warp's loads then no longer leave together.
"""

from collections.abc import Sequence
from typing import Any

import cutlass.cute as cute
import cutlass.cute.arch as ca
from cutlass import Boolean, Float32, Int32, Uint16, Uint32


def load_v4(ptr: cute.Pointer, pred: Boolean) -> list[Uint32]:
    """16 bytes of global memory as four words; zeros, and no access, where `pred` is false.

    A plain load: `.nc` and `L1::no_allocate` were a tenth slower on an H200.
    """
    return _load_vector(ptr, 4, pred)


def load_v2(ptr: cute.Pointer, pred: Boolean) -> list[Uint32]:
    """8 bytes of global memory as two words; zeros, and no access, where `pred` is false."""
    return _load_vector(ptr, 2, pred)


def _load_vector(ptr: cute.Pointer, words: int, pred: Boolean) -> list[Uint32]:
    w = ", ".join(f"{{$w{i}}}" for i in range(words))
    zero = " ".join(f"mov.b32 {{$w{i}}}, 0;" for i in range(words))
    return list(
        ca.inline_ptx(
            f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; {zero} @p ld.global.v{words}.b32 {{{w}}}, [{{$r0}}]; }}",
            write_only_types=[Uint32] * words,
            read_only_args=[ptr, Int32(pred)],
        )
    )


def copy_async(shared: cute.Pointer, ptr: cute.Pointer, pred: Boolean) -> None:
    """Begin to copy 16 bytes from global to shared memory, past L1; zeros, and no access, where `pred` is false."""
    ca.inline_ptx(
        "{ .reg .pred absent; setp.eq.b32 absent, {$r2}, 0; "
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16, absent; }",
        read_only_args=[shared, ptr, Int32(pred)],
    )


def load_scalar(ptr: cute.Pointer, bits: int, pred: Boolean) -> Uint32:
    """One element of 8, 16 or 32 bits, zero-extended; zero, and no access, where `pred` is false."""
    if bits == 32:
        body = "mov.b32 {$w0}, 0; @p ld.global.nc.b32 {$w0}, [{$r0}];"
    else:
        body = f".reg .b16 h; mov.b16 h, 0; @p ld.global.nc.b{bits} h, [{{$r0}}]; cvt.u32.u16 {{$w0}}, h;"
    return ca.inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; {body} }}",
        write_only_types=[Uint32],
        read_only_args=[ptr, Int32(pred)],
    )


def store_words(ptr: cute.Pointer, words: Sequence[Any], pred: Boolean, space: str = "global") -> None:
    """1, 2 or 4 words to global or shared memory as one access, where `pred` is true."""
    names = ", ".join(f"{{$r{i + 2}}}" for i in range(len(words)))
    vector, operand = ("", names) if len(words) == 1 else (f".v{len(words)}", f"{{{names}}}")
    # Not inline_ptx's own predicate: a condition known while compiling would be printed as `@-1`.
    ca.inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; @p st.{space}{vector}.b32 [{{$r0}}], {operand}; }}",
        read_only_args=[ptr, Int32(pred), *words],
    )


def store_byte(ptr: cute.Pointer, word: Any, pred: Boolean, space: str = "global") -> None:
    """The low byte of `word` to global or shared memory, where `pred` is true."""
    ca.inline_ptx(
        f"{{ .reg .pred p; setp.ne.b32 p, {{$r1}}, 0; @p st.{space}.b8 [{{$r0}}], {{$r2}}; }}",
        read_only_args=[ptr, Int32(pred), Uint16(word)],
    )


def max_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """Maximum of each half, unsigned: orders non-negative bf16 pairs by value, NaN above Inf above the rest."""
    return _binary("max.u16x2 {$w0}, {$r0}, {$r1};", a, b)


def min_u16x2(a: Uint32, b: Uint32) -> Uint32:
    """Minimum of each half, unsigned."""
    return _binary("min.u16x2 {$w0}, {$r0}, {$r1};", a, b)


def max_u32(a: Uint32, b: Uint32) -> Uint32:
    """Unsigned maximum."""
    return _binary("max.u32 {$w0}, {$r0}, {$r1};", a, b)


def max_abs(a: Float32, b: Float32) -> Float32:
    """max(|a|, |b|), NaN if either is: one instruction."""
    return ca.inline_ptx(
        "{ .reg .f32 x, y; abs.f32 x, {$r0}; abs.f32 y, {$r1}; max.NaN.f32 {$w0}, x, y; }",
        write_only_types=[Float32],
        read_only_args=[a, b],
    )


def min_u32(a: Uint32, b: Uint32) -> Uint32:
    """Unsigned minimum."""
    return _binary("min.u32 {$w0}, {$r0}, {$r1};", a, b)


def low_halves(a: Uint32, b: Uint32) -> Uint32:
    """The low 16 bits of a, below the low 16 bits of b."""
    return _binary("prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;", a, b)


def high_halves(a: Uint32, b: Uint32) -> Uint32:
    """The high 16 bits of a, below the high 16 bits of b."""
    return _binary("prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", a, b)


def pack_bf16(low: Float32, high: Float32) -> Uint32:
    """Two fp32 values rounded to nearest-even bf16, in one word."""
    return ca.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Uint32], read_only_args=[high, low]
    )


def pack_fp8x4(values: list[Float32], fp8: str) -> Uint32:
    """Four fp32 values as FP8 codes in one word (`fp8`: "e4m3" or "e5m2"): nearest-even, saturating, NaN as 0x7F."""
    return ca.inline_ptx(
        "{ .reg .b16 lo, hi; "
        f"cvt.rn.satfinite.{fp8}x2.f32 lo, {{$r1}}, {{$r0}}; "
        f"cvt.rn.satfinite.{fp8}x2.f32 hi, {{$r3}}, {{$r2}}; "
        "mov.b32 {$w0}, {lo, hi}; }",
        write_only_types=[Uint32],
        read_only_args=values,
    )


def _binary(text: str, a: Uint32, b: Uint32) -> Uint32:
    return ca.inline_ptx(text, write_only_types=[Uint32], read_only_args=[a, b])


def exp2(x: Float32) -> Float32:
    """2^x to 2 ulp for x < 128. Flushes subnormals: of x, where 2^x is 1 anyway, and of results below 2^-126."""
    return ca.inline_ptx("ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def reciprocal(x: Float32) -> Float32:
    """1/x to 1 ulp, for 2^-126 <= x <= 2^126 only, where nothing is subnormal that a flush could lose."""
    return ca.inline_ptx("rcp.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[x])


def fma(a: Any, b: Any, c: Any) -> Float32:
    """a·b + c, rounded once."""
    return ca.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


def clamp(x: Float32, low: float, high: float) -> Float32:
    """X within [low, high]; `high` for NaN."""
    capped = ca.inline_ptx(
        "min.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[x, Float32(high)]
    )
    return ca.inline_ptx(
        "max.f32 {$w0}, {$r0}, {$r1};", write_only_types=[Float32], read_only_args=[capped, Float32(low)]
    )

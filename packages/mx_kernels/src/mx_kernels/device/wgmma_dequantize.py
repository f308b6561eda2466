"""MXFP8 codes → BF16 operands of wgmma, on Hopper.

A code goes to fp16 (every E4M3 and E5M2 value is exact there), to fp32, times the block's scale, and is rounded once to
bf16. For E4M3 the whole way is exact for scale bytes 3 … 246, for E5M2 for bytes 10 … 239. Outside: below, a value is
rounded to a multiple of bf16's smallest subnormal, 2^-133; above, one past bf16's largest becomes Inf, exactly as it does
when dequantised to fp32. Byte 255 and NaN codes give NaN, E5M2 infinities stay Inf.
"""

import cutlass.cute.arch as ca
from cutlass import Float32, Uint32, select_

NAN = 0x7FC0_0000
HALF = 0x0040_0000  # 2^-127, an fp32 subnormal
FRACTION_BITS = 23


def e8m0_to_f32(byte: Uint32) -> Float32:
    """2^(byte-127), exactly: byte 0 is the subnormal 2^-127, byte 255 is NaN."""
    pattern = byte << Uint32(FRACTION_BITS)
    pattern = Uint32(select_(byte == Uint32(0), Uint32(HALF), pattern))
    return Float32(Uint32(select_(byte == Uint32(255), Uint32(NAN), pattern)).bitcast(Float32))


def dequantize_fp8x4(codes: Uint32, scales: list[Float32], fp8: str) -> list[Uint32]:
    """Four codes, each times its scale, as two words of two bf16; the first code is the lowest byte and half.

    fp8: "e4m3" or "e5m2".
    """
    body = "mov.b32 {lo, hi}, {$r0}; " + "".join(
        f"cvt.rn.f16x2.{fp8}x2 h, {half}; mov.b32 {{p, q}}, h; "
        f"cvt.f32.f16 x, p; cvt.f32.f16 y, q; "
        f"mul.rn.f32 x, x, {{$r{2 * word + 1}}}; mul.rn.f32 y, y, {{$r{2 * word + 2}}}; "
        f"cvt.rn.bf16x2.f32 {{$w{word}}}, y, x; "
        for word, half in enumerate(("lo", "hi"))
    )
    return list(
        ca.inline_ptx(
            f"{{ .reg .b16 lo, hi, p, q; .reg .b32 h; .reg .f32 x, y; {body}}}",
            write_only_types=[Uint32, Uint32],
            read_only_args=[codes, *scales],
        )
    )


def interleave_bytes(low: Uint32, high: Uint32, upper: bool) -> Uint32:
    """Bytes 0 and 1 (`upper`: 2 and 3) of both words: low 0, high 0, low 1, high 1."""
    selector = 0x7362 if upper else 0x5140
    return ca.inline_ptx(
        f"prmt.b32 {{$w0}}, {{$r0}}, {{$r1}}, {selector:#x};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )

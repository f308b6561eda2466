"""cvt and cvt.pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import WIDTH, Instruction
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter

_INTS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64", "b8", "b16", "b32", "b64")
_FLOATS = ("f16", "bf16", "f32", "f64")
_NARROW = ("e4m3x2", "e5m2x2", "e2m3x2", "e3m2x2", "e2m1x2")
_INTEGER_ROUNDING = ("rni", "rzi", "rmi", "rpi")
_WIDTH = {**WIDTH, "e2m3x2": 16, "e3m2x2": 16, "e2m1x2": 8}


def is_bf16_pair(ins: Instruction) -> bool:
    """The conversion of a bf16 epilogue; runs of it are done in one call."""
    return ins.mods == ["rn", "bf16x2", "f32"] and not ins.guard and len(ins.operands) == 3


def bf16_pairs(e: Emitter, run: list[Instruction]) -> None:
    sources = []
    for ins in run:
        e.ins = ins
        sources += [e.val(s) for s in ins.operands[1:]]
    packed = e.temp(f"cvt_pack_bf16({', '.join(sources)})")
    for i, ins in enumerate(run):
        e.ins = ins
        e.set(ins.operands[0], f"{packed}[{i}]")


@instruction("cvt", predicated=True)
def cvt(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    types = [m for m in mods.left if m in _WIDTH]
    mods.left = [m for m in mods.left if m not in _WIDTH]
    if len(types) != 2:
        raise refuse(ins, f"types {types} are not modelled")
    dst, src = types
    result, *sources = ins.operands
    mode = mods.one_of("rn", "rz", "rm", "rp", "rna", *_INTEGER_ROUNDING, default=None)
    ftz, sat, relu, satfinite = (mods.flag(x) for x in ("ftz", "sat", "relu", "satfinite"))
    options = "z" * ftz + "s" * sat + "r" * relu
    args = ", ".join(e.val(s, _WIDTH[src]) for s in sources)
    plain = not (ftz or relu or satfinite)
    if len(sources) != (2 if dst.endswith("x2") and src == "f32" else 1):
        raise refuse(ins, f"{len(sources)} sources")

    register = WIDTH[e.register_type(result) or "b32"]
    if dst in _INTS and src in _INTS and plain and mode is None:
        e.set(result, _int_to_int(e, dst, src, sat, sources[0], register))
    elif dst in _INTS and src in _FLOATS and mode in _INTEGER_ROUNDING and not (relu or satfinite):
        e.set(result, f"cvt_float_to_int({dst!r}, {src!r}, {mode!r}, {ftz}, {register}, {args})")
    elif dst in _FLOATS and src in _INTS and mode in ("rn", "rz", "rm", "rp") and plain and not sat:
        e.set(result, f"cvt_int_to_float({dst!r}, {src!r}, {mode!r}, {args})")
    elif dst in _FLOATS and src in _FLOATS and not satfinite and mode != "rna":
        e.set(result, f"cvt_float({dst!r}, {src!r}, {mode!r}, {options!r}, {args})")
    elif dst == "tf32" and src == "f32" and mode in ("rn", "rz", "rna") and not (ftz or sat):
        e.set(result, f"cvt_float('tf32', 'f32', {mode!r}, {options + 'f' * satfinite!r}, {args})")
    elif (
        dst in ("f16x2", "bf16x2") and src == "f32" and mode in ("rn", "rz") and not (ftz or sat or satfinite)
    ):
        e.set(result, f"cvt_pair({dst!r}, {mode!r}, {options!r}, {args})")
    elif (
        dst in _NARROW
        and src in ("f32", "f16x2", "bf16x2")
        and mode == "rn"
        and satfinite
        and not (ftz or sat)
    ):
        e.set(result, f"cvt_pack_narrow({dst!r}, {src!r}, {relu}, {args})")
    elif dst in ("f16x2", "bf16x2") and src in _NARROW and mode == "rn" and not (ftz or sat or satfinite):
        e.set(result, f"cvt_unpack_narrow({dst!r}, {src!r}, {relu}, {args})")
    elif dst == "ue8m0x2" and src in ("f32", "bf16x2") and mode in ("rz", "rp") and not (ftz or sat or relu):
        e.set(result, f"cvt_pack_e8m0({src!r}, {mode == 'rp'}, {args})")
    elif dst == "bf16x2" and src == "ue8m0x2" and mode == "rn" and plain and not sat:
        e.set(result, f"cvt_unpack_e8m0({args})")
    else:
        raise refuse(
            ins,
            f"this combination of modifiers of cvt ({', '.join('.' + m for m in ins.mods)}) is not modelled",
        )


def _int_to_int(e: Emitter, dst: str, src: str, sat: bool, source: str, register: int) -> str:
    """Results narrower than their register are extended by their own sign."""
    value = e.val(source, WIDTH[src])
    if sat:
        if dst == "s8" and register == 16:
            raise refuse(
                e.ins,
                f"cvt.sat.{dst} into a 16-bit register (hardware keeps sign bits above it) is not modelled",
            )
        return f"cvt_int_saturating({dst!r}, {src!r}, {register}, {value})"
    wd, ws = WIDTH[dst], WIDTH[src]
    narrow = min(wd, ws)
    if (dst if wd <= ws else src)[0] == "s" and register > narrow:
        return f"sign_extend({value}, {narrow}, {register})"
    return f"{value}&{(1 << narrow) - 1}"

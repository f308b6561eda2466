"""Floating-point arithmetic, comparison and approximate functions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import WIDTH, Instruction
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter

ROUNDING = ("rn", "rz", "rm", "rp")
COMPARISONS = (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"),
)
_NARROW = ("f16", "bf16")


def _options(mods: Modifiers) -> str:
    """Letters understood by `core.floats`: z .ftz, s .sat, r .relu."""
    return "z" * mods.flag("ftz") + "s" * mods.flag("sat") + "r" * mods.flag("relu")


def arithmetic(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """add, sub, mul, fma, mad on floats; also add, sub, fma.f32 with narrow first operands."""
    mods.hints("noftz")
    mode = mods.one_of(*ROUNDING, default="rn")
    options = _options(mods)
    types = mods.types()
    op = "fma" if ins.op == "mad" else ins.op
    dst, *sources = ins.operands
    if len(types) == 2:
        ty, narrow = types
        if ty != "f32" or narrow not in _NARROW or op not in ("add", "sub", "fma"):
            raise refuse(ins, f"types .{ty}.{narrow} of {ins.op} are not modelled")
        args = ", ".join([*(e.val(s, 16) for s in sources[:-1]), e.val(sources[-1])])
        e.set(dst, f"float_mixed({op!r}, {narrow!r}, {mode!r}, {options!r}, {args})")
        return
    if len(types) != 1:
        raise refuse(ins, f"types {types} are not modelled")
    ty = types[0]
    if mode != "rn" and ty in ("f64", "f16", "bf16", "f16x2", "bf16x2"):
        raise refuse(ins, f"rounding .{mode} of .{ty} is not modelled")
    args = ", ".join(e.val(s, WIDTH[ty]) for s in sources)
    e.set(dst, f"float_arithmetic({op!r}, {ty!r}, {mode!r}, {options!r}, {args})")


@instruction("fma", predicated=True)
def fma(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    arithmetic(e, ins, mods)


def min_max(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    options = "z" * mods.flag("ftz") + "n" * mods.flag("NaN")
    if mods.flag("xorsign"):
        if not mods.flag("abs"):
            raise refuse(ins, ".xorsign goes with .abs")
        options += "x"
    elif mods.flag("abs"):
        options += "a"
    ty = mods.type()
    if ty not in ("f32", "f64", "f16", "bf16", "f16x2", "bf16x2"):
        raise refuse(ins, f"type .{ty} is not modelled")
    dst, *sources = ins.operands
    args = ", ".join(e.val(s, WIDTH[ty]) for s in sources)
    e.set(dst, f"float_minmax({ins.op!r}, {ty!r}, {options!r}, {args})")


def divide(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """div.approx and div.full are rounded exactly here; the hardware is within 2 ulp. div.approx by more than 2^126 is 0."""
    approximate = mods.one_of("approx", "full", default=None)
    mode = "rn" if approximate else mods.pick(*ROUNDING)
    options = _options(mods) + ("q" if approximate == "approx" else "")
    ty = mods.type()
    if ty not in ("f32", "f64"):
        raise refuse(ins, f"div of .{ty} is not modelled")
    dst, a, b = ins.operands
    e.set(
        dst,
        f"float_arithmetic('div', {ty!r}, {mode!r}, {options!r}, {e.val(a, WIDTH[ty])}, {e.val(b, WIDTH[ty])})",
    )


@instruction("rcp", "sqrt", "rsqrt", "ex2", "lg2", "sin", "cos", "tanh", predicated=True)
def function(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    approximate = mods.flag("approx")
    ftz = mods.flag("ftz")
    mode = None if approximate else mods.pick(*ROUNDING)
    ty = mods.type()
    if (ty == "f64" and approximate) or ty == "f32x2":
        raise refuse(ins, f"approximate {ins.op} of .{ty} is not modelled")
    value = e.val(ins.operands[1], WIDTH[ty])
    if approximate:
        e.set(ins.operands[0], f"float_approximate({ins.op!r}, {ty!r}, {ftz}, {value})")
    elif ins.op in ("rcp", "sqrt"):
        e.set(
            ins.operands[0],
            f"float_arithmetic({ins.op!r}, {ty!r}, {mode!r}, {'z' if ftz else ''!r}, {value})",
        )
    else:
        raise refuse(ins, f"{ins.op} without .approx is not modelled")


@instruction("copysign", predicated=True)
def copysign(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ty = mods.type()
    dst, a, b = ins.operands
    e.set(dst, f"float_copysign({ty!r}, {e.val(a, WIDTH[ty])}, {e.val(b, WIDTH[ty])})")


@instruction("testp", predicated=True)
def testp(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    op = mods.pick("finite", "infinite", "number", "notanumber", "normal", "subnormal")
    ty = mods.type()
    e.set(ins.operands[0], f"float_test({op!r}, {ty!r}, {e.val(ins.operands[1], WIDTH[ty])})")

"""Moves, selections, address spaces."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import WIDTH, Instruction
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter


@instruction("mov", predicated=True)
def mov(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ty = mods.type()
    dst, src = ins.operands
    width = WIDTH[ty]
    if ty == "pred":
        e.set(dst, e.pred(src))
    elif ty == "b128" and src.startswith("{"):
        low, high = e.operands(src)
        e.set(dst, f"pack_128({e.val(low, 64)}, {e.val(high, 64)})")
    elif pair := e.pair(src):
        for i, part in enumerate(e.operands(dst)):
            if part != "_":
                e.set(part, f"{pair}[{i}]")
    elif pair := e.pair(dst):
        low, high = e.operands(src)
        e.emit(f"{pair} = ({e.val(low)}, {e.val(high)})")
    elif dst.startswith("{"):
        parts = e.operands(dst)
        step = width // len(parts)
        value = e.temp(e.val(src, width))
        for i, part in enumerate(parts):
            if part != "_":
                shifted = f"({value}>>{i * step})" if i else value
                e.set(part, f"{shifted}&{(1 << step) - 1}")
    else:
        e.set(dst, e.val(src, width))


@instruction("selp", predicated=True)
def selp(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    w = WIDTH[mods.type()]
    dst, a, b, p = ins.operands
    e.set(dst, f"select({e.pred(p)}, {e.val(a, w)}, {e.val(b, w)})")


@instruction("slct", predicated=True)
def slct(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    ftz = mods.flag("ftz")
    ty, condition_type = mods.types()
    dst, a, b, c = ins.operands
    w = WIDTH[ty]
    if condition_type == "s32":
        positive = f"(({e.val(c)}^2147483648)>=2147483648)"
    elif condition_type == "f32":
        positive = f"float_compare('ge', 'f32', {ftz}, {e.val(c)}, 0)"
    else:
        raise refuse(ins, f"condition type .{condition_type}")
    e.set(dst, f"select({positive}, {e.val(a, w)}, {e.val(b, w)})")


@instruction("cvta", predicated=True)
def cvta(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Generic addresses: global, const and param are host addresses; shared and local have windows of their own."""
    to = mods.flag("to")
    space = mods.pick(
        "global", "shared::cluster", "shared::cta", "shared", "local", "const", "param", "param::entry"
    )
    mods.type()
    value = e.val(ins.operands[1], 64)
    if space.startswith("shared"):
        e.set(ins.operands[0], f"({value}-SHARED_WINDOW)&4294967295" if to else f"({value}+SHARED_WINDOW)")
    elif space == "local":
        e.set(ins.operands[0], f"({value}&4294967295)" if to else f"({value}|LOCAL_WINDOW)")
    else:
        e.set(ins.operands[0], value)


@instruction("isspacep", predicated=True)
def isspacep(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    space = mods.pick("global", "shared::cluster", "shared::cta", "shared", "local")
    e.set(ins.operands[0], f"is_space({space.split('::')[0]!r}, {e.val(ins.operands[1], 64)})")


@instruction("mapa", predicated=True)
def mapa(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    shared = mods.flag("shared::cluster")
    ty = mods.type()
    dst, a, rank = ins.operands
    e.set(dst, f"map_address(W, {shared}, {e.val(a, WIDTH[ty])}, {e.val(rank)})")


@instruction("getctarank", predicated=True)
def getctarank(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.flag("shared::cluster")
    mods.type()
    e.set(ins.operands[0], f"(({e.val(ins.operands[1], 64)}>>24)&255)")

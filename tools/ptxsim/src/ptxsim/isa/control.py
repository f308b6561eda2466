"""Control flow, and instructions without effect on values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import Instruction
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter


@instruction("bra", writes=0, ends=True)
def bra(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    mods.flag("uni")
    target = e.t.target(ins, ins.operands[0])
    if ins.guard is None:
        e.emit(f"return {target}")
    else:
        guard = e.pred(("!" if ins.guard_negated else "") + ins.guard)
        e.emit(f"return branch({guard}, {e.mask}, {target}, {e.next_block})")
    return True


@instruction("ret", "exit", writes=0, ends=True)
def leave(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    mods.flag("uni")
    e.emit("return -1")
    return True


@instruction("trap", writes=0, ends=True)
def trap(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    e.emit(f"raise_trap(W, {ins.site})")
    e.emit("return -1")
    return True


@instruction("nanosleep", writes=0, ends=True)
def nanosleep(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    mods.type()
    e.emit(f"return Yield({e.next_block})")
    return True


@instruction("setmaxnreg", writes=0)
def setmaxnreg(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.one_of("inc", "dec")
    mods.one_of("sync")
    mods.one_of("aligned")
    mods.type()
    count = int(ins.operands[0])
    if not 24 <= count <= 256 or count % 8:
        raise refuse(ins, "register count must be a multiple of 8 in 24…256")


@instruction("griddepcontrol", writes=0)
def griddepcontrol(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Launches run one after another here, so a dependency is always met."""
    mods.one_of("wait", "launch_dependents")


@instruction(
    "prefetch",
    "prefetchu",
    "discard",
    "applypriority",
    "createpolicy",
    writes=lambda i: i.op == "createpolicy",
)
def cache_hint(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    """Cache hints change no value; a cache policy is an opaque 64-bit 0."""
    mods.left.clear()
    if ins.op == "createpolicy":
        e.set(ins.operands[0], "0")


@instruction("brkpt", "pmevent", writes=0)
def nothing(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.flag("mask")

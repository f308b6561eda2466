"""Operations across the lanes of a warp."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import Instruction
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter


def converge(e: Emitter, ins: Instruction, member_mask: str) -> None:
    """Under divergence, wait until all lanes named by the member mask have arrived here."""
    if not e.full:
        e.emit(f"waiting = converge(W, m, {e.val(member_mask)}, {ins.site}, {ins.full!r})")
        e.emit("if waiting is not None: return waiting")


@instruction("shfl", starts=True)
def shfl(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.pick("sync")
    mode = mods.pick("idx", "up", "down", "bfly")
    mods.pick("b32")
    dst, value, source, clamp, member = ins.operands
    converge(e, ins, member)
    pair = e.temp(f"shuffle({mode!r}, {e.val(value)}, {e.val(source)}, {e.val(clamp)}, {e.mask})")
    e.set_pair(dst, f"{pair}[0]", f"{pair}[1]")


@instruction("vote", starts=True)
def vote(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.pick("sync")
    mode = mods.pick("all", "any", "uni", "ballot")
    mods.pick("pred", "b32")
    dst, p, member = ins.operands
    converge(e, ins, member)
    e.set(dst, f"vote({mode!r}, {e.pred(p)}, {e.mask})")


@instruction("activemask")
def activemask(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.pick("b32")
    e.set(ins.operands[0], f"mask_bits({e.mask})")


@instruction("redux", starts=True)
def redux(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.pick("sync")
    op = mods.pick("add", "min", "max", "and", "or", "xor")
    absolute, nan = mods.flag("abs"), mods.flag("NaN")
    ty = mods.type()
    if (absolute or nan) and ty != "f32":
        raise refuse(ins, ".abs and .NaN are for .f32")
    if ty == "f32" and op not in ("min", "max"):
        raise refuse(ins, f"redux.{op}.f32 is not modelled")
    dst, value, member = ins.operands
    converge(e, ins, member)
    e.set(dst, f"reduce_warp({op!r}, {ty!r}, {'a' * absolute + 'n' * nan!r}, {e.val(value)}, {e.mask})")


@instruction("match", starts=True)
def match(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mode = mods.pick("any", "all")
    mods.pick("sync")
    width = 64 if mods.type() == "b64" else 32
    dst, value, member = ins.operands
    converge(e, ins, member)
    pair = e.temp(f"match_warp({mode!r}, {e.val(value, width)}, {e.mask})")
    e.set_pair(dst, f"{pair}[0]", f"{pair}[1]")


@instruction("elect", starts=True)
def elect(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    mods.pick("sync")
    dst, member = ins.operands
    converge(e, ins, member)
    pair = e.temp(f"elect({e.mask})")
    e.set_pair(dst, f"{pair}[0]", f"{pair}[1]")

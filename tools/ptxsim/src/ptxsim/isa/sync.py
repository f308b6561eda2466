"""Barriers, mbarriers, fences."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import Instruction
from .registry import Modifiers, instruction

if TYPE_CHECKING:
    from ..translate import Emitter


def _barrier_writes(ins: Instruction) -> int:
    return int("red" in ins.mods)


def _barrier_blocks(ins: Instruction) -> bool:
    return "arrive" not in ins.mods or "cluster" in ins.mods


@instruction(
    "bar", "barrier", writes=_barrier_writes, ends=_barrier_blocks, starts=lambda i: "warp" in i.mods
)
def bar(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    if mods.flag("cluster"):
        return _cluster_barrier(e, ins, mods)
    if mods.flag("warp"):
        mods.pick("sync")
        if not e.full:
            e.emit(f"waiting = converge(W, m, {e.val(ins.operands[0])}, {ins.site}, 'bar.warp.sync')")
            e.emit("if waiting is not None: return waiting")
        e.emit(f"return {e.next_block}")
        return True
    mods.hints("cta", "aligned")
    if mods.flag("red"):
        op = mods.pick("popc", "and", "or")
        mods.types()
        dst, barrier, *rest = ins.operands
        threads = e.val(rest[0]) if len(rest) > 1 else "None"
        slot = e.pinned(dst)
        e.emit(
            f"return barrier_reduce(W, R, {e.mask}, {e.val(barrier)}, {threads}, {op!r}, {e.pred(rest[-1])}, {slot}, "
            f"{e.next_block}, {ins.site})"
        )
        return True
    kind = mods.pick("sync", "arrive")
    barrier, *threads = ins.operands
    count = e.val(threads[0]) if threads else "None"
    if kind == "arrive":
        e.emit(f"barrier_arrive(W, {e.mask}, {e.val(barrier)}, {count}, {ins.site})")
        return False
    e.emit(f"return barrier_sync(W, {e.mask}, {e.val(barrier)}, {count}, {e.next_block}, {ins.site})")
    return True


def _cluster_barrier(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    kind = mods.pick("arrive", "wait")
    relaxed = mods.one_of("release", "acquire", "relaxed", default="release") == "relaxed"
    mods.hints("aligned")
    f = "cluster_arrive" if kind == "arrive" else "cluster_wait"
    e.emit(f"return {f}(W, {e.mask}, {relaxed}, {e.next_block}, {ins.site})")
    return True


@instruction("fence", "membar", writes=0)
def fence(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if mods.flag("proxy"):
        kind = (
            mods.one_of("async", default=None)
            or mods.prefixed("async::")
            or mods.prefixed("tensormap")
            or mods.one_of("alias")
        )
        where = mods.one_of("global", "shared::cta", "shared::cluster", default=None)
        mods.one_of("acquire", "release", default=None)
        mods.one_of("cta", "cluster", "gpu", "sys", default=None)
        mods.prefixed("sync_restrict")
        if kind and kind.startswith("async") and where != "global":
            e.emit("fence_proxy_async(W)")
        return
    if mods.flag("mbarrier_init"):
        mods.pick("release")
        mods.pick("cluster")
        e.emit("fence_mbarrier_init(W)")
        e.emit("fence_generic(W)")
        return
    mods.one_of("sc", "acq_rel", "acquire", "release", default=None)
    mods.prefixed("sync_restrict")
    mods.one_of("cta", "cluster", "gpu", "sys", "gl", default=None)
    e.emit("fence_generic(W)")


def _mbarrier_writes(ins: Instruction) -> int:
    if ins.mods[0] in ("try_wait", "test_wait", "pending_count"):
        return 1
    return int(ins.mods[0] in ("arrive", "arrive_drop") and not ins.operands[0].startswith("["))


@instruction("mbarrier", writes=_mbarrier_writes, ends=lambda i: i.mods[0] in ("try_wait", "test_wait"))
def mbarrier(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    kind = (
        mods.pick(
            "init",
            "inval",
            "expect_tx",
            "complete_tx",
            "arrive",
            "arrive_drop",
            "try_wait",
            "test_wait",
            "pending_count",
        )
        if ins.mods[0] != "arrive"
        else mods.left.pop(0)
    )
    mods.hints("b64")
    mods.one_of("shared", "shared::cta", "shared::cluster", default=None)
    semantics = mods.one_of("release", "acquire", "relaxed", default=None)
    mods.one_of("cta", "cluster", default=None)
    relaxed = semantics == "relaxed"
    ops = ins.operands
    if kind == "init":
        e.emit(f"mbarrier_init(W, {e.addr(ops[0])}, {e.val(ops[1])}, {e.mask}, {ins.site})")
    elif kind == "inval":
        e.emit(f"mbarrier_invalidate(W, {e.addr(ops[0])}, {e.mask}, {ins.site})")
    elif kind in ("expect_tx", "complete_tx"):
        e.emit(f"mbarrier_{kind}(W, {e.addr(ops[0])}, {e.val(ops[1])}, {e.mask}, {ins.site})")
    elif kind in ("arrive", "arrive_drop"):
        expect, no_complete = mods.flag("expect_tx"), mods.flag("noComplete")
        has_state = not ops[0].startswith("[")
        address, *count = ops[1:] if has_state else ops
        if expect:
            arrivals, transactions = "1", e.val(count[0])
        else:
            arrivals, transactions = (e.val(count[0]) if count else "1"), "0"
        call = (
            f"mbarrier_arrive(W, {e.addr(address)}, {arrivals}, {transactions}, {kind == 'arrive_drop'}, {no_complete}, "
            f"{relaxed}, {e.mask}, {ins.site})"
        )
        if has_state:
            e.set(ops[0], call)
        else:
            e.emit(call)
    elif kind == "pending_count":
        e.set(ops[0], f"(({e.val(ops[1], 64)}>>32)&1048575)")
    else:
        parity = mods.flag("parity")
        e.emit(
            f"return mbarrier_wait(W, R, {e.mask}, {e.pinned(ops[0])}, {e.addr(ops[1])}, {e.val(ops[2], 64)}, {parity}, "
            f"{kind == 'try_wait'}, {relaxed}, {e.next_block}, {ins.site})"
        )
        return True
    return False

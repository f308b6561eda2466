"""cp.async in all its forms, tensor maps, the cluster scheduler's try_cancel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..parser import Instruction, split_operands
from . import memory
from .registry import Modifiers, instruction, refuse

if TYPE_CHECKING:
    from ..translate import Emitter

_REDUCTIONS = ("add", "min", "max", "inc", "dec", "and", "or", "xor")


def _waits(ins: Instruction) -> bool:
    return "wait_group" in ins.mods or "wait_all" in ins.mods


@instruction("cp", writes=0, ends=_waits)
def cp(e: Emitter, ins: Instruction, mods: Modifiers) -> bool:
    reduce = mods.flag("reduce")
    if not mods.flag("async"):
        raise refuse(ins)
    bulk = mods.flag("bulk")
    if mods.flag("prefetch"):
        mods.left.clear()
        return False
    if mods.flag("commit_group"):
        e.emit(f"{'bulk' if bulk else 'copy'}_commit(W, {e.mask}, {ins.site})")
        return False
    if mods.flag("wait_all"):
        e.emit(f"return copy_wait(W, 0, {e.next_block}, {ins.site})")
        return True
    if mods.flag("wait_group"):
        n = int(ins.operands[0], 0)
        if bulk:
            e.emit(f"return bulk_wait(W, {e.mask}, {n}, {mods.flag('read')}, {e.next_block}, {ins.site})")
        else:
            e.emit(f"return copy_wait(W, {n}, {e.next_block}, {ins.site})")
        return True
    if not bulk:
        if mods.flag("mbarrier"):
            mods.pick("arrive")
            noinc = mods.flag("noinc")
            mods.one_of("shared", "shared::cta", default=None)
            mods.hints("b64")
            e.emit(f"copy_mbarrier_arrive(W, {e.addr(ins.operands[0])}, {noinc}, {e.mask}, {ins.site})")
        else:
            memory.cp_async(e, ins, mods)
        return False
    if mods.flag("tensor"):
        _tensor(e, ins, mods, reduce)
    else:
        _bulk(e, ins, mods, reduce)
    return False


def _spaces(mods: Modifiers) -> tuple[str, str]:
    """Destination and source, in the order they are written."""
    found = [m for m in mods.left if m in ("global", "shared::cta", "shared::cluster")]
    mods.left = [m for m in mods.left if m not in found]
    if len(found) != 2:
        raise refuse(mods.ins, "a destination and a source space are expected")
    return found[0].split("::")[0] if found[0] == "global" else found[0], found[1]


def _coordinates(e: Emitter, token: str) -> tuple[str, str]:
    """`[map, {c0, c1}]` → address of the tensor map and a list of coordinates."""
    tensor_map, coordinates = split_operands(token[1:-1])
    listed = ", ".join(e.val(c) for c in e.operands(coordinates))
    return e.val(tensor_map, 64), f"[{listed}]"


def _tensor(e: Emitter, ins: Instruction, mods: Modifiers, reduce: bool) -> None:
    rank = int(mods.pick("1d", "2d", "3d", "4d", "5d")[0])
    dst, _ = _spaces(mods)
    mode = mods.one_of("tile", "tile::gather4", "tile::scatter4", default="tile")
    hint = mods.flag("L2::cache_hint")
    pair = mods.one_of("cta_group::1", "cta_group::2", default=None) == "cta_group::2"
    operands = ins.operands
    if dst.startswith("shared"):
        if mode == "tile::scatter4" or reduce:
            raise refuse(ins)
        mods.pick("mbarrier::complete_tx::bytes")
        multicast = mods.flag("multicast::cluster")
        tensor_map, coordinates = _coordinates(e, operands[1])
        if len(operands) != 3 + multicast + hint:
            raise refuse(ins, "im2col offsets are not modelled")
        mask = e.val(operands[3], 16) if multicast else "None"
        e.emit(
            f"tma_load(W, {e.addr(operands[0])}, {tensor_map}, {coordinates}, {rank}, {mode == 'tile::gather4'}, "
            f"{e.addr(operands[2])}, {mask}, {pair}, {e.mask}, {ins.site})"
        )
        return
    mods.pick("bulk_group")
    op = mods.pick(*_REDUCTIONS) if reduce else None
    if mode == "tile::gather4":
        raise refuse(ins)
    tensor_map, coordinates = _coordinates(e, operands[0])
    e.emit(
        f"tma_store(W, {tensor_map}, {coordinates}, {rank}, {mode == 'tile::scatter4'}, {e.addr(operands[1])}, {op!r}, "
        f"{e.mask}, {ins.site})"
    )


def _bulk(e: Emitter, ins: Instruction, mods: Modifiers, reduce: bool) -> None:
    dst, src = _spaces(mods)
    hint = mods.flag("L2::cache_hint")
    operands = ins.operands
    address_to, address_from, size = e.addr(operands[0]), e.addr(operands[1]), e.val(operands[2])
    if dst.startswith("shared") and not reduce:
        mods.pick("mbarrier::complete_tx::bytes")
        multicast = mods.flag("multicast::cluster")
        barrier = e.addr(operands[3])
        if src == "global":
            mask = e.val(operands[4], 16) if multicast else "None"
            e.emit(
                f"bulk_load(W, {address_to}, {address_from}, {size}, {barrier}, {mask}, {e.mask}, {ins.site})"
            )
        else:
            e.emit(f"bulk_shared(W, {address_to}, {address_from}, {size}, {barrier}, {e.mask}, {ins.site})")
        return
    if dst != "global":
        raise refuse(ins, "reduction into shared memory is not modelled")
    mods.pick("bulk_group")
    if mods.flag("cp_mask"):
        raise refuse(ins, ".cp_mask is not modelled")
    op = ty = None
    if reduce:
        mods.flag("noftz")
        op, ty = mods.pick(*_REDUCTIONS), mods.type()
    if len(operands) != 3 + hint:
        raise refuse(ins, "operand count")
    e.emit(f"bulk_store(W, {address_to}, {address_from}, {size}, {op!r}, {ty!r}, {e.mask}, {ins.site})")


@instruction("tensormap", writes=0)
def tensormap(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    kind = mods.pick("replace", "cp_fenceproxy")
    if kind == "cp_fenceproxy":
        mods.left.clear()
        e.emit(
            f"tensormap_copy(W, {e.addr(ins.operands[0])}, {e.addr(ins.operands[1])}, {e.val(ins.operands[2])}, {e.mask})"
        )
        return
    mods.pick("tile")
    fields = (
        *("global_address", "rank", "box_dim", "global_dim", "global_stride", "element_stride"),
        *("elemtype", "interleave_layout", "swizzle_mode", "fill_mode"),
    )
    field = mods.pick(*fields)
    where = memory.space(mods)
    mods.pick("b1024")
    mods.types()
    address, *rest = ins.operands
    ordinal, value = (e.val(rest[0]), e.val(rest[1], 64)) if len(rest) > 1 else ("0", e.val(rest[0], 64))
    e.emit(
        f"tensormap_replace(W, {field!r}, {where!r}, {e.addr(address)}, {ordinal}, {value}, {e.mask}, {ins.site})"
    )


@instruction("clusterlaunchcontrol", writes=lambda i: int(i.mods[0] == "query_cancel"))
def clusterlaunchcontrol(e: Emitter, ins: Instruction, mods: Modifiers) -> None:
    if mods.flag("try_cancel"):
        mods.flag("async")
        mods.one_of("shared::cta", "shared::cluster", default=None)
        mods.pick("mbarrier::complete_tx::bytes")
        multicast = mods.one_of("multicast::cluster::all", default=None) is not None
        mods.hints("b128")
        e.emit(
            f"try_cancel(W, {e.addr(ins.operands[0])}, {e.addr(ins.operands[1])}, {multicast}, {e.mask}, {ins.site})"
        )
        return
    mods.pick("query_cancel")
    dst, handle = ins.operands
    value = e.temp(e.val(handle, 128))
    if mods.flag("is_canceled"):
        mods.hints("pred", "b128")
        e.set(dst, f"(({value}&1)!=0)")
        return
    axis = mods.prefixed("get_first_ctaid")
    mods.types()
    mods.hints("v4")
    if axis is None:
        raise refuse(ins)
    if "::" in axis:
        e.set(dst, f"({value}>>{32 * (1 + 'xyz'.index(axis[-1]))})&4294967295")
        return
    for i, part in enumerate(e.operands(dst)):
        if part != "_":
            e.set(part, f"({value}>>{32 * (1 + i)})&4294967295" if i < 3 else "0")

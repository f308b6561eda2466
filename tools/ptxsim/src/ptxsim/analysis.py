"""What the translator finds out about a whole kernel before it emits code."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .parser import WIDTH, Instruction, constant

if TYPE_CHECKING:
    from .translate import Translator


def shared_granule(instructions: list[Instruction]) -> int:
    """Narrowest access that may touch shared memory."""
    granule = 16
    for ins in instructions:
        if ins.op in ("ld", "st", "atom", "red") and not any(
            m.split("::")[0] in ("global", "param", "local", "const") for m in ins.mods
        ):
            kind = next((m for m in reversed(ins.mods) if m in WIDTH), None)
            vector = next((int(m[1:]) for m in ins.mods if m in ("v2", "v4", "v8")), 1)
            if kind:
                granule = min(granule, WIDTH[kind] // 8 * vector)
        elif ins.full.startswith(("cp.async.ca", "cp.async.cg")):
            number = constant(ins.operands[2], 32)
            granule = min(granule, number or 4, 4 if len(ins.operands) > 3 and ins.operands[3] else 16)
        elif ins.full.startswith("tcgen05.alloc"):
            granule = min(granule, 4)
        elif ins.op == "mbarrier":
            granule = min(granule, 8)
    return max(granule, 1)


def pending_registers(t: Translator, blocks: list[list[Instruction]]) -> dict[int, list[str]]:
    """Checks to emit before instructions that may touch a register an asynchronous operation still owns.

    A forward may-analysis: `tcgen05.ld` and `wgmma` results are pending until their wait. Correct code gets no checks.
    """
    empty: frozenset[str] = frozenset()
    state: list[frozenset[str] | None] = [None] * (len(blocks) + 1)
    successors = [_successors(t, i, b) for i, b in enumerate(blocks)]
    work = [(0, empty)] if blocks else []
    checks: dict[int, list[str]] = {}
    while work:
        i, incoming = work.pop()
        if i >= len(blocks):
            continue
        old = state[i]
        new = incoming if old is None else old | incoming
        if old is not None and new == old:
            continue
        state[i] = new
        pending = set(new)
        for ins in blocks[i]:
            reads, writes = t.reads_writes(ins)
            kind = ".".join([ins.op, *(m.split("::")[0] for m in ins.mods[:1])])
            touched = [
                sorted({t.index[r] for r in rs if r in pending and r in t.index}) for rs in (reads, writes)
            ]
            if any(touched) and kind != "wgmma.mma_async":
                checks[id(ins)] = [f"check_pending(W, {touched[0]}, {touched[1]}, {ins.site})"]
            if kind in ("tcgen05.ld", "wgmma.mma_async"):
                pending.update(writes)
            elif ins.full.startswith("tcgen05.wait::ld") or (
                kind == "wgmma.wait_group" and constant(ins.operands[0], 32) == 0
            ):
                pending.clear()
        work.extend((nxt, frozenset(pending)) for nxt in successors[i])
    return checks


NEVER_FENCED = "no wgmma.fence yet"
_Accesses = frozenset[tuple[str, str]]
"""(register, by whom): "instruction", or the shape of the wgmma that accumulated in it."""


def unfenced_wgmmas(t: Translator, blocks: list[list[Instruction]]) -> dict[int, list[str]]:
    """Code to emit where a wgmma.mma_async may lack its wgmma.fence; none for a kernel that has them all.

    PTX ISA 9.7.15.7.1: a fence stands before the first wgmma.mma_async, and between any access to an accumulator or
    an A register and a wgmma.mma_async on that register, unless both are accumulations of the same shape. A forward
    may-analysis finds the wgmmas that some path reaches without; what happens on the paths taken is then tracked as it runs.
    """
    if not any(ins.full.startswith("wgmma.mma_async") for block in blocks for ins in block):
        return {}
    operands = {
        r for block in blocks for ins in block if ins.full.startswith("wgmma.mma_async")
        for r in t.registers_of(ins, _wgmma_registers(ins))
    }  # fmt: skip
    suspects: set[str] = set()
    state: list[_Accesses | None] = [None] * (len(blocks) + 1)
    successors = [_successors(t, i, b) for i, b in enumerate(blocks)]
    work: list[tuple[int, _Accesses]] = [(0, frozenset({(NEVER_FENCED, "")}))]
    while work:
        i, incoming = work.pop()
        if i >= len(blocks):
            continue
        old = state[i]
        new = incoming if old is None else old | incoming
        if old is not None and new == old:
            continue
        state[i] = new
        accesses = set(new)
        for ins in blocks[i]:
            if ins.full.startswith("wgmma.fence"):
                accesses.clear()
            elif ins.full.startswith("wgmma.mma_async"):
                mine = {*t.registers_of(ins, _wgmma_registers(ins)), NEVER_FENCED}
                shape = wgmma_shape(ins)
                suspects.update(r for r, by in accesses if r in mine and by != shape)
                accesses.update((r, shape) for r in t.registers_of(ins, ins.operands[:1]))
            else:
                reads, writes = t.reads_writes(ins)
                accesses.update((r, "instruction") for r in reads + writes if r in operands)
        work.extend((nxt, frozenset(accesses)) for nxt in successors[i])
    if not suspects:
        return {}
    code: dict[int, list[str]] = {}
    for ins in (ins for block in blocks for ins in block):
        if ins.full.startswith("wgmma.fence"):
            code[id(ins)] = ["W.unfenced_registers = {}"]
        elif ins.full.startswith("wgmma.mma_async"):
            used = sorted(suspects.intersection(t.registers_of(ins, _wgmma_registers(ins))))
            written = sorted(suspects.intersection(t.registers_of(ins, ins.operands[:1])))
            code[id(ins)] = [f"check_wgmma_fence(W, {used}, {written}, {wgmma_shape(ins)!r}, {ins.site})"]
        else:
            reads, writes = t.reads_writes(ins)
            touched = sorted(suspects.intersection(reads + writes))
            if touched:
                code[id(ins)] = [f"note_registers(W, {touched}, {ins.site})"]
    return code


def _wgmma_registers(ins: Instruction) -> list[str]:
    """Operands of a wgmma.mma_async that need a fence: the accumulator, and A if it is in registers."""
    return ins.operands[:2] if ins.operands[1].startswith("{") else ins.operands[:1]


def wgmma_shape(ins: Instruction) -> str:
    """Shape and types of a wgmma.mma_async."""
    return ".".join(m for m in ins.mods if m not in ("mma_async", "sync", "aligned"))


def _successors(t: Translator, i: int, block: list[Instruction]) -> list[int]:
    last = block[-1]
    if last.op == "bra":
        targets = [t.target(last, last.operands[0])]
        return targets + ([i + 1] if last.guard else [])
    if last.op in ("ret", "exit", "trap"):
        return []
    return [i + 1]

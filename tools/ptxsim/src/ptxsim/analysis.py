"""What the translator finds out about a whole kernel before it emits code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

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


_Facts = frozenset[Any]


def _flow(
    t: Translator,
    blocks: list[list[Instruction]],
    start: _Facts,
    instruction: Callable[[Instruction, set[Any]], None],
) -> None:
    """Forward may-analysis: walk all paths until nothing new is found out.

    `start` holds on entry; `instruction` changes the set of what may hold before an instruction to what may after it, and is called
    until sets grow no more.
    """
    state: list[_Facts | None] = [None] * (len(blocks) + 1)
    successors = [_successors(t, i, b) for i, b in enumerate(blocks)]
    work = [(0, start)] if blocks else []
    while work:
        i, incoming = work.pop()
        if i >= len(blocks):
            continue
        old = state[i]
        new = incoming if old is None else old | incoming
        if old is not None and new == old:
            continue
        state[i] = new
        facts = set(new)
        for ins in blocks[i]:
            instruction(ins, facts)
        work.extend((nxt, frozenset(facts)) for nxt in successors[i])


def pending_registers(t: Translator, blocks: list[list[Instruction]]) -> dict[int, list[str]]:
    """Checks to emit before instructions that may touch a register an asynchronous operation still owns.

    `tcgen05.ld` and `wgmma` results are pending until their wait. Correct code gets no checks.
    """
    checks: dict[int, list[str]] = {}

    def instruction(ins: Instruction, pending: set[str]) -> None:
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

    _flow(t, blocks, frozenset(), instruction)
    return checks


NEVER_FENCED = "no wgmma.fence yet"


def unfenced_wgmmas(t: Translator, blocks: list[list[Instruction]]) -> dict[int, list[str]]:
    """Code to emit where a wgmma.mma_async may lack its wgmma.fence; none for a kernel that has them all.

    PTX ISA 9.7.15.7.1: a fence stands before the first wgmma.mma_async, and between any access to an accumulator or
    an A register and a wgmma.mma_async on that register, unless both are accumulations of the same shape. `_flow`
    finds the wgmmas that some path reaches without; what happens on the paths taken is then tracked as it runs.
    """
    if not any(ins.full.startswith("wgmma.mma_async") for block in blocks for ins in block):
        return {}
    operands = {
        r for block in blocks for ins in block if ins.full.startswith("wgmma.mma_async")
        for r in t.registers_of(ins, _wgmma_registers(ins))
    }  # fmt: skip
    suspects: set[str] = set()

    def instruction(ins: Instruction, accesses: set[tuple[str, str]]) -> None:
        """`accesses`: (register, by whom), which is "instruction", or the shape of the wgmma that accumulated in it."""
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

    _flow(t, blocks, frozenset({(NEVER_FENCED, "")}), instruction)
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

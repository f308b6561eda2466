"""Mutants of a kernel's PTX by a fixed rule: what a checker must notice.

`mutants(ptx)` yields one mutant for every way in `RULE` to delete or weaken one instruction, for every instruction
that the rule names, in the order of the text. Nothing is chosen: whoever runs them runs them all and accounts for each.
The rule works on the text that NVVM writes (one instruction to a line).

`docs/ptxsim_evidence.md` holds the result for our block-scaled GEMMs; `tests/emulator/test_mutation.py` runs them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# name: lowest bit, of the 64-bit shared-memory matrix descriptor (PTX ISA, "Shared memory descriptor", tcgen05)
SHARED_DESCRIPTOR = {
    "start address": 0,
    "leading byte offset": 16,
    "stride byte offset": 32,
    "fixed constant": 46,
    "base offset": 49,
    "leading offset mode": 52,
    "swizzle": 61,
}
# … and of the 32-bit instruction descriptor of the block-scaled kinds (PTX ISA, "Instruction descriptor", tcgen05)
INSTRUCTION_DESCRIPTOR = {
    "B scale id": 4,
    "A type": 7,
    "B type": 10,
    "negate A": 13,
    "negate B": 14,
    "A major": 15,
    "B major": 16,
    "N": 17,
    "scale type": 23,
    "M": 27,
    "A scale id": 29,
}

RULE = """\
| kind | instruction | mutants |
|---|---|---|
| wait | `mbarrier.try_wait`, `mbarrier.test_wait` | reports success at once; waits for the other parity |
| wait | `tcgen05.wait`, `barrier.cluster.wait`, `wgmma.wait_group`, `cp.async[.bulk].wait_group` | deleted; groups: one more left pending |
| fence | `fence.*`, `tcgen05.fence`, `wgmma.fence` | deleted |
| commit | `tcgen05.commit`, `*.commit_group` | deleted; multicast: first bit of the mask cleared |
| arrive | `mbarrier.arrive`, `barrier.cluster.arrive`, `bar.arrive` | deleted; `expect_tx`: 16 bytes fewer |
| barrier | `bar.sync`, `barrier.sync` | deleted |
| barrier | `mbarrier.init` | deleted; count halved (1 becomes 2) |
| election | `elect.sync` | every lane is elected |
| predicate | every `@p` | the guard dropped: the instruction always runs, the branch is always taken |
| predicate | accumulate flag of `tcgen05.mma` and `wgmma.mma_async` | inverted |
| multicast | `cp.async.bulk…multicast` | first bit of the mask cleared |
| descriptor | operands of `tcgen05.mma` and `tcgen05.cp` | lowest bit of every field flipped; TMEM addresses: next column |
"""


@dataclass(frozen=True)
class Mutant:
    """One changed instruction."""

    line: int  # 1-based, in the original text
    kind: str  # a row of `RULE`
    change: str
    instruction: str
    ptx: str  # the whole mutated module

    @property
    def name(self) -> str:
        """Unique among the mutants of one text."""
        return f"{self.line}:{self.kind}:{self.change}"


Change = tuple[str, str, list[str]]  # kind, change, the lines in place of the instruction
_INSTRUCTION = re.compile(r"^(?P<guard>@!?[%\w$]+\s+)?(?P<op>[a-z]\w*(?:\.[\w:]+)*)\s*(?P<operands>[^;]*);$")


def mutants(ptx: str, *, unused_fields: frozenset[str] = frozenset()) -> Iterator[Mutant]:
    """All mutants of a module.

    Args:
        ptx: the text.
        unused_fields: names in `SHARED_DESCRIPTOR` that the PTX ISA says the kernel's layouts do not use (the leading
            byte offset of swizzled layouts no wider than their atom): flipping them is no change.
    """
    lines = ptx.split("\n")
    for number, line in enumerate(lines):
        m = _INSTRUCTION.match(line.strip())
        if m is None:
            continue
        for kind, change, replacement in _changes(m, unused_fields):
            text = "\n".join([*lines[:number], *replacement, *lines[number + 1 :]])
            yield Mutant(number + 1, kind, change, line.strip(), text)


def _changes(m: re.Match[str], unused_fields: frozenset[str]) -> Iterator[Change]:
    guard, op, operands = m["guard"] or "", m["op"], _split(m["operands"])
    text = f"{op} {', '.join(operands)};"
    if guard:
        yield "predicate", "guard dropped", [text]
    for pattern, rule in _RULES:
        if re.match(pattern, op):
            for kind, change, replacement in rule(op, operands, unused_fields):
                yield kind, change, [guard + r if r and not r.startswith(".reg") else r for r in replacement]
            return


def _split(operands: str) -> list[str]:
    """Operands at the top level of brackets and braces."""
    parts, depth, current = [], 0, ""
    for ch in operands:
        depth += (ch in "[{(") - (ch in ")}]")
        if ch == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += ch
    return [*parts, current.strip()] if current.strip() else parts


# ---- one function to a row of the rule; each yields (kind, change, lines) --------------------------------------------

Rule = Callable[[str, list[str], frozenset[str]], Iterator[Change]]


def _deleted(kind: str) -> Rule:
    def rule(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
        yield kind, "deleted", [""]

    return rule


def _poll(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    done, address, phase, *rest = operands
    yield "wait", "succeeds at once", [f"setp.eq.b32 {done}, 0, 0;"]
    if ".parity" in op:
        scoped = _scoped("b32", "flipped", f"xor.b32 flipped, {phase}, 1;")
        yield "wait", "other parity", scoped(f"{op} {', '.join([done, address, 'flipped', *rest])};")


def _wait_group(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    yield "wait", "deleted", [""]
    yield "wait", "one more group pending", [f"{op} {int(operands[0]) + 1};"]


def _commit(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    yield "commit", "deleted", [""]
    if ".multicast" in op:
        yield "commit", "first destination dropped", _without_first_bit(op, operands, 1)


def _arrive(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    yield "arrive", "deleted", [""]
    if ".expect_tx" in op:
        scoped = _scoped("b32", "fewer", f"sub.s32 fewer, {operands[-1]}, 16;")
        yield "arrive", "expects 16 bytes fewer", scoped(f"{op} {', '.join([*operands[:-1], 'fewer'])};")


def _mbarrier_init(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    address, count = operands
    yield "barrier", "deleted", [""]
    scoped = _scoped(
        "b32", "half, one", f"shr.u32 half, {count}, 1;", "max.u32 half, half, 1;", f"xor.b32 one, {count}, 1;",
        "min.u32 one, one, 1;", "xor.b32 one, one, 1;", "add.u32 half, half, one;",
    )  # fmt: skip
    yield "barrier", "count halved, 1 doubled", scoped(f"{op} {address}, half;")


def _elect(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    lane, elected = operands[0].split("|")
    yield (
        "election",
        "every lane elected",
        [*([f"mov.b32 {lane}, 0;"] if lane != "_" else []), f"setp.eq.b32 {elected}, 0, 0;"],
    )


def _bulk_copy(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    if ".multicast" in op:
        yield "multicast", "first destination dropped", _without_first_bit(op, operands, 3)


def _mma(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    """tcgen05.mma [d], a, b, idesc, ([sfa], [sfb],) accumulate."""
    scaled = ".block_scale" in op
    accumulate = 6 if scaled else 4
    if not re.fullmatch(r"%p\d+", operands[accumulate]):
        accumulate += 1  # a vector of disabled lanes stands before it
    yield _accumulate_inverted(op, operands, accumulate)
    for i, what in ((1, "A"), (2, "B")):
        if operands[i].startswith("["):
            yield from _next_column(op, operands, i, what)
        else:
            yield from _flip(op, operands, i, f"{what} descriptor", "b64", SHARED_DESCRIPTOR, unused)
    yield from _flip(op, operands, 3, "instruction descriptor", "b32", INSTRUCTION_DESCRIPTOR, unused)
    yield from _next_column(op, operands, 0, "accumulator")
    if scaled:
        yield from _next_column(op, operands, 4, "A scales")
        yield from _next_column(op, operands, 5, "B scales")


def _tensor_memory_copy(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    yield from _flip(op, operands, 1, "scale descriptor", "b64", SHARED_DESCRIPTOR, unused)
    yield from _next_column(op, operands, 0, "destination")


def _wgmma(op: str, operands: list[str], unused: frozenset[str]) -> Iterator[Change]:
    yield _accumulate_inverted(op, operands, 3)


def _accumulate_inverted(op: str, operands: list[str], index: int) -> Change:
    scoped = _scoped("pred", "inverted", f"not.pred inverted, {operands[index]};")
    return (
        "predicate",
        "accumulate inverted",
        scoped(f"{op} {', '.join([*operands[:index], 'inverted', *operands[index + 1 :]])};"),
    )


def _flip(
    op: str,
    operands: list[str],
    index: int,
    what: str,
    width: str,
    fields: dict[str, int],
    unused: frozenset[str],
) -> Iterator[Change]:
    for field, bit in fields.items():
        if field in unused:
            continue
        scoped = _scoped(width, "changed", f"xor.{width} changed, {operands[index]}, {1 << bit:#x};")
        line = f"{op} {', '.join([*operands[:index], 'changed', *operands[index + 1 :]])};"
        yield "descriptor", f"{what}: {field}", scoped(line)


def _next_column(op: str, operands: list[str], index: int, what: str) -> Iterator[Change]:
    scoped = _scoped("b32", "next", f"add.s32 next, {operands[index].strip('[]')}, 1;")
    line = f"{op} {', '.join([*operands[:index], '[next]', *operands[index + 1 :]])};"
    yield "descriptor", f"{what}: next column", scoped(line)


def _without_first_bit(op: str, operands: list[str], index: int) -> list[str]:
    mask = operands[index]
    scoped = _scoped("b16", "fewer, lower", f"sub.s16 lower, {mask}, 1;", f"and.b16 fewer, {mask}, lower;")
    return scoped(f"{op} {', '.join([*operands[:index], 'fewer', *operands[index + 1 :]])};")


def _scoped(kind: str, registers: str, *setup: str) -> Callable[[str], list[str]]:
    """The instruction in a scope of its own that first computes a changed operand (one line, so that guards hold)."""
    return lambda line: [f"{{ .reg .{kind} {registers}; {' '.join(setup)} {line} }}"]


_RULES: list[tuple[str, Rule]] = [
    (r"mbarrier\.(try|test)_wait", _poll),
    (r"(cp\.async(\.bulk)?|wgmma)\.wait_group", _wait_group),
    (r"tcgen05\.wait|barrier\.cluster\.wait|griddepcontrol\.wait", _deleted("wait")),
    (r"fence|tcgen05\.fence|wgmma\.fence", _deleted("fence")),
    (r"tcgen05\.commit|(cp\.async(\.bulk)?|wgmma)\.commit_group", _commit),
    (r"mbarrier\.arrive|barrier\.cluster\.arrive|bar(rier)?(\.cta)?\.arrive", _arrive),
    (r"bar(rier)?(\.cta)?\.sync", _deleted("barrier")),
    (r"mbarrier\.init", _mbarrier_init),
    (r"elect\.sync", _elect),
    (r"cp\.async\.bulk\.", _bulk_copy),
    (r"tcgen05\.mma", _mma),
    (r"tcgen05\.cp", _tensor_memory_copy),
    (r"wgmma\.mma_async", _wgmma),
]

"""PTX kernel → Python source: one function per basic block and lane-mask kind.

Registers used in more than one block live in the list `R` of a warp; the others are Python locals. Every block exists
twice: `b3f(W, R)` for a full warp and `b3p(W, R, m)` under a lane mask. A block returns the next block's index, -1 at
exit, a `(taken, rest, target, fall)` split, or a `Wait` / `Yield`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .analysis import pending_registers, shared_granule, unfenced_wgmmas
from .core.values import UNDEF, UNDEF_PREDICATE
from .errors import PtxsimError, Unsupported
from .isa import HANDLERS, Modifiers
from .isa.convert import bf16_pairs, is_bf16_pair
from .parser import Instruction, Kernel, Label, Module, constant, parse_body, split_operands

TRANSLATOR_VERSION = 3
"""Part of the disk cache key: raise it when translated code changes."""

_NAME = re.compile(r"%?[A-Za-z_$][\w$]*")
_ADDRESS = re.compile(r"^(.*?)\s*([+-])\s*(-?(?:0x[0-9a-fA-F]+|\d+))$")
_SYMBOL = re.compile(r"^([\w$]+)\s*([+-]\s*\d+)?$")
_SPECIAL = re.compile(
    r"%(tid|ntid|ctaid|nctaid|clusterid|nclusterid|cluster_ctaid|cluster_nctaid)\.[xyz]$"
    r"|%(laneid|warpid|nwarpid|smid|nsmid|gridid|cluster_ctarank|cluster_nctarank|dynamic_smem_size|total_smem_size"
    r"|is_explicit_cluster|lanemask_(lt|le|eq|ge|gt))$"
)
_CLOCKS = {"%clock", "%clock64", "%globaltimer", "%globaltimer_lo", "%clock_hi", "%globaltimer_hi"}


@dataclass
class Translation:
    """Everything a launch needs of a translated kernel; plain data, so that it can be cached on disk."""

    source: str
    blocks: int
    lengths: list[int]
    lines: list[int]
    registers: list[bool]
    """One entry per pinned register: True for a predicate."""
    opcodes: list[dict[str, int]]
    """Opcode counts of each block."""
    sites: dict[int, str] = field(default_factory=dict)
    """Instruction number → how reports name it: PTX line, text, Python source line."""
    granule: int = 16
    """Smallest access to shared memory in bytes: the grain of the race detector."""
    static_shared: int = 0
    dynamic_shared: int = 0
    local_bytes: int = 0


class Emitter:
    """Turns the instructions of one basic block into Python lines; handlers in `isa/` call its methods."""

    def __init__(self, translator: Translator, full: bool, next_block: int):
        self.t = translator
        self.full = full
        self.next_block = next_block
        self.lines: list[str] = []
        self.ins: Instruction = None  # type: ignore[assignment]
        self.guarded = False
        self.temporaries = 0
        self.pairs: set[str] = set()

    # ---- output
    def emit(self, line: str) -> None:
        self.lines.append(line)

    def temp(self, expression: str) -> str:
        self.temporaries += 1
        name = f"x{self.temporaries}"
        self.emit(f"{name} = {expression}")
        return name

    @property
    def mask(self) -> str:
        """Name of the active-lane mask."""
        return "pm" if self.guarded else "None" if self.full else "m"

    # ---- operands
    def operands(self, token: str) -> list[str]:
        """`{a, b}` or `a` as a list."""
        return split_operands(token[1:-1]) if token.startswith("{") else [token]

    def is_register(self, token: str) -> bool:
        return self.ins.scope.register(token.lstrip("!-")) is not None

    def register_type(self, token: str) -> str | None:
        found = self.ins.scope.register(token)
        return found[1] if found else None

    def register(self, token: str) -> str:
        found = self.ins.scope.register(token)
        if found is None:
            raise self.unsupported(f"operand {token!r} is not a register")
        return self.t.storage(found[0])

    def pinned(self, token: str) -> int:
        """Index in R of a register that must outlive its block."""
        found = self.ins.scope.register(token)
        if found is None or found[0] not in self.t.index:
            raise self.unsupported(f"operand {token!r} is not a pinned register")
        return self.t.index[found[0]]

    def val(self, token: str, width: int = 32) -> str:
        """Expression for a source operand as a bit pattern."""
        token = token.strip()
        if token.startswith("{"):
            parts = self.operands(token)
            step = width // len(parts)
            terms = [
                f"({self.val(p, step)}<<{i * step})" if i else self.val(p, step) for i, p in enumerate(parts)
            ]
            return "(" + "|".join(terms) + ")"
        if _SPECIAL.match(token):
            return f"W.special[{token[1:]!r}]"
        if token in _CLOCKS:
            return "W.machine.clock()"
        found = self.ins.scope.register(token)
        if found is not None:
            return self.t.storage(found[0])
        number = constant(token, width)
        if number is not None:
            return str(number)
        if token == "WARP_SZ":
            return "32"
        match = _SYMBOL.match(token)
        if match and match.group(1) in self.t.symbols:
            return f"({self.t.symbols[match.group(1)]}{(match.group(2) or '').replace(' ', '')})"
        raise self.unsupported(f"operand {token!r}")

    def pair(self, token: str) -> str | None:
        """Python name of a 64-bit register that only carries a pair of 32-bit ones through the block."""
        found = self.ins.scope.register(token)
        return f"p_{re.sub(r'[^0-9A-Za-z_]', '_', found[0])}" if found and found[0] in self.pairs else None

    def pred(self, token: str) -> str:
        """Expression for a predicate operand: register, `!register` or constant."""
        token = token.strip()
        if token.startswith("!"):
            return f"logical_not({self.pred(token[1:])})"
        number = constant(token, 32)
        if number is not None:
            return str(number != 0)
        return self.register(token)

    def addr(self, token: str, width: int = 64) -> str:
        """Expression for the address in `[base+offset]`."""
        if not token.startswith("["):
            raise self.unsupported(f"address expected, got {token!r}")
        inner = split_operands(token[1:-1])[0].strip()
        match = _ADDRESS.match(inner)
        if match and constant(inner, 64) is None:
            offset = int(match.group(3), 0) * (1 if match.group(2) == "+" else -1)
            base = self.val(match.group(1), width)
            return f"({base}+{offset})" if offset >= 0 else f"(({base}-{-offset})&{(1 << 64) - 1})"
        return self.val(inner, width)

    def set(self, token: str, expression: str) -> None:
        """Assign a result register, merging under the current mask."""
        token = token.strip()
        if token == "_":
            self.emit(expression)
            return
        target = self.register(token)
        if self.guarded or (not self.full and target.startswith("R[")):
            self.emit(f"{target} = merge({self.mask}, {expression}, {target})")
        else:
            self.emit(f"{target} = {expression}")

    def set_pair(self, token: str, value: str, predicate: str) -> None:
        """`d|p` result: either part may be `_`."""
        value_token, _, predicate_token = token.partition("|")
        if value_token != "_":
            self.set(value_token, value)
        if predicate_token and predicate_token != "_":
            self.set(predicate_token, predicate)

    def unsupported(self, why: str) -> Unsupported:
        return Unsupported(f"{self.ins.where}: {self.ins.text}: {why}")


class Translator:
    """Basic blocks, register allocation and code for one kernel."""

    def __init__(self, module: Module, kernel: Kernel, symbols: dict[str, str]):
        self.module, self.kernel, self.symbols = module, kernel, symbols
        self.index: dict[str, int] = {}
        self.types: dict[str, str] = {}
        self.label_block: dict[str, int] = {}

    def storage(self, key: str) -> str:
        if key in self.index:
            return f"R[{self.index[key]}]"
        return "t_" + re.sub(r"\W", "_", key)

    def target(self, ins: Instruction, token: str) -> int:
        key = ins.scope.label(token)
        if key is None:
            raise Unsupported(f"{ins.where}: label {token} not found")
        return self.label_block[key]

    def translate(self) -> Translation:
        items = self._expand_guards(parse_body(self.kernel, self.module.files))
        blocks = [self._sink_moves(b) for b in self._split(items)]
        self._allocate(blocks)
        self.hazards = pending_registers(self, blocks)
        for key, lines in unfenced_wgmmas(self, blocks).items():
            self.hazards.setdefault(key, []).extend(lines)
        source = []
        for i, block in enumerate(blocks):
            source.append(self._block(i, block, True))
            source.append(self._block(i, block, False))
        flat = [ins for block in blocks for ins in block]
        return Translation(
            "\n".join(source),
            len(blocks),
            [len(b) for b in blocks],
            [b[0].site for b in blocks],
            [self.types[key] == "pred" for key in self.index],
            [_count(b) for b in blocks],
            {ins.site: _describe(ins) for ins in flat},
            shared_granule(flat),
        )

    # ---- structure
    def _expand_guards(self, items: list[Instruction | Label]) -> list[Instruction | Label]:
        """Guarded instructions that cannot merge lane by lane become a branch around them."""
        out: list[Instruction | Label] = []
        for n, item in enumerate(items):
            if isinstance(item, Instruction) and item.op not in HANDLERS:
                raise Unsupported(f"{item.where}: {item.text}: instruction {item.op} is not modelled")
            if isinstance(item, Label) or not item.guard or item.op == "bra" or HANDLERS[item.op].predicated:
                out.append(item)
                continue
            skip = f"$skip{n}"
            item.scope.labels[skip] = skip
            branch = Instruction(
                "bra",
                [],
                [skip],
                item.guard,
                not item.guard_negated,
                item.line,
                item.text,
                item.scope,
                item.source,
                item.site,
            )
            item.guard = None
            out += [branch, item, Label(skip)]
        return out

    def _split(self, items: list[Instruction | Label]) -> list[list[Instruction]]:
        blocks: list[list[Instruction]] = []
        current: list[Instruction] = []

        def flush() -> None:
            nonlocal current
            if current:
                blocks.append(current)
                current = []

        for item in items:
            if isinstance(item, Label):
                flush()
                self.label_block[item.key] = len(blocks)
                continue
            rule = HANDLERS[item.op]
            if rule.starts(item):
                flush()
            current.append(item)
            if rule.ends(item):
                flush()
        flush()
        return blocks

    def _sink_moves(self, block: list[Instruction]) -> list[Instruction]:
        """Move plain copies of registers that a tcgen05.ld still owns behind its wait.

        The compiler puts such `mov`s (packing of register pairs) before `tcgen05.wait::ld`; for ptxas they only name
        registers.
        """
        if not any(ins.full.startswith("tcgen05.ld") for ins in block):
            return block
        out: list[Instruction] = []
        sunk: list[Instruction] = []
        pending: set[str] = set()
        for ins in block:
            reads, writes = self.reads_writes(ins)
            if ins.full.startswith("tcgen05.wait::ld"):
                out += [ins, *sunk]
                sunk, pending = [], set()
                continue
            if ins.op == "mov" and not ins.guard and pending.intersection(reads):
                sunk.append(ins)
                pending.update(writes)
                continue
            if sunk and pending.intersection(reads + writes):
                out += sunk
                sunk = []
            if ins.full.startswith("tcgen05.ld"):
                pending.update(writes)
            out.append(ins)
        return out + sunk

    def registers_of(self, ins: Instruction, tokens: list[str]) -> list[str]:
        found = []
        for token in _NAME.findall(" ".join(tokens)):
            register = ins.scope.register(token)
            if register:
                self.types[register[0]] = register[1]
                found.append(register[0])
        return found

    def reads_writes(self, ins: Instruction) -> tuple[list[str], list[str]]:
        n = HANDLERS[ins.op].writes(ins)
        results = [t for t in ins.operands[:n] if not t.startswith("[")]
        writes = self.registers_of(ins, results)
        sources = ins.operands[n:] + [t for t in ins.operands[:n] if t.startswith("[")]
        reads = self.registers_of(ins, sources + ([ins.guard] if ins.guard else []))
        return reads, writes

    def _allocate(self, blocks: list[list[Instruction]]) -> None:
        """Pin every register that is live across blocks, merged under a guard, or written asynchronously."""
        seen_in: dict[str, int] = {}
        pinned: set[str] = set()
        for i, block in enumerate(blocks):
            defined: set[str] = set()
            for ins in block:
                reads, writes = self.reads_writes(ins)
                pinned.update(r for r in reads if r not in defined)
                if (ins.guard and ins.op != "bra") or ins.op in ("wgmma", "tcgen05", "mbarrier"):
                    pinned.update(writes)
                defined.update(writes)
                for r in reads + writes:
                    if seen_in.setdefault(r, i) != i:
                        pinned.add(r)
        self.index = {key: n for n, key in enumerate(sorted(pinned))}

    # ---- code
    def _block(self, number: int, block: list[Instruction], full: bool) -> str:
        emitter = Emitter(self, full, number + 1)
        emitter.pairs = self._pairs(block)
        ended = False
        for ins in self._batched(block):
            if isinstance(ins, list):
                bf16_pairs(emitter, ins)
                continue
            emitter.ins = ins
            for check in self.hazards.get(id(ins), ()):
                emitter.emit(check)
            ended = self._instruction(emitter, ins)
        if not ended:
            emitter.emit(f"return {number + 1}")
        head = f"def b{number}f(W, R):" if full else f"def b{number}p(W, R, m):"
        return "\n  ".join([head, *emitter.lines]) + "\n"

    def _pairs(self, block: list[Instruction]) -> set[str]:
        """64-bit registers, local to the block, that `mov` packs from two registers and only `mov` unpacks."""
        packed: set[str] = set()
        other: set[str] = set()
        for ins in block:
            reads, writes = self.reads_writes(ins)
            plain = ins.full == "mov.b64" and not ins.guard
            if plain and ins.operands[1].startswith("{") and len(split_operands(ins.operands[1][1:-1])) == 2:
                packed.update(writes)
                other.update(reads)
            elif (
                plain and ins.operands[0].startswith("{") and len(split_operands(ins.operands[0][1:-1])) == 2
            ):
                other.update(writes)
            else:
                other.update(reads + writes)
        return {r for r in packed - other if r not in self.index}

    def _batched(self, block: list[Instruction]) -> list[Instruction | list[Instruction]]:
        """Runs of moves and bf16 conversions: the moves first, then the conversions as one list."""
        out: list[Instruction | list[Instruction]] = []
        moves: list[Instruction] = []
        conversions: list[Instruction] = []
        results: set[str] = set()

        def flush() -> None:
            out.extend(moves)
            out.extend([list(conversions)] if len(conversions) > 2 else conversions)
            moves.clear()
            conversions.clear()
            results.clear()

        for ins in block:
            reads, writes = self.reads_writes(ins)
            if is_bf16_pair(ins) and id(ins) not in self.hazards and not results.intersection(reads + writes):
                conversions.append(ins)
                results.update(writes)
                sources = {r for c in conversions for r in self.reads_writes(c)[0]}
                if sources.intersection(results):
                    flush()
                continue
            sources = {r for c in conversions for r in self.reads_writes(c)[0]}
            move = ins.op == "mov" and not ins.guard and id(ins) not in self.hazards
            if not move or results.intersection(reads + writes) or sources.intersection(writes):
                flush()
            if move:
                moves.append(ins)
            else:
                out.append(ins)
        flush()
        return out

    def _instruction(self, emitter: Emitter, ins: Instruction) -> bool:
        rule = HANDLERS[ins.op]
        mods = Modifiers(ins)
        body: Callable[[], bool] = lambda: bool(rule.handler(emitter, ins, mods))  # noqa: E731
        try:
            if ins.guard and rule.predicated:
                guard = emitter.pred(("!" if ins.guard_negated else "") + ins.guard)
                emitter.emit(f"pm = predicate_and_mask({guard}, {'None' if emitter.full else 'm'})")
                emitter.emit("if pm is not False:")
                outer, emitter.lines, emitter.guarded = emitter.lines, [], True
                body()
                emitter.lines, emitter.guarded = outer + ["  " + x for x in emitter.lines or ["pass"]], False
                ended = False
            else:
                ended = body()
            mods.done()
        except PtxsimError:
            raise
        except Exception as e:
            raise Unsupported(f"{ins.where}: {ins.text}: {type(e).__name__}: {e}") from e
        return ended


def _describe(ins: Instruction) -> str:
    return f"line {ins.line} `{ins.text[:90]}`" + (f" ({ins.source})" if ins.source else "")


def _count(block: list[Instruction]) -> dict[str, int]:
    """Instructions by opcode, and under longer names those that tell a warp's role."""
    out: dict[str, int] = {}
    for ins in block:
        names = [ins.op]
        if ins.op == "tcgen05":
            names.append(f"tcgen05.{ins.mods[0]}")
        elif ins.full.startswith("cp.async.bulk") and any(m.startswith("mbarrier") for m in ins.mods):
            names.append("bulk load")
        elif ins.full.startswith("clusterlaunchcontrol.try_cancel"):
            names.append("try cancel")
        for name in names:
            out[name] = out.get(name, 0) + 1
    return out


def initial_registers(translation: Translation) -> list:
    return [UNDEF_PREDICATE if is_predicate else UNDEF for is_predicate in translation.registers]

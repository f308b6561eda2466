"""The table from opcode to handler, and the modifier list that refuses what a handler does not take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import Unsupported
from ..parser import WIDTH, Instruction

if TYPE_CHECKING:
    from ..translate import Emitter

_REQUIRED = "\0"


class Modifiers:
    """Modifiers of one instruction; each is taken once, the rest is refused by name."""

    def __init__(self, ins: Instruction):
        self.ins = ins
        self.left = list(ins.mods)

    def flag(self, name: str) -> bool:
        if name in self.left:
            self.left.remove(name)
            return True
        return False

    def one_of(self, *names: str, default: str | None = _REQUIRED) -> str | None:
        for name in names:
            if name in self.left:
                self.left.remove(name)
                return name
        if default is _REQUIRED:
            raise Unsupported(f"{self.ins.where}: {self.ins.text}: one of .{', .'.join(names)} expected")
        return default

    def pick(self, *names: str) -> str:
        """One of the names; the instruction must have it."""
        name = self.one_of(*names)
        assert name is not None
        return name

    def prefixed(self, prefix: str) -> str | None:
        """The first modifier that starts with `prefix`, taken."""
        for name in self.left:
            if name.startswith(prefix):
                self.left.remove(name)
                return name
        return None

    def hints(self, *names: str) -> None:
        """Modifiers that change speed only."""
        for name in names:
            while name in self.left:
                self.left.remove(name)

    def types(self) -> list[str]:
        """All type modifiers in order, taken."""
        found = [m for m in self.left if m in WIDTH]
        self.left = [m for m in self.left if m not in WIDTH]
        return found

    def type(self) -> str:
        found = self.types()
        if len(found) != 1:
            raise Unsupported(f"{self.ins.where}: {self.ins.text}: types {found} are not modelled")
        return found[0]

    def done(self) -> None:
        if self.left:
            raise Unsupported(
                f"{self.ins.where}: {self.ins.text}: modifier{'s' * (len(self.left) > 1)} "
                f"{', '.join('.' + m for m in self.left)} of {self.ins.op} not modelled"
            )


Handler = Callable[["Emitter", Instruction, Modifiers], "bool | None"]


@dataclass(frozen=True)
class Rule:
    """How the translator treats an opcode.

    `writes(ins)`: how many leading operands are results. `ends(ins)`: the instruction may block or jump, so it ends its
    basic block. `starts(ins)`: it needs the lanes of a diverged warp together, so it begins one. `predicated`: the
    handler can merge under a lane mask, so a guard needs no branch.
    """

    handler: Handler
    writes: Callable[[Instruction], int]
    ends: Callable[[Instruction], bool]
    starts: Callable[[Instruction], bool]
    predicated: bool


HANDLERS: dict[str, Rule] = {}


def instruction(
    *ops: str,
    writes: int | Callable[[Instruction], int] = 1,
    ends: bool | Callable[[Instruction], bool] = False,
    starts: bool | Callable[[Instruction], bool] = False,
    predicated: bool = False,
) -> Callable[[Handler], Handler]:
    """Register a handler for opcodes."""

    def constant(v):
        return v if callable(v) else (lambda ins: v)

    def register(handler: Handler) -> Handler:
        rule = Rule(handler, constant(writes), constant(ends), constant(starts), predicated)
        for op in ops:
            assert op not in HANDLERS, op
            HANDLERS[op] = rule
        return handler

    return register


def refuse(ins: Instruction, why: str = "is not modelled") -> Unsupported:
    return Unsupported(f"{ins.where}: {ins.text}: {why}")

"""PTX text to kernels: declarations, scopes, labels and instructions.

The parser knows the shape of PTX statements, not their meaning; `isa/` gives meaning to opcodes and modifiers.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .errors import Unsupported

_LABEL = re.compile(r"([A-Za-z_$%][\w$]*)\s*:(?!:)")
_FAMILY = re.compile(r"^(%?[A-Za-z_$]+)(\d+)$")
_ENTRY = re.compile(r"\.(entry|func)\s")
_PARAM_NAME = re.compile(r"^([\w$]+)(?:\[(\d+)\])?$")
_ARRAY = re.compile(r"\.(?:local|shared)\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
_MODULE_VARIABLE = re.compile(
    r"^\s*(?:\.extern|\.visible|\.weak)?\s*\.(shared|global|const)\s+(?:\.attribute\([^)]*\)\s+)?"
    r"(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*(?:=\s*([^;]*))?;",
    re.M,
)

WIDTH = {
    **dict.fromkeys(("b8", "u8", "s8"), 8),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2", "ue8m0x2"), 16),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "tf32", "f16x2", "bf16x2", "u16x2", "s16x2", "e2m1x2"), 32),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 64),
    "b128": 128,
    "pred": 1,
}
"""Bits of a PTX type."""


@dataclass
class Scope:
    """One `{ … }` of a kernel body: its registers, register families and labels."""

    id: int
    parent: Scope | None
    registers: dict[str, str] = field(default_factory=dict)
    families: dict[str, str] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    vectors: dict[str, str] = field(default_factory=dict)
    """Vector registers: name → components, which are registers called name__x, ….

    They are written out when an instruction is parsed, so that nothing else knows them."""

    def write_out_vectors(self, statement: str) -> str:
        """`abcd.x` → `abcd__x`, `abcd` → `{abcd__x, abcd__y, …}`."""
        scope: Scope | None = self
        while scope is not None:
            for name, components in scope.vectors.items():
                word = rf"(?<![\w%$.]){re.escape(name)}"
                statement = re.sub(rf"{word}\.([xyzw])\b", rf"{name}__\1", statement)
                whole = ", ".join(f"{name}__{c}" for c in components)
                statement = re.sub(rf"{word}(?![\w.$])", f"{{{whole}}}", statement)
            scope = scope.parent
        return statement

    def register(self, token: str) -> tuple[str, str] | None:
        """Unique key and type of a register named in this scope, or None."""
        scope: Scope | None = self
        family = _FAMILY.match(token)
        while scope is not None:
            kind = scope.registers.get(token) or (scope.families.get(family.group(1)) if family else None)
            if kind is not None:
                return f"{token}@{scope.id}", kind
            scope = scope.parent
        return None

    def label(self, token: str) -> str | None:
        scope: Scope | None = self
        while scope is not None:
            if token in scope.labels:
                return scope.labels[token]
            scope = scope.parent
        return None


@dataclass
class Instruction:
    """One PTX instruction: `@guard op.mod.mod a, b, c;`."""

    op: str
    mods: list[str]
    operands: list[str]
    guard: str | None
    guard_negated: bool
    line: int
    text: str
    scope: Scope
    source: str | None = None
    site: int = 0
    """Number of the instruction in its kernel: what runtime reports refer to."""

    @property
    def full(self) -> str:
        return ".".join([self.op, *self.mods])

    @property
    def where(self) -> str:
        """PTX line, and the Python source line if the PTX has line information."""
        return f"line {self.line}" + (f" ({self.source})" if self.source else "")


@dataclass(frozen=True)
class Array:
    """A `.shared`, `.local`, `.global` or `.const` variable; size in bytes, 0 for an extern array."""

    name: str
    align: int
    size: int
    space: str = "shared"
    type: str = "b8"
    init: str | None = None


@dataclass(frozen=True)
class Param:
    name: str
    offset: int
    size: int


@dataclass
class Kernel:
    """A `.entry`: parameters, directives, and its body as text until `parse_body`."""

    name: str
    params: list[Param]
    param_bytes: int
    directives: str
    body: str
    first_line: int
    shared: list[Array] = field(default_factory=list)
    local: list[Array] = field(default_factory=list)

    def required_cluster(self) -> tuple[int, int, int] | None:
        match = re.search(r"\.reqnctapercluster\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", self.directives)
        if not match:
            return None
        x, y, z = (int(v or 1) for v in match.groups())
        return x, y, z


@dataclass
class Module:
    target: str | None
    kernels: dict[str, Kernel]
    variables: list[Array]
    files: dict[int, str]


@dataclass(frozen=True)
class Label:
    key: str


def split_operands(text: str) -> list[str]:
    """Split at commas outside brackets."""
    out, depth, start = [], 0, 0
    for i, ch in enumerate(text):
        if ch in "{[(":
            depth += 1
        elif ch in "}])":
            depth -= 1
        elif ch == "," and depth == 0:
            out.append(text[start:i].strip())
            start = i + 1
    if text[start:].strip():
        out.append(text[start:].strip())
    return out


def constant(token: str, width: int) -> int | None:
    """Value of a literal as a bit pattern of `width` bits, or None for a name."""
    token = token.strip()
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", token):
        digits = token.rstrip("U")
        octal = re.fullmatch(r"-?0\d+", digits) is not None
        return int(digits, 8 if octal else 0) & ((1 << width) - 1)
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", token) or re.fullmatch(r"0[dD][0-9a-fA-F]{16}", token):
        return int(token[2:], 16)
    return None


def _strip_comments(text: str) -> str:
    text = re.sub(r"/\*.*?\*/", lambda m: " " + "\n" * m.group().count("\n"), text, flags=re.S)
    return re.sub(r"//[^\n]*", "", text)


def parse_module(text: str) -> Module:
    """Kernels and module variables of a PTX file."""
    text = _strip_comments(text)
    target = re.search(r"\.target\s+(\w+)", text)
    files = {int(m.group(1)): m.group(2) for m in re.finditer(r'\.file\s+(\d+)\s+"([^"]*)"', text)}
    module = Module(target.group(1) if target else None, {}, [], files)
    for m in _MODULE_VARIABLE.finditer(text):
        space, align, kind, name, count, init = m.groups()
        unit = WIDTH[kind] // 8
        size = unit if count is None else int(count or 0) * unit
        module.variables.append(Array(name, int(align or unit), size, space, kind, init))
    for entry in _ENTRY.finditer(text):
        if entry.group(1) == "entry":
            kernel = _parse_entry(text, entry.end())
            module.kernels[kernel.name] = kernel
    return module


def _parse_entry(text: str, start: int) -> Kernel:
    brace = text.index("{", start)
    head = text[start:brace]
    params, offset, directives = [], 0, head
    if "(" in head:
        close = head.index(")", head.index("("))
        name, inside, directives = (
            head[: head.index("(")].strip(),
            head[head.index("(") + 1 : close],
            head[close + 1 :],
        )
        for declaration in split_operands(inside):
            words = declaration.split()
            match = _PARAM_NAME.match(words[-1])
            kind = next((w[1:] for w in words[1:] if w[1:] in WIDTH), None)
            if words[0] != ".param" or not match or kind is None:
                raise Unsupported(f"parameter declaration {declaration!r}")
            align = re.search(r"\.align\s+(\d+)", declaration[: declaration.index("." + kind)])
            unit = WIDTH[kind] // 8
            size = int(match.group(2)) * unit if match.group(2) else unit
            step = int(align.group(1)) if align else unit
            offset = -(-offset // step) * step
            params.append(Param(match.group(1), offset, size))
            offset += size
    else:
        name = head.split()[0]
        directives = head[len(name) :]
    depth, end = 0, brace
    while True:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            break
        end += 1
    return Kernel(name, params, offset, directives, text[brace + 1 : end], text.count("\n", 0, brace))


def parse_body(kernel: Kernel, files: dict[int, str] | None = None) -> list[Instruction | Label]:
    """Instructions and labels in order; fills `kernel.shared` and `kernel.local`."""
    text, files = kernel.body, files or {}
    scope = Scope(0, None)
    scopes, pos, line, source = 1, 0, kernel.first_line + 1, None
    items: list[Instruction | Label] = []
    kernel.shared, kernel.local = [], []
    while True:
        start = pos
        while pos < len(text) and (text[pos].isspace() or text[pos] == ";"):
            pos += 1
        line += text.count("\n", start, pos)
        if pos >= len(text):
            return items
        if text[pos] == "{":
            scope = Scope(scopes, scope)
            scopes, pos = scopes + 1, pos + 1
            continue
        if text[pos] == "}":
            assert scope.parent is not None
            scope, pos = scope.parent, pos + 1
            continue
        label = _LABEL.match(text, pos)
        if label:
            key = f"{label.group(1)}@{scope.id}"
            scope.labels[label.group(1)] = key
            items.append(Label(key))
            line += text.count("\n", pos, label.end())
            pos = label.end()
            continue
        if re.match(r"\.loc\s", text[pos : pos + 5]):
            end = text.index("\n", pos)
            words = text[pos:end].replace(",", " ").split()
            source = f"{files.get(int(words[1]), words[1])}:{words[2]}"
            pos = end
            continue
        end = text.index(";", pos)
        statement = " ".join(text[pos:end].split())
        if statement.startswith("."):
            _declare(statement, scope, kernel)
        else:
            instruction = _parse_instruction(scope.write_out_vectors(statement), line, source, scope)
            items.append(instruction)
            instruction.site = len(items)
        line += text.count("\n", pos, end)
        pos = end + 1


def _declare(statement: str, scope: Scope, kernel: Kernel) -> None:
    if statement.startswith(".reg"):
        match = re.match(r"\.reg\s+(?:\.v([24])\s+)?\.(\w+)\s+(.*)", statement)
        if not match:
            raise Unsupported(f"register declaration {statement!r}")
        size, kind = match.group(1), match.group(2)
        for name in split_operands(match.group(3)):
            family = re.fullmatch(r"(%?[\w$]+)<(\d+)>", name)
            if family and size:
                raise Unsupported(f"register declaration {statement!r}")
            if family:
                scope.families[family.group(1)] = kind
            elif size:
                scope.vectors[name] = "xyzw"[: int(size)]
                scope.registers.update({f"{name}__{c}": kind for c in scope.vectors[name]})
            else:
                scope.registers[name] = kind
    elif statement.startswith((".local", ".shared")):
        match = _ARRAY.match(statement)
        if not match:
            raise Unsupported(f"declaration {statement!r}")
        align, kind, name, count = match.groups()
        unit = WIDTH[kind] // 8
        array = Array(name, int(align or unit), unit if count is None else int(count or 0) * unit)
        (kernel.shared if statement.startswith(".shared") else kernel.local).append(array)
    elif not statement.startswith((".pragma", ".branchtargets", ".maxntid", ".loc")):
        raise Unsupported(f"directive {statement!r}")


def _parse_instruction(statement: str, line: int, source: str | None, scope: Scope) -> Instruction:
    text, guard, negated = statement, None, False
    match = re.match(r"@(!?)\s*([%\w$]+)\s+(.*)", statement)
    if match:
        negated, guard, statement = bool(match.group(1)), match.group(2), match.group(3)
    match = re.match(r"([\w.:]+)\s*(.*)$", statement)
    if not match:
        raise Unsupported(f"line {line}: cannot parse {text!r}")
    op, *mods = match.group(1).split(".")
    return Instruction(op, mods, split_operands(match.group(2)), guard, negated, line, text, scope, source)

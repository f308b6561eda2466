"""Timelines and counts of a launch: who did what, waited for what, moved how much.

The time axis is that of the `timed` schedule: every warp runs four instructions in four ticks, and copies, matrix
multiplies and TMEM loads take roughly the clocks published for them. It shows overlap and order, not performance.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from .core.engine import Op
    from .core.machine import LaunchRecord, Machine
    from .core.state import Wait, Warp

_TRACKS = {"tma": "copies", "mma": "tensor core", "tmem": "TMEM", "copy": "cp.async"}


@dataclass
class Span:
    """Something that lasts: `group` is the CTA, `track` the warp or unit."""

    group: str
    track: str
    name: str
    kind: str
    start: int
    end: int


@dataclass
class LaunchTrace:
    """Everything recorded of one launch."""

    record: LaunchRecord
    spans: list[Span] = field(default_factory=list)
    blocks: Counter = field(default_factory=Counter)
    """(warp number, block) → times executed."""
    opcodes: list[dict[str, int]] = field(default_factory=list)
    waits: dict[int, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0]))
    """Warp number → [waits, ticks waited]."""
    moved: Counter = field(default_factory=Counter)
    """(kind of copy, tensor) → bytes."""
    conflicts: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    """Site → [accesses, wavefronts needed, wavefronts without conflicts]."""
    end: int = 0

    def opcode_counts(self) -> dict[int, Counter]:
        """Warp number → opcode → instructions."""
        out: dict[int, Counter] = defaultdict(Counter)
        for (number, block), times in self.blocks.items():
            for op, n in self.opcodes[block].items():
                out[number][op] += n * times
        return out

    def roles(self) -> dict[int, str]:
        """What each warp number of a CTA mostly is for, from the instructions it ran."""
        return {number: _role(ops) for number, ops in sorted(self.opcode_counts().items())}


def _role(ops: Counter) -> str:
    if ops["tcgen05.mma"]:
        return "MMA"
    if ops["wgmma"]:
        return "consumer (wgmma)"
    if ops["bulk load"]:
        return "load"
    if ops["tcgen05.ld"]:
        return "epilogue"
    if ops["try cancel"]:
        return "scheduler"
    return "compute"


class Trace:
    """Pass to `ptxsim.gpu(trace=…, schedule="timed")`; afterwards `write`, `summary`, `draw`."""

    def __init__(self) -> None:
        self.launches: list[LaunchTrace] = []
        self._machine: Machine | None = None
        self._running: dict[Warp, int] = {}
        self._waiting: dict[Warp, tuple[int, str]] = {}

    # ---- called by the machine
    def begin(self, machine: Machine, record: LaunchRecord) -> None:
        assert machine.program is not None
        self._machine = machine
        self.launches.append(LaunchTrace(record, opcodes=machine.program.translation.opcodes))
        self._running.clear()
        self._waiting.clear()
        machine.engine.observer = self._operation

    def end(self, machine: Machine) -> None:
        machine.engine.observer = None
        self._current.end = machine.now
        for warp, start in list(self._running.items()):
            self._span(warp, "run", "run", start)

    @property
    def _current(self) -> LaunchTrace:
        return self.launches[-1]

    def _span(self, warp: Warp, name: str, kind: str, start: int) -> None:
        end = warp.machine.now
        if end > start:
            self._current.spans.append(Span(warp.cta.name, f"warp {warp.number}", name, kind, start, end))

    def block(self, warp: Warp, block: int, n: int) -> None:
        self._current.blocks[warp.number, block] += 1
        self._running.setdefault(warp, warp.machine.now)

    def wait(self, warp: Warp, wait: Wait) -> None:
        start = self._running.pop(warp, warp.machine.now)
        self._span(warp, "run", "run", start)
        self._waiting[warp] = (warp.machine.now, wait.text())

    def resume(self, warp: Warp) -> None:
        found = self._waiting.pop(warp, None)
        if found is None:
            return
        start, text = found
        self._span(warp, text, "wait", start)
        tally = self._current.waits[warp.number]
        tally[0] += 1
        tally[1] += warp.machine.now - start

    def _operation(self, op: Op, done: bool) -> None:
        if not done or self._machine is None:
            return
        machine = self._machine
        site = machine.describe_line(op.line)
        track = _TRACKS.get(op.pipe.kind, op.pipe.kind)
        owner = op.pipe.name.partition("CTA")[2]
        group = f"CTA{owner}".partition(" warp")[0] if owner else "copies"
        text = site.partition("`")[2].partition(" ")[0] or site
        self._current.spans.append(
            Span(group, track, text, op.pipe.kind, op.started, max(machine.now, op.started + 1))
        )

    def bytes_moved(self, kind: str, address: int, n: int) -> None:
        assert self._machine is not None
        name = next((s[2] for s in self._machine.memory.spans if s[0] <= address < s[1]), hex(address))
        self._current.moved[kind, name] += n

    def shared_access(self, warp: Warp, offsets: np.ndarray, size: int, line: int) -> None:
        """Count wavefronts: 32 banks of 4 bytes; 8-byte accesses go by half warps, 16-byte ones by quarters."""
        lanes = 32 if size <= 4 else 128 // size
        tally = self._current.conflicts[warp.machine.describe_line(line)]
        tally[0] += 1
        for i in range(0, len(offsets), lanes):
            part = offsets[i : i + lanes]
            words = np.unique((part[:, None] // 4 + np.arange(max(size // 4, 1))).reshape(-1))
            tally[1] += int(np.bincount(words % 32).max())
            tally[2] += 1

    # ---- results
    def write(self, path: str) -> None:
        """Chrome trace events, which Perfetto loads."""
        events: list[dict[str, Any]] = []
        processes: dict[str, int] = {}
        threads: dict[tuple[str, str], int] = {}
        offset = 0
        for launch in self.launches:
            roles = launch.roles()
            for span in launch.spans:
                pid = processes.setdefault(span.group, len(processes) + 1)
                track = span.track
                if track.startswith("warp "):
                    track += f" ({roles.get(int(track[5:]), '?')})"
                tid = threads.setdefault((span.group, track), len(threads) + 1)
                events.append(
                    {"name": span.name, "cat": span.kind, "ph": "X", "ts": offset + span.start,
                     "dur": span.end - span.start, "pid": pid, "tid": tid}
                )  # fmt: skip
            offset += launch.end + 100
        for group, pid in processes.items():
            events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": group}})
        for (group, track), tid in threads.items():
            events.append(
                {
                    "name": "thread_name",
                    "ph": "M",
                    "pid": processes[group],
                    "tid": tid,
                    "args": {"name": track},
                }
            )
        with open(path, "w") as f:
            json.dump({"traceEvents": events, "displayTimeUnit": "ns"}, f)

    def summary(self, launch: int = -1) -> str:
        """Counts as text."""
        t = self.launches[launch]
        roles, opcodes = t.roles(), t.opcode_counts()
        lines = [f"{t.record.name[:70]}: {t.record.instructions} warp instructions, {t.end} ticks"]
        by_role: dict[str, list[int]] = defaultdict(list)
        for number, role in roles.items():
            by_role[role].append(number)
        lines.append("role                 warps   instructions   waits   ticks waited")
        for role, numbers in by_role.items():
            total = sum(
                sum(v for op, v in opcodes[n].items() if "." not in op and " " not in op) for n in numbers
            )
            waits = sum(t.waits[n][0] for n in numbers if n in t.waits)
            ticks = sum(t.waits[n][1] for n in numbers if n in t.waits)
            lines.append(f"{role:20} {len(numbers):5} {total:14} {waits:7} {ticks:14}")
        counted = ("mma", "tcgen05.cp", "wgmma", "commit", "tma_load", "tma_store")
        lines += [f"{name:20} {t.record.counts[name]}" for name in counted if name in t.record.counts]
        lines += [f"{kind:12} {n:12} bytes  {tensor}" for (kind, tensor), n in sorted(t.moved.items())]
        conflicted = [(site, v) for site, v in t.conflicts.items() if v[1] > v[2]]
        total = sum(v[1] - v[2] for _, v in conflicted)
        lines.append(f"shared-memory bank conflicts: {total} extra wavefronts")
        for site, (accesses, needed, ideal) in sorted(conflicted, key=lambda x: x[1][2] - x[1][1])[:8]:
            lines.append(f"  {needed / ideal:.1f}x over {accesses} accesses: {site}")
        return "\n".join(lines)

    def draw(self, path: str, launch: int = -1, ctas: int = 2) -> None:
        """The timeline of the first CTAs as an image (matplotlib)."""
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
        from matplotlib.patches import Patch

        t = self.launches[launch]
        roles = t.roles()
        shown = sorted({s.group for s in t.spans if s.group.startswith("CTA")})[:ctas]
        rows = sorted({(s.group, s.track) for s in t.spans if s.group in shown or s.group == "copies"})
        colours = {"run": "#4c72b0", "wait": "#d9d9d9", "tma": "#55a868", "mma": "#c44e52", "tmem": "#8172b2"}
        figure, axes = plt.subplots(figsize=(11, 0.35 * len(rows) + 1.2))
        for y, row in enumerate(rows):
            for kind, colour in colours.items():
                bars = [
                    (s.start, max(s.end - s.start, 1))
                    for s in t.spans
                    if (s.group, s.track) == row and s.kind == kind
                ]
                if bars:
                    axes.broken_barh(bars, (y - 0.4, 0.8), color=colour, edgecolor="white", linewidth=0.2)
        labels = []
        for group, track in rows:
            role = f" {roles.get(int(track[5:]), '')}" if track.startswith("warp ") else ""
            labels.append(f"{group} {track}{role}" if group != "copies" else "bulk copies (all CTAs)")
        axes.set_yticks(range(len(rows)), labels, fontsize=8)
        axes.invert_yaxis()
        axes.set_xlabel("ticks of the timed schedule (order and overlap, not performance)")
        axes.legend(
            handles=[Patch(color=c, label=k) for k, c in colours.items()],
            ncols=5,
            fontsize=8,
            loc="lower right",
        )
        figure.tight_layout()
        figure.savefig(path, dpi=110)
        plt.close(figure)

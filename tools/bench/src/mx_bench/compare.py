"""`mx-bench compare A.json B.json`: what moved by more than the noise of the two runs."""

from dataclasses import dataclass

from mx_bench.results import Measurement, Results

FLOOR = 0.02
"""Changes below this are never called a move, however quiet the two runs were."""


@dataclass(frozen=True)
class Move:
    """One measurement in both runs."""

    before: Measurement
    after: Measurement

    @property
    def ratio(self) -> float:
        """Speed-up: above 1 the second run is faster."""
        assert self.before.seconds
        assert self.after.seconds
        return self.before.seconds / self.after.seconds

    @property
    def noise(self) -> float:
        """What the spreads of the two runs explain, at least FLOOR."""
        return max(FLOOR, (self.before.spread or 0.0) + (self.after.spread or 0.0))

    @property
    def is_beyond_noise(self) -> bool:
        return abs(self.ratio - 1.0) > self.noise


@dataclass(frozen=True)
class Comparison:
    """Two runs side by side."""

    moves: tuple[Move, ...]
    only_before: tuple[Measurement, ...]
    only_after: tuple[Measurement, ...]
    different_machine: tuple[str, ...]
    """Machine properties that differ: with another GPU or torch the moves mean something else."""


def compare(before: Results, after: Results) -> Comparison:
    """Match the measurements of two runs by section, case and contestant."""
    old = {m.key: m for m in before.measurements if m.seconds}
    new = {m.key: m for m in after.measurements if m.seconds}
    keys = [key for key in old if key in new]
    properties = sorted(set(before.machine) | set(after.machine))
    return Comparison(
        moves=tuple(Move(old[key], new[key]) for key in keys),
        only_before=tuple(m for key, m in old.items() if key not in new),
        only_after=tuple(m for key, m in new.items() if key not in old),
        different_machine=tuple(p for p in properties if before.machine.get(p) != after.machine.get(p)),
    )

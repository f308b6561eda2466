"""A case is one problem with its contestants; running it never fails: what did not run says why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from mx_bench.results import Measurement
from mx_bench.timing import race

Call = Callable[[int], object]
"""One call of a contestant; the argument is a running number from which it takes its buffer set."""


@dataclass(frozen=True)
class Case:
    """One problem. A contestant that is a string cannot run here, and the string is the reason."""

    name: str
    contestants: Mapping[str, Call | str]
    bytes: float | None = None
    flop: float | None = None


def run_case(section: str, case: Case, *, rounds: int) -> list[Measurement]:
    """Race the contestants that can run; report the others with their reason."""
    notes = {name: call for name, call in case.contestants.items() if isinstance(call, str)}
    able: dict[str, Call] = {}
    for name, call in case.contestants.items():
        if isinstance(call, str):
            continue
        try:
            call(0)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            able[name] = call
        except (
            Exception
        ) as error:  # a contestant is somebody else's code: whatever it raises, the rest goes on
            notes[name] = (
                f"failed: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
            )
    timings = race(able, rounds=rounds) if able else {}

    def measurement(name: str) -> Measurement:
        timing = timings.get(name)
        return Measurement(
            section,
            case.name,
            name,
            seconds=timing.median_us * 1e-6 if timing else None,
            spread=(timing.high_us - timing.low_us) / timing.median_us if timing else None,
            rounds=rounds if timing else 0,
            bytes=case.bytes,
            flop=case.flop,
            note=notes.get(name, ""),
        )

    return [measurement(name) for name in case.contestants]

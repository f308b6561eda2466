"""A case is one problem with its contestants; running it never fails: what did not run says why."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from mx_bench.results import FAILED, Measurement
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
    check: Callable[[str, object], str | None] | None = None
    """What is wrong with a contestant's result, by its name; None if nothing is."""


def reason_of(error: Exception) -> str:
    """A note for a contestant that raised: the type and the first line of the message."""
    lines = str(error).strip().splitlines()
    return f"{FAILED}{type(error).__name__}" + (f": {lines[0]}" if lines else "")


def relative_error(result: Tensor, reference: Tensor) -> float:
    """|result - reference| over |reference|, Frobenius norms."""
    reference = reference.float()
    return ((result.float() - reference).norm() / reference.norm()).item()


def run_case(section: str, case: Case, *, rounds: int, calls: int = 4) -> list[Measurement]:
    """Race the contestants that can run and compute the right thing; report the others with their reason."""
    notes = {name: call for name, call in case.contestants.items() if isinstance(call, str)}
    able: dict[str, Call] = {}
    for name, call in case.contestants.items():
        if not isinstance(call, str):
            able[name] = _guarded(name, call, notes)
            result = able[name](0)
            if name not in notes and case.check and (wrong := _checked(case.check, name, result)):
                notes[name] = f"{FAILED}{wrong}"
    able = {name: call for name, call in able.items() if name not in notes}
    timings = race(able, rounds=rounds, calls=calls) if able else {}
    timings = {name: timing for name, timing in timings.items() if name not in notes}

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


def _checked(check: Callable[[str, object], str | None], name: str, result: object) -> str | None:
    try:
        return check(name, result)
    except Exception as error:  # a result of another shape or type than was asked for
        return f"result cannot be checked: {type(error).__name__}"


def warm_case(section: str, case: Case) -> list[Measurement]:
    """Call every contestant once, so that its kernels are compiled and kept on disk; return those that failed."""
    failed: dict[str, str] = {}
    for name, call in case.contestants.items():
        if not isinstance(call, str):
            _guarded(name, call, failed)(0)
    return [Measurement(section, case.name, name, None, note=note) for name, note in failed.items()]


def _guarded(name: str, call: Call, notes: dict[str, str]) -> Call:
    """The contestant, until it raises: from then on it does nothing, and its note says why.

    A contestant is somebody else's code: whatever it raises, the rest goes on.
    """

    def guarded(number: int) -> object:
        if name in notes:
            return None
        try:
            result = call(number)
            if number == 0 and torch.cuda.is_available():
                torch.cuda.synchronize()
            return result
        except Exception as error:
            notes[name] = reason_of(error)
            return None

    return guarded

"""What a benchmark run leaves: measurements, the machine they were taken on, and JSON that can be read back."""

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import jsonschema

SCHEMA_VERSION = 1

SCHEMA: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "mx-bench results",
    "type": "object",
    "additionalProperties": False,
    "required": ["schema_version", "smoke", "machine", "sections_done", "measurements"],
    "properties": {
        "schema_version": {"const": SCHEMA_VERSION},
        "smoke": {"type": "boolean", "description": "sizes too small to say anything about speed"},
        "machine": {"type": "object", "additionalProperties": {"type": ["string", "number", "null"]}},
        "sections_done": {"type": "array", "items": {"type": "string"}},
        "measurements": {
            "type": "array",
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": [
                    "section",
                    "case",
                    "contestant",
                    "seconds",
                    "spread",
                    "rounds",
                    "bytes",
                    "flop",
                    "note",
                ],
                "properties": {
                    "section": {"type": "string"},
                    "case": {"type": "string"},
                    "contestant": {"type": "string"},
                    "seconds": {
                        "type": ["number", "null"],
                        "description": "median of one call; null if it did not run",
                    },
                    "spread": {
                        "type": ["number", "null"],
                        "description": "interquartile range over the median",
                    },
                    "rounds": {"type": "integer"},
                    "bytes": {"type": ["number", "null"], "description": "read once plus written once"},
                    "flop": {"type": ["number", "null"]},
                    "note": {"type": "string", "description": "why it did not run, or what to know"},
                },
            },
        },
    },
}

FAILED = "failed: "
"""How the note of a failure begins."""

NOISY = 0.05
"""A relative spread above this is called noisy wherever the number is shown."""


@dataclass(frozen=True)
class Measurement:
    """One contestant on one case; `seconds` is None where it did not run, and `note` says why."""

    section: str
    case: str
    contestant: str
    seconds: float | None
    spread: float | None = None
    rounds: int = 0
    bytes: float | None = None
    flop: float | None = None
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        """What identifies the same measurement in another run."""
        return self.section, self.case, self.contestant

    @property
    def bandwidth(self) -> float | None:
        """Bytes per second."""
        return self.bytes / self.seconds if self.bytes and self.seconds else None

    @property
    def rate(self) -> float | None:
        """FLOP per second."""
        return self.flop / self.seconds if self.flop and self.seconds else None

    @property
    def is_failure(self) -> bool:
        """It was tried and raised, or computed something else; what is not installed is no failure."""
        return self.seconds is None and self.note.startswith(FAILED)

    @property
    def is_noisy(self) -> bool:
        return self.spread is not None and self.spread > NOISY


@dataclass(frozen=True)
class Results:
    """All measurements of one run. Sections are added whole, so that a run can be resumed at a section."""

    machine: dict[str, str | float | None]
    smoke: bool = False
    sections_done: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    schema_version: int = field(default=SCHEMA_VERSION)

    def with_section(self, name: str, measurements: list[Measurement]) -> "Results":
        """The same run with one more section."""
        return replace(
            self,
            sections_done=(*self.sections_done, name),
            measurements=(*self.measurements, *measurements),
        )

    def best(
        self, section: str, case: str | None = None, contestant: str | None = None
    ) -> Measurement | None:
        """The fastest measurement that matches, if any ran."""
        found = [
            m
            for m in self.measurements
            if m.section == section
            and m.seconds is not None
            and case in (None, m.case)
            and contestant in (None, m.contestant)
        ]
        return min(found, key=lambda m: m.seconds or 0.0, default=None)

    def save(self, path: Path) -> None:
        """Write JSON, whole or not at all."""
        data = json.loads(json.dumps(asdict(self)))
        jsonschema.validate(data, SCHEMA)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(data, indent=1) + "\n")
        temporary.replace(path)


def load(path: Path) -> Results:
    """Read what `Results.save` wrote.

    Raises:
        ValueError: no such file, not JSON, or not of this schema.
    """
    try:
        data = json.loads(path.read_text())
        jsonschema.validate(data, SCHEMA)
    except (OSError, json.JSONDecodeError, jsonschema.ValidationError) as error:
        reason = error.message if isinstance(error, jsonschema.ValidationError) else error
        raise ValueError(f"{path}: expected mx-bench results, schema {SCHEMA_VERSION}: {reason}") from None
    return Results(
        machine=data["machine"],
        smoke=data["smoke"],
        sections_done=tuple(data["sections_done"]),
        measurements=tuple(Measurement(**m) for m in data["measurements"]),
    )

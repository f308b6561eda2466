"""What one invocation measures, and how cases are raced by such a plan."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from mx_bench.cases import Case, reason_of, run_case, warm_case
from mx_bench.results import Measurement
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES, SMOKE_SHAPES


@dataclass(frozen=True)
class Plan:
    """What one invocation measures."""

    device: str
    quick: bool
    warm: bool = False
    """Compile everything that would be measured, and measure nothing."""

    @property
    def smoke(self) -> bool:
        """On a CPU only the reference backend runs: small sizes, to show that everything works."""
        return self.device == "cpu"

    @property
    def rounds(self) -> int:
        if self.smoke:
            return 3
        return 11 if self.quick else 15

    @property
    def calls(self) -> int:
        """Calls in a turn of a round."""
        return 1 if self.smoke else 4

    @property
    def layer_shapes(self):
        if self.smoke:
            return SMOKE_SHAPES
        return DESIGN_SHAPES if self.quick else (*DESIGN_SHAPES, *MODEL_SHAPES)


def run_cases(section: str, cases: Iterable[Case], plan: Plan) -> list[Measurement]:
    """Race case by case; only failures come back where the plan is to warm. If one cannot even be set up, the others before it are kept."""
    measurements: list[Measurement] = []
    try:
        for case in cases:
            if plan.warm:
                measurements += warm_case(section, case)
            else:
                measurements += run_case(section, case, rounds=plan.rounds, calls=plan.calls)
            del case
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    except Exception as error:
        measurements.append(
            Measurement(section, "the rest of the section", "all", None, note=reason_of(error))
        )
    return measurements

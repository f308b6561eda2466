"""Every section of a run, in order: a name and a function that measures it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from mx_bench import ceilings, gemm, layer, memory_bound, trainer
from mx_bench.cases import Case, run_case
from mx_bench.results import Measurement
from mx_bench.shapes import DESIGN_SHAPES, MODEL_SHAPES, SMOKE_SHAPES


@dataclass(frozen=True)
class Plan:
    """What one invocation measures."""

    device: str
    quick: bool

    @property
    def smoke(self) -> bool:
        """On a CPU only the reference backend runs: small sizes, to show that everything works."""
        return self.device == "cpu"

    @property
    def rounds(self) -> int:
        return 5 if self.smoke else 15

    @property
    def layer_shapes(self):
        if self.smoke:
            return SMOKE_SHAPES
        return DESIGN_SHAPES if self.quick else (*DESIGN_SHAPES, *MODEL_SHAPES)


def _run_cases(section: str, cases: Iterable[Case], plan: Plan) -> list[Measurement]:
    measurements = []
    for case in cases:
        measurements += run_case(section, case, rounds=plan.rounds)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    return measurements


def _ceilings(plan: Plan) -> list[Measurement]:
    return _run_cases(ceilings.SECTION, ceilings.ceiling_cases(plan.device, smoke=plan.smoke), plan)


def _memory_bound(plan: Plan) -> list[Measurement]:
    return _run_cases(
        memory_bound.SECTION, memory_bound.memory_bound_cases(plan.device, smoke=plan.smoke), plan
    )


def _gemm(plan: Plan) -> list[Measurement]:
    return _run_cases(gemm.SECTION, gemm.gemm_cases(plan.device, smoke=plan.smoke), plan)


def _layer(plan: Plan) -> list[Measurement]:
    return _run_cases(layer.SECTION, layer.layer_cases(plan.layer_shapes, plan.device), plan)


def _trainer(plan: Plan) -> list[Measurement]:
    if plan.smoke:
        return trainer.measure_trainer("smoke", steps=12)
    return trainer.measure_trainer("gpu_50m", steps=30 if plan.quick else 60)


SECTIONS: dict[str, Callable[[Plan], list[Measurement]]] = {
    ceilings.SECTION: _ceilings,
    memory_bound.SECTION: _memory_bound,
    gemm.SECTION: _gemm,
    layer.SECTION: _layer,
    trainer.SECTION: _trainer,
}

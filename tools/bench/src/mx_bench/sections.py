"""Every section of a run, in order: a name and a function that measures it."""

from collections.abc import Callable

from mx_bench import ceilings, gemm, layer, memory_bound, trainer
from mx_bench.plan import Plan, run_cases
from mx_bench.results import Measurement


def _ceilings(plan: Plan) -> list[Measurement]:
    return run_cases(ceilings.SECTION, ceilings.ceiling_cases(plan.device, smoke=plan.smoke), plan)


def _memory_bound(plan: Plan) -> list[Measurement]:
    return run_cases(
        memory_bound.SECTION, memory_bound.memory_bound_cases(plan.device, smoke=plan.smoke), plan
    )


def _gemm(plan: Plan) -> list[Measurement]:
    return run_cases(gemm.SECTION, gemm.gemm_cases(plan.device, smoke=plan.smoke, tuned=not plan.quick), plan)


def _layer(plan: Plan) -> list[Measurement]:
    return run_cases(layer.SECTION, layer.layer_cases(plan.layer_shapes, plan.device), plan)


def _trainer(plan: Plan) -> list[Measurement]:
    preset, steps = ("smoke", 8) if plan.smoke else ("gpu_50m", 30 if plan.quick else 60)
    threads = 1 if plan.smoke else None
    if plan.warm:
        return [
            m for m in trainer.measure_trainer(preset, steps=2, threads=threads, at_once=True) if m.is_failure
        ]
    return trainer.measure_trainer(preset, steps=steps, threads=threads)


SECTIONS: dict[str, Callable[[Plan], list[Measurement]]] = {
    ceilings.SECTION: _ceilings,
    memory_bound.SECTION: _memory_bound,
    gemm.SECTION: _gemm,
    layer.SECTION: _layer,
    trainer.SECTION: _trainer,
}

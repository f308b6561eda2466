"""Every case of the kernels' sections can be set up, and this project's contestants run in each (smoke sizes)."""

import pytest
from mx_bench import ceilings, gemm, memory_bound
from mx_bench.plan import Plan
from mx_bench.sections import SECTIONS

CASES = {
    ceilings.SECTION: (ceilings.ceiling_cases, 2),
    memory_bound.SECTION: (memory_bound.memory_bound_cases, 14),
    gemm.SECTION: (gemm.gemm_cases, 6),
}


@pytest.mark.parametrize("section", CASES)
def test_every_case_runs(section):
    cases, count = CASES[section]
    found = 0
    for case in cases("cpu", smoke=True):
        found += 1
        for name, call in case.contestants.items():
            if name.startswith("ours") and not isinstance(call, str):
                result = call(0)
                if case.check:
                    assert case.check(name, result) is None
    assert found == count


def test_a_plan_takes_the_known_models_only_when_it_is_whole():
    names = {quick: [s.name for s in Plan("cuda", quick).layer_shapes] for quick in (True, False)}
    assert names[True] == ["fine-grained", "wide"]
    assert set(names[False]) - set(names[True]) == {
        "Mixtral-8x7B", "DeepSeek-V3", "Qwen3-30B-A3B", "OLMoE", "gpt-oss-120b", "Llama-4-Scout",
    }  # fmt: skip
    assert list(SECTIONS) == ["ceilings", "memory-bound", "grouped GEMM", "MoE layer", "trainer"]

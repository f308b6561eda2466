"""Mutants of the shipped GEMM (mutation.py): a few here, the record's bookkeeping, all of them behind the slow marker."""

import pytest

from kernels.sm100 import mutation


def check(name: str, index: int) -> None:
    outcome = mutation.RUN.judge(name, index)
    assert outcome.caught or outcome.name in mutation.SURVIVORS[name], outcome


@pytest.mark.parametrize("name", mutation.SUBJECTS)
def test_some_mutants_are_caught(name):
    for index in (16, 160, 320):
        check(name, index)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", mutation.SUBJECTS)
def test_recorded_sample_again(name):
    for index in range(0, len(mutation.RUN.all_mutants(name)), 8):
        check(name, index)


@pytest.mark.parametrize("name", mutation.SUBJECTS)
def test_recorded_run(name):
    """The numbers in docs/sm100_gemm.md, and an argument for every survivor."""
    survivors = {outcome.name for outcome in mutation.RUN.recorded(name) if outcome.caught is None}
    assert survivors == set(mutation.SURVIVORS[name])
    assert len(mutation.RUN.recorded(name)) == 48

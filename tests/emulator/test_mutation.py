"""Mutants of the example GEMMs (mutation.py): a sample by position here, all of them behind the slow marker."""

import sys

import pytest
from emulator import mutation
from emulator.mutation_run import SCHEDULES, read, write
from ptxsim.mutate import mutants

SAMPLE = {"one_cta": range(0, 400, 25), "two_ctas": range(10, 400, 40)}
"""Of mx_kernels' GEMM none: its PTX, and with it what the arguments for survivors name, changes with the kernel."""


def _check(name: str, index: int) -> None:
    outcome = mutation.RUN.judge(name, index)
    if outcome.caught is None:
        assert mutation.RUN.argument(name, outcome.name), (
            f"{name}: {outcome.name} survives: {outcome.instruction}"
        )


@pytest.mark.parametrize("name", mutation.SUBJECTS)
def test_the_unchanged_kernel_passes(name: str) -> None:
    subject = mutation.RUN.subject(name)
    for schedule, seed in SCHEDULES if name in SAMPLE else SCHEDULES[:5]:
        assert subject.run(subject.ptx, schedule, seed) is None, (schedule, seed)


@pytest.mark.parametrize("name", SAMPLE)
def test_sampled_mutants_are_caught(name: str) -> None:
    for index in SAMPLE[name]:
        if index < len(mutation.RUN.all_mutants(name)):
            _check(name, index)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", mutation.SUBJECTS)
def test_every_mutant_is_caught_or_argued(name: str) -> None:
    for index in range(len(mutation.RUN.all_mutants(name))):
        _check(name, index)


@pytest.mark.parametrize("name", mutation.SUBJECTS)
def test_recorded_run(name: str) -> None:
    """The numbers in docs/ptxsim_evidence.md: at least 95 % caught, and an argument for every survivor."""
    outcomes = mutation.RUN.recorded(name)
    survivors = [o for o in outcomes if o.caught is None]
    assert len(survivors) <= 0.05 * len(outcomes)
    for o in survivors:
        assert mutation.RUN.argument(name, o.name), f"no argument for {o.name}: {o.instruction}"


def test_a_record_is_written_as_it_was_read_and_reported(tmp_path, monkeypatch, capsys) -> None:
    """`--report` shows the record that `--record` names."""
    copy = tmp_path / "mutation.json"
    write(copy, read(mutation.RECORD))
    assert copy.read_bytes() == mutation.RECORD.read_bytes()
    write(copy, {"one_cta": mutation.RUN.recorded("one_cta")[:3]})
    monkeypatch.setattr(sys, "argv", ["mutation", "--report", "--record", str(copy)])
    mutation.RUN.main("", mutation.judge)
    printed = capsys.readouterr().out
    assert "| one_cta | 3 |" in printed
    assert "two_ctas" not in printed


def test_rule_makes_every_kind_of_mutant() -> None:
    ptx = "\n".join(
        [
            "\t@%p1 bra \tL1;",
            "\tmbarrier.try_wait.parity.shared.b64 P1, [%r1], %r2, 10000000;",
            "\tcp.async.bulk.wait_group.read \t1;",
            "\tfence.proxy.async.shared::cta;",
            "\ttcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64 [%r1], %rs1;",
            "\tmbarrier.arrive.expect_tx.shared.b64 %rd1, [%r1], %r2;",
            "\tbar.sync \t1, 128;",
            "\tmbarrier.init.shared.b64 [%r1], %r2;",
            "\telect.sync \t%r1|%p1, -1;",
            "\ttcgen05.cp.cta_group::1.32x128b.warpx4 \t[%r1], %rd1;",
            "\ttcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale.block32 [%r1], %rd1, %rd2, %r2, [%r3], [%r4], %p1;",
            "\tadd.s32 \t%r1, %r2, %r3;",
        ]
    )
    found = [(m.line, m.kind) for m in mutants(ptx)]
    expected = {1: ["predicate"], 2: ["wait"] * 2, 3: ["wait"] * 2, 4: ["fence"], 5: ["commit"] * 2, 6: ["arrive"] * 2, 7: ["barrier"], 8: ["barrier"] * 2, 9: ["election"]}  # fmt: skip
    assert {n: [k for line, k in found if line == n] for n in expected} == expected
    assert [k for line, k in found if line == 10] == ["descriptor"] * 8
    assert [k for line, k in found if line == 11] == ["predicate", *["descriptor"] * (7 + 7 + 11 + 3)]
    assert not [k for line, k in found if line == 12]
    assert len({m.name for m in mutants(ptx)}) == len(found)

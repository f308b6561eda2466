"""mx-bench: results survive JSON, comparison sees what moved, a failing contestant does not stop the rest."""

import dataclasses
import json

import jsonschema
import pytest
from mx_bench import cli, report
from mx_bench.cases import Case, run_case
from mx_bench.compare import compare
from mx_bench.plan import Plan, run_cases
from mx_bench.results import SCHEMA, Measurement, Results, load

COPY = Measurement("ceilings", "copy", "torch copy_", 1e-3, 0.01, 15, bytes=4e9)
DENSE = Measurement("ceilings", "dense BF16", "torch.matmul", 2e-3, 0.01, 15, flop=1.6e12)


def results(*measurements: Measurement) -> Results:
    return (
        Results({"device": "test", "sms": 1})
        .with_section("ceilings", [COPY, DENSE])
        .with_section("layer", list(measurements))
    )


def test_json_round_trip(tmp_path):
    run = results(
        Measurement("layer", "case", "ours", 0.5, 0.02, 15, flop=1e12),
        Measurement("layer", "case", "x", None, note="not installed"),
    )
    run.save(tmp_path / "results.json")
    jsonschema.validate(json.loads((tmp_path / "results.json").read_text()), SCHEMA)
    assert load(tmp_path / "results.json") == run


@pytest.mark.parametrize("text", ["{", "{}", '{"schema_version": 2}'])
def test_load_refuses_what_is_not_a_result(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ValueError, match="expected mx-bench results"):
        load(tmp_path / "a.json")


def test_compare_reports_moves_beyond_noise():
    before = results(
        Measurement("layer", "a", "ours", 1.0, 0.01),
        Measurement("layer", "b", "ours", 1.0, 0.2),
        Measurement("layer", "gone", "ours", 1.0),
    )
    after = results(Measurement("layer", "a", "ours", 0.8, 0.01), Measurement("layer", "b", "ours", 0.9, 0.2))
    comparison = compare(before, after)
    moved = {move.before.case: move.ratio for move in comparison.moves if move.is_beyond_noise}
    assert moved == {"a": pytest.approx(1.25)}
    assert [m.case for m in comparison.only_before] == ["gone"]
    assert not comparison.different_machine


def test_share_of_the_ceiling_is_the_longer_roofline():
    by_bytes = Measurement("layer", "a", "ours", 2e-3, bytes=4e9, flop=1.0)
    by_flop = Measurement("layer", "a", "ours", 4e-3, bytes=1.0, flop=1.6e12)
    run = results(by_bytes, by_flop)
    assert report.floor_seconds(by_bytes, run) == pytest.approx(1e-3)
    assert report.floor_seconds(by_flop, run) == pytest.approx(2e-3)
    assert "0.50" in report.row(by_flop, run)


def test_a_failing_contestant_is_reported_and_the_rest_goes_on():
    def broken(_number: int) -> None:
        raise RuntimeError("out of luck")

    case = Case("case", {"ours": lambda _: None, "broken": broken, "absent": "not installed"}, flop=1.0)
    ours, failed, absent = run_case("section", case, rounds=2)
    assert ours.seconds is not None
    assert ours.rounds == 2
    assert failed.seconds is None
    assert failed.note == "failed: RuntimeError: out of luck"
    assert absent.note == "not installed"


def test_a_contestant_that_fails_in_the_middle_of_a_race():
    def dies(number: int) -> None:
        if number > 3:
            raise MemoryError

    ours, failed = run_case("section", Case("case", {"ours": lambda _: None, "dies": dies}), rounds=3)
    assert ours.seconds is not None
    assert (failed.seconds, failed.rounds, failed.note) == (None, 0, "failed: MemoryError")


def test_a_result_that_cannot_be_checked_is_a_failure():
    def check(name: str, result: object) -> str | None:
        assert isinstance(result, int)
        return None if result == 1 else "wrong result"

    case = Case("case", {"right": lambda _: 1, "wrong": lambda _: 2, "odd": lambda _: "one"}, check=check)
    right, wrong, odd = run_case("section", case, rounds=2)
    assert right.seconds is not None
    assert wrong.note == "failed: wrong result"
    assert odd.note == "failed: result cannot be checked: AssertionError"


def test_a_case_that_cannot_be_set_up_ends_its_section_and_keeps_the_rest():
    def cases():
        yield Case("first", {"ours": lambda _: None})
        raise MemoryError("no room")

    first, rest = run_cases("section", cases(), Plan("cpu", quick=True))
    assert first.seconds is not None
    assert rest.note == "failed: MemoryError: no room"


@pytest.fixture
def sections(monkeypatch):
    """Two quick sections in place of the real ones; returns what ran."""
    ran = []

    def section(name: str):
        def measure(plan: Plan) -> list[Measurement]:
            ran.append(name)
            if name == "second" and ran.count("second") == 1:
                raise RuntimeError("boom")
            return [Measurement(name, "case", "ours", 1e-3, 0.5, 3)]

        return measure

    monkeypatch.setattr(cli, "SECTIONS", {name: section(name) for name in ("first", "second", "third")})
    return ran


def test_a_run_from_its_start_to_its_files(sections, tmp_path, capsys):
    """A broken section is reported and the others go on; a noisy run says so; smoke sizes are called that."""
    assert cli.main(["--out", str(tmp_path)]) == 0
    run = load(tmp_path / "results.json")
    assert [m.seconds for m in run.measurements] == [1e-3, None, 1e-3]
    assert run.measurements[1].note == "failed: RuntimeError: boom"
    printed = capsys.readouterr().out
    assert "boom" in printed
    assert "noisy: 2 of 3" in printed
    if run.smoke:
        assert report.SMOKE_WARNING in printed
        assert report.SMOKE_WARNING in (tmp_path / "results.md").read_text()


def test_a_run_is_resumed_at_the_first_section_that_is_missing(sections, tmp_path, capsys):
    whole = tmp_path / "results.json"
    assert cli.main(["--out", str(tmp_path)]) == 0
    run = load(whole)
    dataclasses.replace(run, sections_done=("first",), measurements=run.measurements[:1]).save(whole)
    assert cli.main(["--out", str(tmp_path), "--resume"]) == 0
    assert sections == ["first", "second", "third", "second", "third"]
    assert [m.seconds for m in load(whole).measurements] == [1e-3] * 3


def test_compare_prints_what_moved(tmp_path, capsys):
    for name, seconds in (("a", 1.0), ("b", 0.5)):
        results(Measurement("layer", "case", "ours", seconds, 0.01)).save(tmp_path / f"{name}.json")
    assert cli.main(["compare", str(tmp_path / "a.json"), str(tmp_path / "b.json")]) == 0
    printed = capsys.readouterr().out
    assert "2.00x" in printed
    assert "3 measured in both runs, 1 moved beyond noise" in printed


def test_pages_and_charts_name_every_contestant(tmp_path):
    run = results(
        Measurement("layer", "case", "ours", 0.5, 0.5, 15, flop=1e12),
        Measurement("layer", "case", "x", None, note="not installed"),
    )
    page = report.markdown(run)
    assert "noisy" in page
    assert "not installed" in page
    assert [path.stat().st_size > 0 for path in report.charts(run, tmp_path)] == [True]

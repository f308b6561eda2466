"""mx-bench: results survive JSON, comparison sees what moved, a failing contestant does not stop the rest."""

import json

import jsonschema
import pytest
from mx_bench import report
from mx_bench.cases import Case, run_case
from mx_bench.compare import compare
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


def test_pages_and_charts_name_every_contestant(tmp_path):
    run = results(
        Measurement("layer", "case", "ours", 0.5, 0.5, 15, flop=1e12),
        Measurement("layer", "case", "x", None, note="not installed"),
    )
    page = report.markdown(run)
    assert "noisy" in page
    assert "not installed" in page
    assert [path.stat().st_size > 0 for path in report.charts(run, tmp_path)] == [True]

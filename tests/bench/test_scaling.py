"""The model of the scaling: its formulas at sizes where they can be done by hand, and the page that it wrote."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
from mx_bench.project import scaling
from mx_bench.project.scaling import (
    BIG,
    CLUSTERS,
    KINDS,
    _all_to_all_seconds,
    _ring,
    best,
    dispatch_bytes,
    scaled,
)
from mx_bench.shapes import MoEShape

SHAPE = MoEShape("by hand", 1024, 64, 32, 8, 2, "test")
WRITE_AGAIN = "uv run python -m mx_bench.project.scaling docs"
PAGE = Path(__file__).parents[2] / "docs" / "scaling.md"


def test_bytes_by_hand():
    plain = dispatch_bytes(SHAPE, "bf16")
    assert plain == {
        "counts": 8 * 8 / 1024, "x": 256, "y": 256, "dout": 256, "weights": 8, "dx": 256, "dweights": 8,
    }  # fmt: skip
    quantised = dispatch_bytes(SHAPE, "mxfp8")
    assert quantised["x"] == quantised["dout"] == 2 * (64 + 2)
    assert {k: v for k, v in quantised.items() if k not in ("x", "dout")} == {
        k: v for k, v in plain.items() if k not in ("x", "dout")
    }


def test_ring_by_hand():
    assert _ring(800.0, 1, 8) == (0, 0)
    assert _ring(800.0, 8, 8) == (700, 0)
    assert _ring(800.0, 16, 8) == (750, 50)  # half of it from the other server, by eight cards
    assert _ring(800.0, 4, 0) == (0, 600)  # one rank in each server
    assert _ring(800.0, 4, 2) == (600, 200)


def test_all_to_all_by_hand():
    cluster = CLUSTERS[1]
    inside = _all_to_all_seconds(8e9, cluster, 8)
    assert inside == pytest.approx(7e9 / (900e9 * 0.8))
    across = _all_to_all_seconds(16e9, cluster, 16)
    assert across == pytest.approx(8e9 / (50e9 * 0.9))
    assert _all_to_all_seconds(1e9, cluster, 1) == 0


def test_one_gpu_only_computes():
    for precision, dispatch in KINDS.values():
        alone = scaled(BIG, CLUSTERS[1], precision, dispatch, 1, 1)
        assert alone.efficiency == 1
        assert (alone.fsdp, alone.all_to_all) == (0, 0)


def test_without_links_in_the_way_only_latency_is_left():
    for cluster in CLUSTERS:
        free = replace(cluster, nvlink=1e18, network=1e18)
        for gpus in (8, 64, 512):
            slow = best(BIG, cluster, "mxfp8", "mxfp8", gpus)
            fast = scaled(BIG, free, "mxfp8", "mxfp8", gpus, slow.ep)
            assert slow.compute == fast.compute
            assert slow.efficiency < fast.efficiency
            assert fast.efficiency > 0.97


@pytest.mark.parametrize("part", ["traffic", "constants"])
def test_the_page_is_what_the_model_gives(part):
    page = PAGE.read_text()
    assert scaling.filled(page, {part: scaling.sections()[part]}) == page, WRITE_AGAIN


def test_the_projected_rates_of_the_page_still_hold():
    """To 15 %: the constants of the computation are fitted elsewhere."""
    page, now = PAGE.read_text(), "\n".join(scaling.sections()["scaling"])
    on_page, want = ([float(x) for x in re.findall(r"([\d.]+) M \(", text)] for text in (page, now))
    assert len(on_page) == len(want) > 50, WRITE_AGAIN
    assert on_page == pytest.approx(want, rel=0.15), WRITE_AGAIN
    assert all("projected" in line for line in now.splitlines() if line.startswith("**"))

"""The pictures of docs/block_scaling.md come from their script, and the pages point at pictures that are there."""

import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_the_script_draws_every_picture_of_its_page(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location(
        "block_scaling", ROOT / "tools" / "docs" / "block_scaling.py"
    )
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.main(tmp_path)
    drawn = {path.name for path in tmp_path.iterdir()}
    page = (ROOT / "docs" / "block_scaling.md").read_text()
    assert drawn == set(re.findall(r"\(images/(\S+)\)", page))


@pytest.mark.parametrize("page", ["block_scaling.md", "performance.md", "projection.md"])
def test_links_of_a_page_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / "docs" / page).read_text()):
        assert (ROOT / "docs" / target).exists(), target

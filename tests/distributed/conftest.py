"""What the tests with several processes train on."""

from pathlib import Path

import pytest
import torch
from trainer.conftest import _cache as _cache


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 40,000 bytes of real code."""
    path = tmp_path_factory.mktemp("text") / "a.txt"
    path.write_text(Path(torch.nn.functional.__file__).read_text()[:40_000])
    return path

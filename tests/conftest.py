"""Every test process: one torch thread (xdist gives the parallelism), fixed seeds, one hypothesis profile."""

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("project", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("project")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

"""pytest fixtures. Load with `pytest_plugins = ["ptxsim.pytest_plugin"]`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from . import api


@pytest.fixture
def emulated_gpu() -> Iterator[Callable[..., api.GPU]]:
    """Call it with the arguments of `ptxsim.gpu`: it enters an emulated GPU for the rest of the test and returns it."""
    with ExitStack() as stack:

        def enter(arch: str = "sm_100a", **options: Any) -> api.GPU:
            return stack.enter_context(api.gpu(arch, **options))

        yield enter


@pytest.fixture(params=["early", "late", "random"])
def schedule(request: pytest.FixtureRequest) -> str:
    """Each of the three main schedules in turn."""
    return request.param

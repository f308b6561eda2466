"""Other tiles than those that a config module would choose: what the races of tiles are made of, and how a race is started."""

import argparse
from collections.abc import Generator
from contextlib import contextmanager
from types import ModuleType

import torch
from mx_kernels import arch

from mx_bench.cases import Call


@contextmanager
def forced(config: ModuleType, **choices: object) -> Generator[None]:
    """In this block these functions of a config module (`choose_tile`, `quantize_tile`, ...) give these values, whatever the sizes."""
    before = {name: getattr(config, name) for name in choices}
    for name, choice in choices.items():
        setattr(config, name, lambda *_, choice=choice: choice)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(config, name, function)


def with_forced(call: Call, config: ModuleType, **choices: object) -> Call:
    """A contestant for which these are forced at every call."""

    def forced_call(number: int) -> object:
        with forced(config, **choices):
            return call(number)

    return forced_call


def parse_on_gpu(parser: argparse.ArgumentParser, *targets: str) -> argparse.Namespace:
    """The arguments; ends with a line in words, and status 2, where there is no GPU of one of these targets ("sm_90a", ...; none: any)."""
    args = parser.parse_args()
    found = arch.target_of(torch.device("cuda", 0)) if torch.cuda.is_available() else None
    if found is None or (targets and found not in targets):
        wanted = " or ".join(targets) or "Hopper or data-centre Blackwell"
        parser.exit(2, f"{parser.prog}: needs a GPU with kernels ({wanted}), found {_device()}\n")
    return args


def _device() -> str:
    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"

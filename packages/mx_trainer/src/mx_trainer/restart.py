"""Runs that torchrun starts again after a failure (`torchrun --max-restarts N`): they go on from their newest checkpoint."""

import os
from pathlib import Path

from mx_trainer.checkpoint import list_checkpoints, run_dir_of
from mx_trainer.config import Config
from mx_trainer.errors import ConfigError
from mx_trainer.parallel import Parallel


def started_again(parallel: Parallel) -> bool:
    """Whether torchrun has started this run again. All ranks call it: each machine counts only the failures of its own."""
    return parallel.any(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) > 0)


def checkpoint_to_continue(cfg: Config, resumed: Path | None, again: bool) -> Path | None:
    """The checkpoint to go on from: the one asked for; in a run started again, the newest. None begins anew.

    Raises:
        ConfigError: where a restart could not find the run, or would take another checkpoint than the one asked for.
    """
    run_dir = run_dir_of(resumed) if resumed else Path(cfg.out) / cfg.name
    newest = list_checkpoints(run_dir / "checkpoints")[-1:]
    if again:
        return newest[0] if newest else None
    if int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0")):
        if resumed is None and not cfg.name:
            raise ConfigError("--max-restarts needs a --name, by which a restart finds the run, got none")
        if resumed is not None and newest != [resumed]:
            raise ConfigError(
                f"--max-restarts goes on from the newest checkpoint ({newest[0]}), got --resume {resumed}"
            )
    return resumed

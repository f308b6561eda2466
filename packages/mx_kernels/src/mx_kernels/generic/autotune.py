"""Tiles chosen by measuring: off unless `MX_AUTOTUNE=1` (read once) or inside `with autotune.enabled():`.

The first GEMM of a problem class on a GPU runs every candidate on the caller's operands, into a scratch result, and waits
for the device. The fastest is kept in memory and on disk, in a file named as jit.py names a compiled kernel's: by class
and GPU, under the DSL's version, the target and the hash of the kernel sources. While a CUDA graph is captured nothing
can be measured; what is known is used, and else the estimate's tile.

Blackwell's tiles all add along K in the same order, so there the choice changes no bit of a result.
"""

import contextlib
import functools
import json
import logging
import os
import statistics
from collections.abc import Callable, Generator, Hashable, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from mx_kernels import arch
from mx_kernels.generic.gemm import GemmSizes
from mx_kernels.paths import write_whole
from mx_kernels.problem import GemmProblem

T = TypeVar("T")
#: Seconds that the function takes on the device.
Timer = Callable[[Callable[[], None], torch.device], float]

_LOG = logging.getLogger(__name__)
ROUNDS = 7
FLUSH_BYTES = 256 << 20  # more than any L2: a training step's operands come from memory

_timer: Timer | None = None
_chosen: dict[tuple, object] = {}


def device_seconds(run: Callable[[], None], device: torch.device) -> float:
    """Median of ROUNDS runs between events, with L2 overwritten before each; two more in front are not counted."""
    with torch.cuda.device(device):  # events belong to the current one
        flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=device)
        seconds = []
        for _ in range(2 + ROUNDS):
            flush.zero_()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
    return statistics.median(seconds[2:])


@contextlib.contextmanager
def enabled(timer: Timer = device_seconds) -> Generator[None]:
    """Choose by measuring in this block. A test passes a timer of its own, which may then be asked about any device."""
    global _timer
    before, _timer = _timer, timer
    try:
        yield
    finally:
        _timer = before


@functools.cache
def _in_environment() -> bool:
    return os.environ.get("MX_AUTOTUNE") == "1"


def active() -> bool:
    """Whether tiles are to be chosen by measuring."""
    return _timer is not None or _in_environment()


def rows_class(rows: int) -> int:
    """Rows up to the next power of two are one class: their number may change at every step."""
    return 1 << max(rows - 1, 0).bit_length()


def tuned_tile(
    problem: GemmProblem,
    sizes: GemmSizes,
    out: Tensor,
    candidates: Callable[[], Sequence[T]],
    start: Callable[[T, Tensor], None],
    default: T,
) -> T:
    """The tile for a GEMM: `default`, or the fastest of the candidates where tiles are chosen by measuring.

    Args:
        problem: what the kernel is made for.
        sizes: of this call.
        out: its result, which is not written.
        candidates: gives the tiles to measure.
        start: launches the GEMM with a tile into a tensor like `out`.
        default: the estimate's tile.
    """
    if not active():
        return default
    scratch = functools.cache(lambda: torch.empty_like(out))
    problem_class = (problem, rows_class(sizes.rows), *sizes[1:])
    return best(problem_class, out.device, candidates, lambda tile: start(tile, scratch()), default)


def best(
    problem_class: Hashable,
    device: torch.device,
    candidates: Callable[[], Sequence[T]],
    run: Callable[[T], None],
    default: T,
) -> T:
    """The candidate that was the fastest for this class on this GPU, measured now if nobody has yet.

    Args:
        problem_class: a value whose repr tells it from every other one.
        device: where to run.
        candidates: gives values with a repr of their own (tiles), where they are wanted.
        run: launches one, which may fail (it is then left out).
        default: what to take where nothing can be measured.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "emulated"
    key = (problem_class, name, arch.target_of(device), arch.num_sms(device))
    if (known := _chosen.get(key)) is not None:
        return known  # type: ignore[return-value]
    path = _path(key, str(arch.target_of(device)))
    tiles = candidates()
    found = _read(path, tiles)
    if found is None:
        timer = _timer or device_seconds
        if timer is device_seconds and (device.type != "cuda" or torch.cuda.is_current_stream_capturing()):
            return default
        seconds = _measure(tiles, run, device, timer)
        if not seconds:
            return default
        found = min(seconds, key=seconds.__getitem__)
        _LOG.info("%r: %r of %d candidates", problem_class, found, len(seconds))
        _write(path, key, found, seconds)
    _chosen[key] = found
    return found


def _measure(
    candidates: Sequence[T], run: Callable[[T], None], device: torch.device, timer: Timer
) -> dict[T, float]:
    seconds = {}
    for candidate in candidates:
        try:
            seconds[candidate] = timer(functools.partial(run, candidate), device)
        except RuntimeError as error:  # out of memory, or a launch that the driver refuses
            _LOG.warning("%r cannot be measured: %s", candidate, error)
    return seconds


def _path(key: Hashable, target: str) -> Path | None:
    from mx_kernels import jit

    return jit.disk_path("autotune", key, target, ".json")


def _read(path: Path | None, candidates: Sequence[T]) -> T | None:
    """What is recorded, if it is still a candidate."""
    if path is None or not path.exists():
        return None
    try:
        recorded = json.loads(path.read_text())["chosen"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        _LOG.warning("%s cannot be read (%s); measuring again", path, error)
        return None
    return {repr(candidate): candidate for candidate in candidates}.get(recorded)


def _write(path: Path | None, key: Hashable, chosen: object, seconds: dict) -> None:
    if path is None:
        return
    record = {"class": repr(key), "chosen": repr(chosen), "seconds": {repr(c): s for c, s in seconds.items()}}
    try:
        write_whole(path, lambda part: part.write_text(json.dumps(record, indent=1)))
    except OSError as error:
        _LOG.warning("%s cannot be written (%s); the next process measures again", path, error)

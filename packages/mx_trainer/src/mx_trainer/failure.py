"""When one rank fails, every rank stops and says which one and why; torchrun then starts all of them again.

What torch does: torchrun sees a process die, ends the others and reports the exit code; a collective fails or, after the process
group's timeout, gives up. What is missing, and done here, is to find out *whom* the others wait for, on every machine and also
when nobody died. Each process has a thread that writes a heartbeat into the store that the process group met in: how many
collectives it has entered (torch counts them), and where in the code it is. Rank 0's thread reads all of them, every other one
rank 0's. A failure is a key in that store, written once, and everyone leaves with its text:

- a rank that ends with an exception writes it there itself (out of memory, for example);
- a process that is gone from the machine of the one who watches it: at the next look, a second later;
- no heartbeat for `heartbeat_timeout`: the process was stopped, or its machine or network is gone;
- no collective anywhere for `stall_timeout`: the ranks that entered the fewest are those that the others wait for.
"""

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import uuid
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from mx_trainer.config import ParallelConfig
from mx_trainer.errors import RankError
from mx_trainer.parallel import Parallel

_INTERVAL = 1.0
"""Seconds between two heartbeats."""
_GRACE = 3.0
"""Seconds that a process has for leaving by itself, once a failure is known, before its thread ends it."""


_TERMINATED = 128 + signal.SIGTERM


class Watch:
    """Context of a distributed run: inside, every rank learns of every rank's failure. Nothing in a single process.

    Leaving it normally waits for the other ranks. An exception that comes from another rank's failure leaves as a
    RankError that names the rank. A process that cannot leave, as it waits in a collective, is ended with exit code 1.
    """

    def __init__(self, parallel: Parallel, cfg: ParallelConfig):
        self._parallel, self._cfg = parallel, cfg
        self._main_thread = threading.get_ident()
        self._over = threading.Event()
        self._known = threading.Event()
        self._failure = ""
        """What stopped the run, once it is known."""

    def __enter__(self) -> "Watch":
        if not self._parallel.distributed:
            return self
        rank, world = self._parallel.rank, self._parallel.world
        self._groups = _groups(self._parallel)
        shared = dist.distributed_c10d._get_default_store()
        # A connection of its own: the main thread may be waiting in the other.
        self._store = dist.PrefixStore("watch", shared.clone())
        self._store.set_timeout(timedelta(seconds=self._cfg.heartbeat_timeout))
        self._store.set(f"who/{rank}", f"{socket.gethostname()} {os.getpid()} {_process_table()}")
        self._beat(0)
        self._parallel.barrier()  # every rank's keys are there
        self._who = [
            text.decode().split() for text in self._store.multi_get([f"who/{r}" for r in range(world)])
        ]
        self._thread = threading.Thread(target=self._run, name="mx-watch", daemon=True)
        self._thread.start()
        self._on_sigterm(_end)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._parallel.distributed:
            return
        self._on_sigterm(signal.SIG_IGN)  # torchrun sends it to all once one has died: speak first, then end
        try:
            if error is None:
                self._leave_together()
                self._on_sigterm(signal.SIG_DFL)
            elif _from_another_rank(error):
                self._name_rank(error, self._cfg.heartbeat_timeout + 3 * _INTERVAL)
            elif isinstance(error, SystemExit) and error.code == _TERMINATED:
                self._name_rank(error, 3 * _INTERVAL)
            else:
                _tell_torchrun(error)
                with contextlib.suppress(dist.DistError):
                    self._publish(self._parallel.rank, _in_words(error))
        finally:
            self._over.set()
            # A thread inside the store while the interpreter ends would abort the process.
            self._thread.join(_GRACE)

    def _leave_together(self) -> None:
        try:
            self._parallel.barrier()
        except Exception as error:
            self._name_rank(error, self._cfg.heartbeat_timeout + 3 * _INTERVAL)
            raise

    def _name_rank(self, error: BaseException, patience: float) -> None:
        """Raise what the watching threads find out within `patience` seconds about another rank's failure."""
        self._known.wait(patience)
        if self._failure:
            named = RankError(self._failure)
            _tell_torchrun(named)
            raise named from error

    def _on_sigterm(self, handler: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._failure = self._watch()
        except dist.DistError as error:
            if self._over.wait(2 * _INTERVAL):
                return  # the run has ended, and rank 0's store with it
            self._failure = (
                f"the store on {os.environ.get('MASTER_ADDR')} does not answer: rank 0, its launcher or its machine "
                f"is gone ({error})"
            )
        self._known.set()
        if self._failure and not self._over.wait(_GRACE):
            print(f"mx-train: error: {self._failure}", file=sys.stderr, flush=True)
            _tell_torchrun(RankError(self._failure))
            os._exit(1)

    def _watch(self) -> str:
        """Send and look at heartbeats until there is a failure; "" if the run ends without one."""
        judge = _Judge(self._parallel, self._cfg, self._who)
        beats = 0
        while not self._over.wait(_INTERVAL):
            beats += 1
            self._beat(beats)
            if self._store.check(["failure"]):
                return self._store.get("failure").decode()
            heartbeats = self._store.multi_get([f"beat/{rank}" for rank in judge.watched])
            verdict = judge.look([value.decode() for value in heartbeats])
            if verdict:
                return self._publish(*verdict)
        return ""

    def _beat(self, count: int) -> None:
        collectives = sum(map(_collectives, self._groups))
        self._store.set(f"beat/{self._parallel.rank}", f"{count} {collectives} {_where(self._main_thread)}")

    def _publish(self, rank: int, what: str) -> str:
        """Make it known to all ranks; the first failure stands, and is returned."""
        host, pid, _ = self._who[rank]
        return self._store.compare_set(
            "failure", "", f"rank {rank} (process {pid} on {host}) {what}"
        ).decode()


class _Judge:
    """Tells from heartbeats which rank has failed, by this process's clock."""

    def __init__(self, parallel: Parallel, cfg: ParallelConfig, who: list[list[str]]):
        self.watched = list(range(parallel.world)) if parallel.is_main else [0]
        """The ranks whose heartbeats `look` wants."""
        self._cfg, self._who, self._rank = cfg, who, parallel.rank
        now = time.monotonic()
        self._beats = [("", now)] * len(self.watched)
        self._progress: tuple[list[int], float] = ([], now)

    def look(self, values: list[str]) -> tuple[int, str] | None:
        """From the current heartbeats, "COUNT COLLECTIVES PLACE" each, to a failed rank and what is wrong with it."""
        now = time.monotonic()
        parts = [value.split(" ", 2) for value in values]
        for i, (rank, value) in enumerate(zip(self.watched, values, strict=True)):
            if value != self._beats[i][0]:
                self._beats[i] = (value, now)
            _, pid, table = self._who[rank]
            if table == self._who[self._rank][2] and not _is_alive(int(pid)):
                return rank, f"has died, last seen at {parts[i][2]}"
            silent = now - self._beats[i][1]
            if silent > self._cfg.heartbeat_timeout:
                return rank, (
                    f"has not been heard of for {silent:.0f} s, last seen at {parts[i][2]}: "
                    "stopped, killed, or its machine or network is gone"
                )
        counts = [int(count) for _, count, _ in parts]
        if counts != self._progress[0]:
            self._progress = (counts, now)
        waited = now - self._progress[1]
        if self._rank != 0 or waited <= self._cfg.stall_timeout:
            return None
        fewest = min(counts)
        behind = [rank for rank, count in zip(self.watched, counts, strict=True) if count == fewest]
        what = f"hangs at {parts[behind[0]][2]}: no collective for {waited:.0f} s"
        if len(behind) == len(counts):
            return behind[0], f"{what}, and no rank has entered fewer than another"
        others = f", as do ranks {behind[1:]}" if len(behind) > 1 else ""
        return behind[0], f"{what}, which the others wait for{others}"


# --- what can be known of a process -----------------------------------------------------------------------------------


def _end(*_: object) -> NoReturn:
    """SIGTERM outside the training loop (which saves first): leave through `Watch.__exit__`, which may know why it came."""
    raise SystemExit(_TERMINATED)


def _groups(parallel: Parallel) -> list[dist.ProcessGroup]:
    meshes = [mesh for mesh in (parallel.world_mesh, parallel.expert_mesh) if mesh is not None]
    groups = [dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())]
    return list({id(group): group for group in groups if group is not None}.values())


def _collectives(group: dist.ProcessGroup) -> int:
    """Collectives that this process has entered in a group, of all its backends."""
    backends = [group._get_backend(device) for device in group._device_types]
    return sum(b._get_sequence_number_for_group() for b in backends)  # pyrefly: ignore[missing-attribute]


def _where(thread: int) -> str:
    """Line and function of this package in which a thread is."""
    frame = sys._current_frames().get(thread)
    here = str(Path(__file__).parent)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(here) and code.co_filename != __file__:
            return f"{Path(code.co_filename).name}:{frame.f_lineno} {code.co_name}"
        frame = frame.f_back
    return "an unknown place"


def _process_table() -> str:
    """Equal for processes that see each other's ids: of one machine, and of one container of it. Host names may be equal."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{uuid.getnode():x}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


def _from_another_rank(error: BaseException) -> bool:
    """Whether an exception, or what caused it, is a failed communication: another rank's failure, seen from here."""
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, dist.DistError) or (isinstance(seen, RuntimeError) and "gloo" in str(seen)):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def _in_words(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        return f"is out of memory: {text or type(error).__name__}"
    return f"failed: {type(error).__name__}: {text}"


def _tell_torchrun(error: BaseException) -> None:
    """Write the error file that torchrun reports from."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        with contextlib.suppress(OSError):
            get_error_handler().record_exception(error)

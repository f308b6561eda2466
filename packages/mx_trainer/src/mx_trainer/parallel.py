"""Several processes: who this one is, which device it has, and the meshes that parameters are spread over.

`torchrun --nproc-per-node N -m mx_trainer ...` starts N processes. Each computes its own part of every batch, so all of them
together are the data-parallel *world*; dense parameters are whole on every rank, or sharded over the world (FSDP). With expert
parallelism, groups of `ep` neighbouring ranks share one copy of the experts: rank r holds part r % ep of them, and the
world // ep ranks that hold the same part are replicas or, with FSDP, shard it between them.

One process is the same thing with a world of 1; nothing here then touches torch.distributed.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from mx_trainer.config import Config
from mx_trainer.errors import ConfigError
from mx_trainer.precision import resolve_device
from mx_trainer.rendezvous import store_of_this_life

T = TypeVar("T")


@dataclass(frozen=True)
class Parallel:
    """This process's place among all."""

    device: torch.device
    rank: int = 0
    world: int = 1
    world_mesh: DeviceMesh | None = None
    """("world",): all ranks; dense parameters are sharded over it. None in a single process."""
    expert_mesh: DeviceMesh | None = None
    """("dp", "ep"): rank r stands at (r // ep, r % ep), so the ranks that exchange rows are neighbours; the experts are
    sharded over "ep", and with FSDP each part over "dp"."""

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and shows progress."""
        return self.rank == 0

    @property
    def distributed(self) -> bool:
        """Whether it has joined others; `mx-train scaling` also joins a world of one."""
        return self.world_mesh is not None

    @property
    def ep(self) -> int:
        """Ranks that share one copy of the experts."""
        return 1 if self.expert_mesh is None else self.expert_mesh.size(1)

    def describe(self) -> str:
        """Where this runs, in words."""
        if not self.distributed:
            return str(self.device)
        return f"{self.world} processes ({self.device.type}), {self.ep} to a copy of the experts"

    def sum_(self, x: Tensor) -> Tensor:
        """Add up x over all ranks, in place."""
        if self.distributed:
            dist.all_reduce(x)
        return x

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some rank. Waits for all of them."""
        return bool(self.sum_(torch.tensor(int(flag), device=self.device)).item())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        self.any(False)

    def on_main(self, work: Callable[[], T]) -> T:
        """Rank 0's result of `work`, on every rank; what it raises is raised on every rank."""
        if not self.distributed:
            return work()
        box: list[Any] = [None, None]
        if self.is_main:
            try:
                box[0] = work()
            except Exception as error:
                box[1] = error
        dist.broadcast_object_list(box, src=0, device=self.device)
        if box[1] is not None:
            raise box[1]
        return box[0]


def is_fsdp_sharded(x: Tensor) -> bool:
    """Whether FSDP has sharded this parameter or gradient: a DTensor may also be one rank's experts, whole."""
    return getattr(x, "device_mesh", None) is not None and x.device_mesh.mesh_dim_names != ("ep",)


def launched_world() -> int:
    """How many processes torchrun (or another launcher that sets its variables) has started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def init_parallel(cfg: Config) -> Parallel:
    """Join the other processes if there are any; a single one gets its device and nothing else.

    Raises:
        ConfigError: if the world, the batch and `cfg.parallel` do not fit together, or a device is not there.
    """
    if launched_world() > 1:
        return join_processes(cfg)
    check_world(cfg, 1)
    return Parallel(resolve_device(cfg.device))


def join_processes(cfg: Config) -> Parallel:
    """Join the processes that MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE and LOCAL_RANK tell of, as torchrun sets them: NCCL
    between GPUs, gloo between CPUs.

    Raises:
        ConfigError: as `init_parallel`.
    """
    world, ep = launched_world(), cfg.parallel.ep
    check_world(cfg, world)
    rank, local_rank = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    device = resolve_device(cfg.device)
    if device.type == "cuda":
        if device.index is not None:
            raise ConfigError(
                f"--device must be auto, cpu or cuda: each of {world} processes has its own GPU, got {cfg.device}"
            )
        device = resolve_device(f"cuda:{local_rank}")
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        # The last resort: see failure.py.
        timeout = timedelta(seconds=max(600.0, 2 * cfg.parallel.stall_timeout))
        store = store_of_this_life(rank, world, timeout)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)
    return Parallel(
        device=device,
        rank=rank,
        world=world,
        world_mesh=init_device_mesh(device.type, (world,), mesh_dim_names=("world",)),
        expert_mesh=init_device_mesh(device.type, (world // ep, ep), mesh_dim_names=("dp", "ep")),
    )


def check_world(cfg: Config, world: int) -> None:
    """Refuse (ConfigError) what cannot be divided among `world` processes."""
    ep = cfg.parallel.ep
    if world % ep:
        raise ConfigError(f"--ep must divide the number of processes, got {ep} and {world}")
    if cfg.optim.batch % world:
        raise ConfigError(
            f"--batch counts the sequences of all processes and must be a multiple of their number {world}, "
            f"got {cfg.optim.batch}"
        )

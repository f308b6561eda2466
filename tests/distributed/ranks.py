"""Run a function in several gloo processes, once for as many scenarios as it likes: starting them is what costs."""

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


def fork_server() -> multiprocessing.context.ForkServerContext:
    """Where processes are forked from: it has imported, once, what takes each of them seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["mx_trainer.launch", "mx_trainer.shards", "mx_trainer.expert_parallel", "torch.distributed.fsdp"]
    )
    return context


def _rank_main(rank: int, world: int, port: int, work: Callable[..., Any], args: tuple, queue) -> None:
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
    }
    torch.set_num_threads(1)
    try:
        result = work(*args)
    except BaseException:
        queue.put((rank, traceback.format_exc(), None))
        raise
    queue.put((rank, None, result))
    if dist.is_initialized():
        dist.destroy_process_group()


def run_ranks(world: int, work: Callable[..., Any], *args: Any) -> list[Any]:
    """What `work(*args)`, a function of a module, returns on each of `world` ranks; fails with the first traceback."""
    context = fork_server()
    queue = context.SimpleQueue()
    processes = [
        context.Process(target=_rank_main, args=(rank, world, port, work, args, queue), daemon=True)
        for port in [_free_port()]
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    results: list[Any] = [None] * world
    try:
        for _ in range(world):
            rank, error, result = _next(queue, processes)
            if error is not None:
                raise AssertionError(f"rank {rank} of {world}:\n{error}")
            results[rank] = result
    finally:
        for process in processes:
            if any(r is None for r in results):
                process.kill()
            process.join()
    return results


def _next(queue: Any, processes: list[Any]) -> tuple[int, str | None, Any]:
    """What a rank has to say; a rank that ends without a word, killed for example, is an error too."""
    while queue.empty():
        dead = [rank for rank, process in enumerate(processes) if process.exitcode]
        if dead and queue.empty():
            raise AssertionError(f"rank {dead[0]} ended with {processes[dead[0]].exitcode}, without a result")
        time.sleep(0.005)
    return queue.get()


def make_trainer(cfg: Any) -> Any:
    """A trainer of this configuration and its corpus, for a process that has not imported what it takes."""
    from mx_trainer.data import load_corpus
    from mx_trainer.trainer import Trainer, resolve_vocab

    corpus = load_corpus(cfg.data)
    return Trainer(resolve_vocab(cfg, corpus), corpus)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]

"""What a run's future depends on, by names that do not depend on how it is spread over processes.

Parameters, buffers and moments are named as in the model. Under FSDP or expert parallelism they are DTensors, of which each
process holds a shard. Random generators belong to a process: they are restored where as many processes go on as there were,
on the same kind of device; otherwise they are seeded anew from the run's seed, the step and the rank.
"""

import hashlib

import torch
from torch import Tensor, nn

from mx_trainer.checkpoint import State
from mx_trainer.parallel import Parallel

_MOMENTS = ("exp_avg", "exp_avg_sq")


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's moments and step counts as {"PARAMETER.exp_avg": ...}: the live tensors; none before the first step."""
    return {
        f"{name}.{key}": tensor
        for name, parameter in model.named_parameters()
        for key, tensor in optimizer.state.get(parameter, {}).items()
    }


def set_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Tensor]) -> None:
    """Take over the tensors of `optimizer_state`. Rates and decay come from the configuration."""
    optimizer.state.clear()
    for name, parameter in model.named_parameters():
        own = {key: state[f"{name}.{key}"] for key in ("step", *_MOMENTS) if f"{name}.{key}" in state}
        if own:
            optimizer.state[parameter] = own


def random_state(parallel: Parallel) -> dict[str, dict[str, Tensor]]:
    """This process's generators, as the part of the state that bears its rank."""
    state = {"cpu": torch.get_rng_state()}
    if parallel.device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(parallel.device)
    return {f"rng{parallel.rank}": state}


def set_random_state(state: State, seed: int, parallel: Parallel) -> None:
    """Restore this process's generators, or seed them where the state has none for it."""
    own = state.get(f"rng{parallel.rank}")
    if own is None:
        seed_anew(seed, state["step"], parallel)
        return
    torch.set_rng_state(own["cpu"])
    if "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"], parallel.device)


def seed_anew(seed: int, step: int, parallel: Parallel) -> None:
    """Seed this process's generators, for no other rank, step or number of processes alike."""
    words = f"{seed} {step} {parallel.rank} of {parallel.world}"
    torch.manual_seed(int.from_bytes(hashlib.sha256(words.encode()).digest()[:7], "big"))


def empty_state(model: nn.Module, parallel: Parallel, values: State) -> State:
    """Tensors to load a checkpoint with these plain values into: this process's shards of everything."""
    trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    state: State = {
        "model": {name: torch.empty_like(tensor) for name, tensor in model.state_dict().items()},
        "optimizer": {f"{name}.step": torch.zeros((), device=p.device) for name, p in trained.items()}
        | {f"{name}.{key}": torch.empty_like(p) for name, p in trained.items() for key in _MOMENTS},
    }
    if (values.get("world"), values.get("device")) == (parallel.world, parallel.device.type):
        state |= random_state(parallel)
    return state

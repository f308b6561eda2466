"""Where processes meet when torchrun may start them again.

Torchrun's store outlives the processes, so one that is started again finds the addresses of those that are gone, and may take them
for its peers' (pytorch issue 135712). How often it was started tells the lives apart on one machine only. So the
processes agree on a name for each life, and keep all of its keys under that name.
"""

import hashlib
import time
import uuid
from datetime import timedelta

import torch.distributed as dist


def store_of_this_life(rank: int, world: int, timeout: timedelta) -> dist.Store:
    """The store at MASTER_ADDR and MASTER_PORT, under a prefix of which no other life of this run knows.

    Each process writes a token of its own, and for the tokens that it sees there, a hash. Old tokens may be among them, but
    then not all hashes are the same: whoever's token is missing has not written that hash.
    """
    store, rank, world = next(dist.rendezvous("env://", rank, world, timeout=timeout))
    deadline = time.monotonic() + timeout.total_seconds()
    store.set(f"mx/token/{rank}", uuid.uuid4().hex)
    while time.monotonic() < deadline:
        tokens = store.multi_get([f"mx/token/{r}" for r in range(world)])  # waits until all are there
        name = hashlib.sha256(b" ".join(tokens)).hexdigest()
        store.set(f"mx/seen/{rank}", name)
        if set(store.multi_get([f"mx/seen/{r}" for r in range(world)])) == {name.encode()}:
            return dist.PrefixStore(name, store)
        time.sleep(0.02 + 0.002 * world)
    raise TimeoutError(f"rank {rank}: not all of {world} processes came within {timeout}")

"""Lives of a run in one store, which keeps what earlier lives wrote: nobody may meet the dead."""

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from mx_trainer.rendezvous import store_of_this_life


@pytest.fixture
def launcher(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """Torchrun's store, of which every process is a client."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    return store


def one_life(world: int, order: list[int]) -> None:
    """Start `world` ranks in this order, some time apart: each writes where it came out, and reads what all have written."""

    def process(rank: int) -> None:
        store = store_of_this_life(rank, world, timedelta(seconds=30))
        assert not store.check([f"rank{rank}"])  # of no life before
        store.set(f"rank{rank}", str(rank))
        assert store.multi_get([f"rank{r}" for r in range(world)]) == [str(r).encode() for r in range(world)]

    with ThreadPoolExecutor(world) as pool:
        futures = []
        for rank in order:
            futures.append(pool.submit(process, rank))
            time.sleep(0.15)
        for future in futures:
            future.result()


def test_no_life_sees_another(launcher):
    for life in [(3, [0, 1, 2]), (3, [0, 2, 1]), (3, [2, 1, 0]), (2, [1, 0]), (3, [0, 1, 2])]:
        one_life(*life)


def test_a_rank_that_does_not_come(launcher):
    one_life(2, [0, 1])
    with pytest.raises(TimeoutError, match="rank 0: not all of 2 processes came within 0:00:01"):
        store_of_this_life(0, 2, timedelta(seconds=1))

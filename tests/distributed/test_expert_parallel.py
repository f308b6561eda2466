"""One layer whose experts are spread over ranks: bitwise that of one process, with the bytes that the formula says."""

import pytest
import torch
import torch.distributed as dist
from mx_kernels import MXExperts
from mx_trainer.exchange import Traffic, plan_exchange, row_bytes
from mx_trainer.expert_parallel import ParallelExperts
from torch import Tensor

from . import layer_cases
from .ranks import run_ranks


def layers(experts_per_rank: list[int]) -> list[str]:
    dist.init_process_group("gloo")
    return layer_cases.check_all("cpu", experts_per_rank)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_layers_are_those_of_one_process(world):
    for wrong in run_ranks(world, layers, [1, 2, 4]):
        assert not wrong, "\n".join(wrong)


def test_rows_cost_what_the_table_says():
    bf16, mxfp8 = row_bytes(2048, 2, False), row_bytes(2048, 2, True)
    assert sum(bf16.values()) == 8 * 2048 + 8
    assert sum(mxfp8.values()) == 2 * (2048 + 64) + 2 * 4096 + 8
    assert mxfp8["x"] / bf16["x"] == 0.515625


# --- a limited capacity -----------------------------------------------------------------------------------------------


def with_little_room() -> list[tuple[int, int, bool]]:
    """Rows dropped, as counted and as expected, and whether the rest is what one process makes of the rest."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    results = []
    for chosen in ([0, 1, 2, 3], [0, 1]):
        whole = MXExperts(4, 32, 32, recipe="mxfp8", device="cpu")
        for p in whole.parameters():
            dist.broadcast(p.data, 0)
        layer = ParallelExperts(whole, mesh, quantized=False, padded=True, capacity=1.25)
        x, weights = torch.randn(40, 32), torch.rand(40, 2)
        ids = torch.tensor(chosen)[torch.rand(40, len(chosen)).argsort(1)[:, :2]]
        capacity = layer.rows_per_rank(80, 2)
        assert capacity == 50
        kept = keep_first(ids, capacity)
        out = layer(x, ids, weights)
        results.append((int(layer.dropped), int((kept < 0).sum()), torch.equal(out, whole(x, kept, weights))))
    return results


def keep_first(ids: Tensor, capacity: int) -> Tensor:
    """Ids with -1 for those beyond a rank's capacity, experts and tokens in ascending order."""
    kept = ids.clone()
    for rank in (0, 1):
        choices = sorted(
            (int(e), t, j) for t, row in enumerate(ids) for j, e in enumerate(row) if e // 2 == rank
        )
        for _, t, j in choices[capacity:]:
            kept[t, j] = -1
    return kept


def test_rows_without_room_are_dropped_and_counted():
    for rank in run_ranks(2, with_little_room):
        (even, even_want, even_same), (skewed, skewed_want, skewed_same) = rank
        assert (even, even_same) == (even_want, True)
        assert (skewed, skewed_same) == (30, True)
        assert skewed_want == 30


# --- what waits for the device ----------------------------------------------------------------------------------------


def plan_without_values(padded: bool) -> str:
    """A plan made of tensors that have no values: whatever the host wants to know of them is an error, by name."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    with FakeTensorMode():
        ids = torch.zeros(64, 2, dtype=torch.int64)
        try:
            plan_exchange(ids, 8, 64 if padded else None, dist.group.WORLD, Traffic(), "auto")
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return ""


def test_only_the_unpadded_exchange_reads_from_the_device():
    assert run_ranks(1, plan_without_values, True) == [""]
    assert (
        "tolist" in run_ranks(1, plan_without_values, False)[0]
        or "DataDependent" in run_ranks(1, plan_without_values, False)[0]
    )

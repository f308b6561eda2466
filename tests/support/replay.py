"""CUDA-graph replay in the emulator, and its rule that the host reads nothing while work is queued."""

import contextlib
import functools
from collections.abc import Callable, Iterator

import ptxsim
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

MX = "mx"  # namespace of the ops whose kernels are recorded one by one
ALLOCATE = (
    (torch, "empty"),
    (torch, "empty_strided"),
    (torch, "empty_like"),
    (torch.Tensor, "new_empty"),
)


class Tape(TorchDispatchMode):
    """Records what a CUDA graph would hold: kernel launches with their arguments, and torch's own ops.

    Everything allocated while recording stays, as in a graph's memory pool; `replay` runs the same launches and ops on the
    same addresses. What the host computed from values while recording is frozen, so a replay shows it.
    """

    def __init__(self, gpu: ptxsim.GPU):
        super().__init__()
        self.steps: list[Callable[[], object]] = []
        self._gpu, self._kept = gpu, []
        self._used: list[tuple[int, int]] = []  # memory of the launches
        self._patches = pytest.MonkeyPatch()

    def __enter__(self):
        launch = self._gpu.launch

        def record(*args):
            self.steps.append(functools.partial(launch, *args))
            self._used += args[-1].values()
            return launch(*args)

        self._patches.setattr(self._gpu, "launch", record)
        for owner, name in ALLOCATE:  # inside the mx ops, where no mode looks
            self._patches.setattr(owner, name, self._keeping(getattr(owner, name)))
        return super().__enter__()

    def __exit__(self, *exception):
        self._patches.undo()
        return super().__exit__(*exception)

    @torch.no_grad()
    def replay(self) -> None:
        storages = [t.untyped_storage() for t in _tensors(self._kept)]
        held = {(x.data_ptr(), x.data_ptr() + x.nbytes()) for x in storages}
        for first, end in self._used:
            assert any(low <= first and end <= high for low, high in held), "memory that nobody kept"
        for step in self.steps:
            step()

    def _keeping(self, allocate):
        def keep(*args, **kwargs):
            self._kept.append(out := allocate(*args, **kwargs))
            return out

        return keep

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        self._kept.append((args, kwargs, out))
        if func._schema.is_mutable and func.namespace != MX:
            self.steps.append(functools.partial(func, *args, **kwargs))
        elif func.namespace != MX and not func._schema.name.endswith(
            ("::empty", "::empty_strided", "::new_empty")
        ):
            old = _tensors(out)
            memory = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
            if not any(t.untyped_storage().data_ptr() in memory for t in old):  # else a view
                self.steps.append(functools.partial(_again, func, args, kwargs, old))
        return out


def _tensors(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def _again(func, args, kwargs, old) -> None:
    for was, new in zip(old, _tensors(func(*args, **kwargs)), strict=True):
        was.copy_(new)


@contextlib.contextmanager
def no_host_reads() -> Iterator[None]:
    """As `torch.cuda.set_sync_debug_mode("error")`, for CPU tensors that stand for GPU memory."""

    def refuse(*args, **kwargs):
        raise AssertionError("the host reads a tensor's values")

    library = torch.library.Library("aten", "IMPL")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("_local_scalar_dense", "nonzero", "masked_select"):
            library.impl(name, refuse, "CPU", allow_override=True)
        for name in ("tolist", "numpy", "cpu"):
            patch.setattr(torch.Tensor, name, refuse)
        try:
            yield
        finally:
            library._destroy()

"""Which backend runs an op, and why the others cannot.

A backend is an object with `name`, `why_not(problem, device) -> str | None` (None: it can) and one method per op that it
has, `backend.quantize(problem, x, offs)`; or, for the ops named in its `prepares`, a method `prepare(op, problem, *args)`,
which works out once what depends on metadata only, and returns a function of the tensors. It lives in a module of its own,
which exposes it as `BACKEND` and is imported at the first choice; a module that is missing or fails to import is a reason
like any other.
"""

import functools
import importlib
import os
from collections.abc import Callable, Collection
from typing import Any, Protocol

import torch

from mx_kernels import arch, selftest_record
from mx_kernels.problem import Problem, one_of

#: Every backend's targets (see arch), in the order that "auto" tries them. None: CPU tensors.
#: The module mx_kernels.<name>.backend is imported only for devices of these targets.
BACKENDS: dict[str, tuple[str, ...] | None] = {
    "sm100": ("sm_100a", "sm_103a"),
    "sm90": ("sm_90a",),
    "cpu": None,
}


class Backend(Protocol):
    """What the registry needs of a backend; its ops are methods named like the ops."""

    name: str

    def why_not(self, problem: Problem, device: torch.device) -> str | None:
        """Why this backend cannot run the problem on tensors of this device, or None."""
        ...


class NoBackendError(RuntimeError):
    """No backend can run an op; the message lists each one's reason."""


@functools.cache
def load(name: str) -> Backend | str:
    """The backend of this name, or why it cannot be loaded."""
    module_name = f"mx_kernels.{one_of('backend', tuple(BACKENDS), name)}.backend"
    try:
        return importlib.import_module(module_name).BACKEND
    except Exception as error:  # a broken install of one backend must not take the others down
        return f"{module_name} cannot be imported: {type(error).__name__}: {error}"


def why_not(name: str, op: str, problem: Problem, device: torch.device, *, auto: bool = False) -> str | None:
    """Why the named backend cannot run this op, or None. `auto`: it was not asked for by name."""
    if reason := _wrong_device(name, device, auto):
        return reason
    backend = load(name)
    if isinstance(backend, str):
        return backend
    if not hasattr(backend, op) and op not in _prepares(backend):
        return f"has no {op}"
    if reason := backend.why_not(problem, device):
        return reason
    if auto and name == "sm100" and device.type == "cuda":
        return selftest_record.why_not_trusted(device)
    return None


def _prepares(backend: Backend) -> Collection[str]:
    return getattr(backend, "prepares", ())


def _wrong_device(name: str, device: torch.device, auto: bool) -> str | None:
    targets = BACKENDS[name]
    if targets is None:
        if device.type != "cpu":
            return f"takes CPU tensors, got {arch.describe(device)}"
        if auto and arch.active_emulation():
            return f"must be asked for by name where CPU tensors stand for a GPU ({arch.describe(device)})"
        return None
    if arch.target_of(device) in targets:
        return None
    return f"needs {' or '.join(targets)}, got {arch.describe(device)}"


def choose(op: str, problem: Problem, device: torch.device, backend: str = "auto") -> Backend:
    """The backend that runs this op.

    Args:
        op: name of the op.
        problem: what is asked.
        device: where the tensors are.
        backend: "auto", "cpu", "sm90" or "sm100". "auto" means `$MX_BACKEND` if it is set, else the first that can;
            sm100 counts only where its self-test has passed.

    Raises:
        NoBackendError: none can; with the reason of each.
    """
    one_of("backend", ("auto", *BACKENDS), backend)
    if backend == "auto":
        backend = one_of("MX_BACKEND", ("auto", *BACKENDS), os.environ.get("MX_BACKEND") or "auto")
    reasons = {}
    for name in BACKENDS if backend == "auto" else (backend,):
        reason = why_not(name, op, problem, device, auto=backend == "auto")
        if reason is None:
            return load(name)  # type: ignore[return-value]
        reasons[name] = reason
    listing = "\n".join(f"  {name}: {reason}" for name, reason in reasons.items())
    raise NoBackendError(
        f"{op}: no backend can run this on {arch.describe(device)}\n{listing}\n  asked: {problem}"
    )


@functools.cache
def _bind(emulation, op, backend, device, problem_type, *fields):
    problem = problem_type(*fields)
    return functools.partial(getattr(choose(op, problem, device, backend), op), problem)


def bind(op: str, backend: str, device: torch.device, problem_type: type, *fields) -> Callable[..., Any]:
    """The chosen backend's method with its problem filled in; remembered for each set of arguments.

    This is on the path of every call: about half a microsecond.
    """
    return _bind(arch.active_emulation(), op, backend, device, problem_type, *fields)


#: What `prepared` has returned, by the op's name and all that a preparation may depend on.
_prepared: dict[tuple, Callable[..., Any]] = {}
MAX_PREPARED = 4096


def prepare(op: str, backend: str, args: tuple, problem_type: type, *fields) -> Callable[..., Any]:
    """A function of tensors with the metadata of those in `args`, that runs the op on the chosen backend.

    Args:
        op: name of the op, and of the backend's method.
        backend: see `choose`.
        args: of the backend's method, after the problem: tensors, then perhaps other values, which are kept.
        problem_type: its arguments follow.
        fields: the problem's.
    """
    problem = problem_type(*fields)
    chosen = choose(op, problem, args[0].device, backend)
    if op in _prepares(chosen):
        return chosen.prepare(op, problem, *args)  # type: ignore[attr-defined]
    method = getattr(chosen, op)
    rest = [a for a in args if not isinstance(a, torch.Tensor)]
    return lambda *tensors: method(problem, *tensors, *rest)


def prepared(
    name: str, make: Callable[..., Callable[..., Any]], args: tuple
) -> tuple[Callable[..., Any], list[torch.Tensor]]:
    """`make(*args)`, remembered for the metadata of the tensors in `args` and the values of all else; and those tensors.

    `make` checks its arguments and returns what runs the op. Checks look at metadata only, so a call like one that has
    passed them needs none. This is on the path of every call: one walk over the arguments.
    """
    key: list = [name, arch.active_emulation()]
    tensors = []
    for a in args:
        if isinstance(a, torch.Tensor):
            tensors.append(a)
            key += (a.dtype, a.shape, a.stride(), a.get_device(), a.data_ptr() & 15)
        else:
            key.append(a)
    found = _prepared.get(hashed := tuple(key))
    if found is None:
        found = make(*args)
        if len(_prepared) >= MAX_PREPARED:
            _prepared.clear()
        _prepared[hashed] = found
    return found, tensors


def forget() -> None:
    """Forget all choices (but not imported backends): after a change of `$MX_BACKEND` or a self-test."""
    _bind.cache_clear()
    _prepared.clear()
    selftest_record.why_not_trusted.cache_clear()

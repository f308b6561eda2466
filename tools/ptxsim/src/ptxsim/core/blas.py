"""numpy's BLAS on one thread: the emulator's products are small, and threads make them slower."""

from __future__ import annotations

import ctypes
from functools import lru_cache

_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


@lru_cache(maxsize=1)
def single_thread() -> bool:
    """Limit the OpenBLAS that numpy loaded; False if there is none (another BLAS, another platform)."""
    try:
        with open("/proc/self/maps") as f:
            paths = {line.split()[-1] for line in f if "openblas" in line}
    except OSError:
        return False
    done = False
    for path in paths:
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(1)
                done = True
                break
    return done

"""Where this package keeps files between runs: compiled kernels, self-test records, autotuned choices."""

import os
import sys
from pathlib import Path


def cache_dir(name: str = "") -> Path:
    """`$MX_CACHE_DIR`, else the platform's user cache folder, plus `name`; created by whoever writes there."""
    if base := os.environ.get("MX_CACHE_DIR"):
        return Path(base) / name
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mx-kernels" / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mx-kernels" / name

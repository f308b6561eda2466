"""Where this package keeps files between runs: compiled kernels, self-test records, autotuned choices."""

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_dir(name: str = "") -> Path:
    """`$MX_CACHE_DIR`, else the platform's user cache folder, plus `name`; created by whoever writes there."""
    if base := os.environ.get("MX_CACHE_DIR"):
        return Path(base) / name
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "mx-kernels" / name
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mx-kernels" / name


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a file beside `path`, and rename it into place: no process reads half of one.

    Raises:
        OSError: the folder cannot be made or written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        part = Path(folder) / path.name
        write(part)
        part.replace(path)

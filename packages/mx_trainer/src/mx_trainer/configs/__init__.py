"""Presets: one file each, with a `CONFIG`. A new file here is a new `--preset`."""

import importlib
import pkgutil

from mx_trainer.config import Config
from mx_trainer.errors import ConfigError


def preset_names() -> list[str]:
    """Names of the files in this folder."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__))


def load_preset(name: str) -> Config:
    """The configuration of one preset.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name not in preset_names():
        raise ConfigError(f"--preset must be one of {', '.join(preset_names())}; got {name!r}")
    return importlib.import_module(f"{__name__}.{name}").CONFIG

"""The default: 1.9 M parameters on the standard library's sources, made for two CPU cores and three minutes."""

from mx_trainer.config import Config

CONFIG = Config()

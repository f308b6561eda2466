"""The errors that the command line prints as one line."""


class ConfigError(ValueError):
    """A configuration that cannot run: what was expected and what came."""


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or from another run."""

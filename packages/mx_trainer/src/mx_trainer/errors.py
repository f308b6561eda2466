"""The errors that the command line prints as one line."""


class ConfigError(ValueError):
    """A configuration that cannot run: what was expected and what came."""


class CheckpointError(RuntimeError):
    """A checkpoint that is missing, damaged, or from another run."""


class RankError(RuntimeError):
    """Another process of the run has failed: which one, and what is known of it."""

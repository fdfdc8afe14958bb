"""Errors of configuration and model files. Messages name the problem, the location and the remedy."""


class TrimtabError(Exception):
    """Base class of the errors that Trimtab raises on purpose."""


class ConfigError(TrimtabError):
    """The command line, the model or the machine does not allow the request. Exit code 2."""


class ModelError(ConfigError):
    """The model's files are missing, unreadable, truncated or of an unsupported architecture. Exit code 2."""


class NotSupportedError(ConfigError):
    """A known feature that is not supported yet. Exit code 2."""

"""The engine's exceptions. The command line prints each as one line and maps it to an exit code."""

from trimtab_modelspec.errors import ConfigError, ModelError, NotSupportedError, TrimtabError

__all__ = [
    "ConfigError",
    "EngineDead",
    "EngineUnresponsive",
    "IntegrityError",
    "InvalidRequest",
    "ModelError",
    "NotSupportedError",
    "TrimtabError",
    "WorkerDied",
    "one_line",
]


class InvalidRequest(TrimtabError):
    """A request is invalid; only this request fails. HTTP 4xx."""


class EngineDead(TrimtabError):
    """The engine core has ended, so nothing can be served. Exit code 1."""


class EngineUnresponsive(EngineDead):
    """An engine core hangs: it sends no messages but has not ended. Failing probes restart the pod."""


class WorkerDied(EngineDead):
    """A rank of the engine has ended; the message has its name and the cause. Exit code 1."""


class IntegrityError(TrimtabError):
    """An invariant is violated, which is a bug. The engine stops instead of serving wrong tokens."""


def one_line(error: BaseException) -> str:
    """Return a library error's message as one line, or its type if the message is empty."""
    return " ".join(str(error).split()) or type(error).__name__

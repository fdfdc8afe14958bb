"""The engine's named errors. The name says who acts next; the command line makes one line and an exit code of each."""

from trimtab_modelspec.errors import ConfigError, ModelError, NotSupportedError, TrimtabError

__all__ = [
    "ConfigError",
    "EngineDead",
    "EngineSilent",
    "IntegrityError",
    "InvalidRequest",
    "ModelError",
    "NotSupportedError",
    "TrimtabError",
    "WorkerDied",
    "one_line",
]


class InvalidRequest(TrimtabError):
    """One request is wrong; it alone ends. The client acts. HTTP 4xx."""


class EngineDead(TrimtabError):
    """The engine core has ended; nothing can be served any more. Exit code 1."""


class EngineSilent(EngineDead):
    """An engine core says nothing any more, but has not ended: it hangs. Whoever watches the probes ends it."""


class WorkerDied(EngineDead):
    """A rank of the engine has ended; the message names it and the cause. Exit code 1."""


class IntegrityError(TrimtabError):
    """A stated invariant does not hold: a defect of ours. The engine stops rather than serve wrong tokens."""


def one_line(error: BaseException) -> str:
    """What a library's error says, as part of a line of ours; its type where it says nothing."""
    return " ".join(str(error).split()) or type(error).__name__

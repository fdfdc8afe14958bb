"""The engine's named errors. The name says who acts next; the command line makes one line and an exit code of each."""


class TrimtabError(Exception):
    """Base of everything that the engine raises on purpose. The message says what, where and what to do."""


class ConfigError(TrimtabError):
    """The command line, the model or the machine does not allow what was asked. The user acts. Exit code 2."""


class ModelError(ConfigError):
    """The model's files are missing, unreadable, truncated or of an architecture that is not built. Exit code 2."""


class NotBuiltError(ConfigError):
    """A known feature that is not built yet: refused by name, never ignored. Exit code 2."""


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

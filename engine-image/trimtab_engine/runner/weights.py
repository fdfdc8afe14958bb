"""Interface of weights that deep sleep drops and wake-up reloads."""

from typing import Protocol

from trimtab_engine.errors import TrimtabError, one_line


class WeightsUnavailable(TrimtabError):
    """The weights cannot be read now, or the device has no room for them. None are loaded; retrying may succeed."""

    @classmethod
    def because(cls, error: Exception) -> "WeightsUnavailable":
        """Return the error with the cause, as one line."""
        text = one_line(error)
        return cls(text if isinstance(error, TrimtabError | MemoryError) else f"{type(error).__name__}: {text}")


class Weights(Protocol):
    """A model whose weights can be dropped and reloaded: a ModelRunner."""

    can_drop_weights: bool
    """False for data-parallel cores in lockstep, which do not support it yet."""

    def drop_weights(self) -> None: ...

    def reload_weights(self) -> None:
        """Read the weights again, on all ranks or on none. Adapters that cannot be read are dropped.

        Raises:
            WeightsUnavailable: They cannot be read, or have no room. Any error of reading is one: files may come back.
        """
        ...

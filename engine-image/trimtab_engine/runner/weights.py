"""Interface of weights that deep sleep drops and wake-up reloads."""

from typing import Protocol


class Weights(Protocol):
    """A model whose weights can be dropped and reloaded: a ModelRunner."""

    can_drop_weights: bool
    """False for data-parallel cores in lockstep, which do not support it yet."""

    def drop_weights(self) -> None: ...

    def reload_weights(self) -> None: ...

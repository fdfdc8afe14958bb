"""What goes and comes back when an engine sleeps deeply and wakes up."""

from typing import Protocol


class Weights(Protocol):
    """A model whose weights can go and come back: a ModelRunner."""

    can_drop_weights: bool
    """Data-parallel cores in lockstep cannot, yet."""

    def drop_weights(self) -> None: ...

    def reload_weights(self) -> None: ...

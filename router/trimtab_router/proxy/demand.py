"""Demand on the service, which the operator reads to scale from and to zero."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


def _ignore() -> None:
    """Handle a change that no listener needs."""


@dataclass(slots=True)
class Demand:
    """Counts of one router process."""

    sequence: int = 0
    """Number of times that holding has begun or ended; a long poll waits for a newer one."""
    held: int = 0
    oldest_held_at: float | None = None
    arrived: int = 0
    """Requests for the model since the start."""
    arrived_prompt_tokens: int = 0
    last_arrival_at: float | None = None
    in_flight: int = 0
    """Requests that a replica is answering."""
    on_change: Callable[[], None] = field(default=_ignore)
    """Called when holding has begun or ended."""

    def arrive(self, prompt_tokens: int, now: float) -> None:
        """Record a request for the model."""
        self.arrived += 1
        self.arrived_prompt_tokens += prompt_tokens
        self.last_arrival_at = now

    def set_held(self, held: int, oldest_held_at: float | None) -> None:
        """Record the number of held requests."""
        changed = (held > 0) != (self.held > 0)
        self.held, self.oldest_held_at = held, oldest_held_at
        if changed:
            self.sequence += 1
            self.on_change()

"""Share of the cached prompt tokens that several running requests hold: system prompts, and sessions with parallel
requests. They take KV blocks once.

Prefix keys are not exported, but memory shows it: the tokens of the running requests, minus the tokens that their
blocks hold.
"""

from __future__ import annotations

from dataclasses import dataclass

DECAY = 0.8  # per sample: about a minute


@dataclass(frozen=True, slots=True)
class Sharing:
    """Cached prompt tokens of running requests, and cached tokens without own blocks; exponentially weighted."""

    cached: float = 0.0
    saved: float = 0.0

    def with_sample(self, *, own: float, cached: float, used: float) -> Sharing:
        """Return the sums with one more sample: tokens of the running requests, by themselves and cached, and tokens of
        the blocks in use.
        """
        saved = max(0.0, min(cached, own + cached - used))
        return Sharing(DECAY * self.cached + cached, DECAY * self.saved + saved)

    @property
    def share(self) -> float:
        """Shared part of the cached tokens, 0..1."""
        return round(self.saved / self.cached, 2) if self.cached > 0 else 0.0

"""What a candidate cannot exceed, so that runs which cannot win are not made. Pure.

Both bounds come from one request alone on the engine, which nothing disturbs:

- Little's law. Of `seats` requests at once each takes at least as long as one alone: X <= seats / e2e.
- The budget. A step takes at least as long as a decode step of one request, and computes `budget` tokens at most:
  X <= budget / (step * tokens of a request).
"""

from dataclasses import dataclass

from trimtab_engine.bench.autotune.space import Candidate

SLACK = 0.8  # of the measured times: a median of few requests is no lower bound of itself


@dataclass(frozen=True, slots=True)
class Bounds:
    """From a request alone: seconds from sent to answered, seconds of a step, and the tokens that it computes.

    A None says that it was not seen, and bounds nothing."""

    e2e_seconds: float | None
    step_seconds: float | None
    computed_tokens: float | None

    def of(self, candidate: Candidate) -> tuple[float, str] | None:
        """Requests per second that it cannot exceed, and why; None: nothing is known."""
        found = []
        if self.e2e_seconds:
            by_seats = candidate.max_num_seqs / (self.e2e_seconds * SLACK)
            words = f"{candidate.max_num_seqs} seats of {self.e2e_seconds:.3g} s each at least"
            found.append((by_seats, words))
        if self.step_seconds and self.computed_tokens:
            by_budget = candidate.max_num_batched_tokens / (self.step_seconds * SLACK * self.computed_tokens)
            words = f"steps of {candidate.max_num_batched_tokens} tokens and {self.step_seconds * 1000:.3g} ms at least"
            found.append((by_budget, words))
        return min(found, default=None)

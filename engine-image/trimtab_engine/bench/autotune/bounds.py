"""Upper bounds of a candidate's throughput, to skip trials that cannot win. Pure.

Both bounds are derived from a single undisturbed request:

- Little's law. Each of N concurrent requests takes at least as long as a single one: X <= N / e2e.
- The token budget. A step takes at least as long as a decode step of one request, and computes at most `budget` tokens:
  X <= budget / (step * tokens of a request).
"""

from dataclasses import dataclass

from trimtab_engine.bench.autotune.space import Candidate

SLACK = 0.8  # factor on the measured times: a median of few requests is not a lower bound


@dataclass(frozen=True, slots=True)
class Bounds:
    """Measurements of a single request: seconds end to end, seconds of a step, and its computed tokens.

    None means that a value was not measured and gives no bound.
    """

    e2e_seconds: float | None
    step_seconds: float | None
    computed_tokens: float | None

    def of(self, candidate: Candidate) -> tuple[float, str] | None:
        """Return the maximum requests per second and the reason, or None if nothing was measured."""
        found = []
        if self.e2e_seconds:
            by_num_seqs = candidate.max_num_seqs / (self.e2e_seconds * SLACK)
            words = f"{candidate.max_num_seqs} concurrent requests of at least {self.e2e_seconds:.3g} s each"
            found.append((by_num_seqs, words))
        if self.step_seconds and self.computed_tokens:
            by_budget = candidate.max_num_batched_tokens / (self.step_seconds * SLACK * self.computed_tokens)
            words = f"steps of {candidate.max_num_batched_tokens} tokens and {self.step_seconds * 1000:.3g} ms minimum"
            found.append((by_budget, words))
        return min(found, default=None)

"""What steps compute, summed by kind of step: the numbers from which a model of the engine's step time is fitted.

A step's time is nearly linear in the tokens it computes, its sequences, the tokens whose keys and values it reads and
the pairs that attention multiplies. Sums keep that exact over any interval, whatever the scrape's period.
"""

from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages import StepStats

KINDS = ("prefill", "decode", "mixed")
STEP_BUCKETS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)


class WorkMetrics:
    """Fed with every StepStats, some at a time."""

    def __init__(self, families: FamilyFactory) -> None:
        self._seconds = families.labelled_histogram("trimtab_step_seconds", "A step's time", STEP_BUCKETS, "kind")
        self._tokens = families.labelled_counter("trimtab_step_tokens", "Tokens that steps computed", "kind")
        self._sequences = families.labelled_counter("trimtab_step_sequences", "Sequences in steps", "kind")
        self._context = families.labelled_counter(
            "trimtab_step_context_tokens", "Tokens whose keys and values steps read: their sequences' lengths", "kind"
        )
        self._attended = families.labelled_counter(
            "trimtab_step_attended_tokens", "Pairs of a computed token and one that it attends to", "kind"
        )
        self._arrived = families.counter("trimtab_arrived_requests", "Sequences that were queued for the first time")
        self._arrived_tokens = families.counter("trimtab_arrived_prompt_tokens", "Prompt tokens of those")
        for kind in KINDS:
            for family in (self._seconds, self._tokens, self._sequences, self._context, self._attended):
                family.of(kind)

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        self._arrived.inc(sum(stats.num_arrived for stats in steps))
        self._arrived_tokens.inc(sum(stats.num_arrived_prompt_tokens for stats in steps))
        by_kind: dict[str, list[StepStats]] = {}
        for stats in steps:
            if stats.num_scheduled_tokens:
                by_kind.setdefault(stats.kind, []).append(stats)
        for kind, alike in by_kind.items():
            self._seconds.of(kind).observe_all([stats.step_seconds for stats in alike])
            self._tokens.of(kind).inc(sum(stats.num_scheduled_tokens for stats in alike))
            self._sequences.of(kind).inc(sum(stats.num_batch_requests for stats in alike))
            self._context.of(kind).inc(sum(stats.num_context_tokens for stats in alike))
            self._attended.of(kind).inc(sum(stats.num_attended_tokens for stats in alike))

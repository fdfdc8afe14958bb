"""vLLM's families of speculative decoding: how many drafts were verified, how many stood, and at which position."""

from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages import StepStats


class SpeculationMetrics:
    """Counters of one engine; without speculation they stay 0. A "draft" is one request's guesses in one step."""

    def __init__(self, families: FamilyFactory) -> None:
        self._drafts = families.counter("vllm:spec_decode_num_drafts", "Requests, per step, whose drafts were verified")
        self._draft_tokens = families.counter("vllm:spec_decode_num_draft_tokens", "Draft tokens that were verified")
        self._accepted = families.counter("vllm:spec_decode_num_accepted_tokens", "Draft tokens that stood")
        self._per_position = families.labelled_counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that stood, by their position in the draft",
            "position",
        )

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        for stats in steps:
            if stats.num_drafts:
                self._count(stats)

    def _count(self, stats: StepStats) -> None:
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted.inc(sum(stats.accepted_per_position))
        for position, count in enumerate(stats.accepted_per_position):
            self._per_position.of(str(position)).inc(count)

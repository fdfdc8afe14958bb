"""vLLM's families of speculative decoding: how many drafts were verified, how many stood, and at which position."""

from prometheus_client import CollectorRegistry, Counter

from trimtab_engine.messages import StepStats


class SpeculationMetrics:
    """Counters of one engine; without speculation they stay 0. A "draft" is one request's guesses in one step."""

    def __init__(self, registry: CollectorRegistry, label_names: tuple[str, ...], labels: tuple[str, ...]) -> None:
        def counter(name: str, text: str) -> Counter:
            return Counter(f"vllm:spec_decode_{name}", text, label_names, registry=registry).labels(*labels)

        self._labels = labels
        self._drafts = counter("num_drafts", "Requests, per step, whose drafts were verified")
        self._draft_tokens = counter("num_draft_tokens", "Draft tokens that were verified")
        self._accepted = counter("num_accepted_tokens", "Draft tokens that stood")
        self._per_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens that stood, by their position in the draft",
            (*label_names, "position"),
            registry=registry,
        )

    def note(self, stats: StepStats) -> None:
        if not stats.num_drafts:
            return
        self._drafts.inc(stats.num_drafts)
        self._draft_tokens.inc(stats.num_draft_tokens)
        self._accepted.inc(sum(stats.accepted_per_position))
        for position, count in enumerate(stats.accepted_per_position):
            self._per_position.labels(*self._labels, str(position)).inc(count)

"""What limits the engine now: how full its steps are, and how long the queue is. The gradient that tuning follows."""

from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages import StepStats

RATIO_BUCKETS = (0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
SEATS_FIELD = "max_num_seqs"  # of the live values


class SaturationMetrics:
    """Fed with every StepStats, some at a time."""

    def __init__(self, families: FamilyFactory) -> None:
        self._max_num_seqs = 0.0
        self._waiting_by_reason = families.labelled_gauge(
            "vllm:num_requests_waiting_by_reason", "Requests that wait, by what for", "reason"
        )
        self._waiting_tokens = families.gauge(
            "trimtab_waiting_tokens", "Tokens that waiting requests have still to compute before they answer"
        )
        self._oldest = families.gauge("trimtab_oldest_waiting_seconds", "How long the oldest waiting request waits")
        self._late = families.counter(
            "trimtab_requests_late", "Requests whose first token could not come in time any more when looked at"
        )
        self._waiting_late = families.gauge("trimtab_num_requests_waiting_late", "How many of those wait")
        self._budget = families.histogram(
            "trimtab_budget_used_ratio", "Scheduled tokens of a step to max_num_batched_tokens", RATIO_BUCKETS
        )
        self._fill = families.histogram("trimtab_batch_fill_ratio", "Requests of a step to max_num_seqs", RATIO_BUCKETS)

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        budgets: list[float] = []
        fills: list[float] = []
        for stats in steps:
            if stats.config_values is not None:
                self._max_num_seqs = stats.config_values.get(SEATS_FIELD, self._max_num_seqs)
            if stats.num_scheduled_tokens and stats.token_budget:
                budgets.append(stats.num_scheduled_tokens / stats.token_budget)
            if stats.num_scheduled_tokens and self._max_num_seqs:
                fills.append(stats.num_batch_requests / self._max_num_seqs)
        self._late.inc(sum(stats.num_late for stats in steps))
        self._budget.observe_all(budgets)
        self._fill.observe_all(fills)
        self._show_queue(steps[-1])

    def _show_queue(self, stats: StepStats) -> None:
        self._waiting_by_reason.of("capacity").set(stats.num_waiting)
        self._waiting_by_reason.of("deferred").set(stats.num_deferred)
        self._waiting_tokens.set(stats.num_waiting_tokens)
        self._waiting_late.set(stats.num_waiting_late)
        oldest = stats.oldest_waiting_arrival
        self._oldest.set(0.0 if oldest is None else max(0.0, stats.time - oldest))

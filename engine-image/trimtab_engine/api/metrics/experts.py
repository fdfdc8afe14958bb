"""How evenly the experts of a mixture are spread over their ranks, and what evening them out has taken."""

from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages import ExpertBalance, StepStats


class ExpertMetrics:
    """Fed with every StepStats, some at a time. Without load balancing of experts the gauge has no sample and the
    counters stay 0."""

    def __init__(self, families: FamilyFactory) -> None:
        self._balancedness = families.labelled_gauge(
            "trimtab_expert_balancedness",
            "Mean over maximum of the ranks' loads with tokens, over the layers of the core's pipeline stage",
        )
        self._rearrangements = families.counter(
            "trimtab_expert_rearrangements", "Times at which experts were placed anew, or found well placed"
        )
        self._moved = families.counter(
            "trimtab_expert_moved_bytes", "Bytes of experts' weights that came to the core's own rank from others"
        )
        self._seconds = families.counter("trimtab_expert_rearrange_seconds", "Seconds in which experts were rearranged")

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        for stats in steps:
            if stats.expert_balance is not None:
                self._count(stats.expert_balance)

    def _count(self, news: ExpertBalance) -> None:
        if news.balancedness is not None:
            self._balancedness.of().set(news.balancedness)
        self._rearrangements.inc(news.num_rearrangements)
        self._moved.inc(news.moved_bytes)
        self._seconds.inc(news.seconds)

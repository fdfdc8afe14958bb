"""What CUDA graphs do for the steps: how many replay one, why others do not, and what padding costs."""

from collections.abc import Sequence

from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages import StepStats

KINDS = ("full", "piecewise")
REASONS = ("off", "too_large", "mixed", "images")


class GraphMetrics:
    """Fed with every StepStats, some at a time. On the CPU, where there are no graphs, all stay 0."""

    def __init__(self, families: FamilyFactory) -> None:
        self._steps = families.labelled_counter(
            "trimtab_graph_steps", "Steps that replayed CUDA graphs: one for the whole step, or pieces", "kind"
        )
        self._eager = families.labelled_counter(
            "trimtab_eager_steps", "Steps on CUDA that replayed none, by why", "reason"
        )
        self._padding = families.counter("trimtab_graph_padding_tokens", "Rows that graphs computed for nothing")
        self._captures = families.counter("trimtab_graph_captures", "CUDA graphs captured while serving")
        self._compilations = families.counter(
            "trimtab_kernel_compilations", "Kernels compiled while serving: after start-up none should be"
        )
        for kind in KINDS:
            self._steps.of(kind)
        for reason in REASONS:
            self._eager.of(reason)

    def on_steps(self, steps: Sequence[StepStats]) -> None:
        for stats in steps:
            for kind, count in stats.graph_steps.items():
                self._steps.of(kind).inc(count)
            for reason, count in stats.eager_steps.items():
                self._eager.of(reason).inc(count)
        self._padding.inc(sum(stats.graph_padding_tokens for stats in steps))
        self._captures.inc(sum(stats.graph_captures for stats in steps))
        self._compilations.inc(sum(stats.kernel_compilations for stats in steps))

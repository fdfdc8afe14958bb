"""CUDA graph counters exist from the start."""

from prometheus_client import CollectorRegistry
from trimtab_engine.api.metrics.collectors import EAGER_REASONS, GraphMetrics
from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages.requests import StepStats
from trimtab_engine.runner.graphs.dispatcher import Eager

LABELS = {"model_name": "m", "engine": "0"}


def value(registry: CollectorRegistry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(name, {**LABELS, **labels})


def test_every_eager_reason_exists_from_the_start() -> None:
    registry = CollectorRegistry()
    GraphMetrics(FamilyFactory(registry, "m", "0", {}))
    assert tuple(reason.value for reason in Eager) == EAGER_REASONS
    assert [value(registry, "trimtab_eager_steps_total", reason=reason) for reason in EAGER_REASONS] == [0] * len(
        EAGER_REASONS
    )
    assert value(registry, "trimtab_graph_steps_total", kind="full") == 0


def test_step_counts_are_summed() -> None:
    registry = CollectorRegistry()
    metrics = GraphMetrics(FamilyFactory(registry, "m", "0", {}))
    for _ in range(2):
        stats = StepStats(1, 0.0, 0.0, "decode", 1, 0, 0, 0, 0, graph_steps={"full": 3}, eager_steps={"mixed": 1})
        stats.graph_padding_tokens, stats.graph_captures, stats.kernel_compilations = 5, 1, 2
        metrics.on_steps([stats])
    assert value(registry, "trimtab_graph_steps_total", kind="full") == 6
    assert value(registry, "trimtab_eager_steps_total", reason="mixed") == 2
    assert value(registry, "trimtab_graph_padding_tokens_total") == 10
    assert value(registry, "trimtab_graph_captures_total") == 2
    assert value(registry, "trimtab_kernel_compilations_total") == 4

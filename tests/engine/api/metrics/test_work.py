"""Sums from which a model of the engine's step time is fitted."""

from prometheus_client import CollectorRegistry
from trimtab_engine.api.metrics.collectors import STEP_KINDS, WorkMetrics
from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages.requests import StepStats

LABELS = {"model_name": "m", "engine": "0"}
SUMS = (
    "trimtab_step_seconds_count",
    "trimtab_step_seconds_sum",
    "trimtab_step_tokens_total",
    "trimtab_step_sequences_total",
    "trimtab_step_context_tokens_total",
    "trimtab_step_attended_tokens_total",
)


def sums(registry: CollectorRegistry, kind: str) -> tuple[float | None, ...]:
    return tuple(registry.get_sample_value(name, LABELS | {"kind": kind}) for name in SUMS)


def make_step(kind: str, tokens: int, sequences: int, context: int, attended: int) -> StepStats:
    stats = StepStats(1, 100.0, 0.25, kind, 2, 3, 25, 100, 200)
    stats.num_scheduled_tokens, stats.num_batch_requests = tokens, sequences
    stats.num_context_tokens, stats.num_attended_tokens = context, attended
    return stats


def test_each_step_kind_has_its_own_sums_from_the_start() -> None:
    registry = CollectorRegistry()
    work = WorkMetrics(FamilyFactory(registry, "m", "0", {}))
    assert {sums(registry, kind) for kind in STEP_KINDS} == {(0.0,) * 6}
    work.on_steps([make_step("mixed", 100, 5, 700, 9000)])
    work.on_steps([make_step("mixed", 50, 4, 600, 8000)])
    work.on_steps([make_step("decode", 4, 4, 604, 604)])
    assert sums(registry, "mixed") == (2, 0.5, 150, 9, 1300, 17000)
    assert sums(registry, "decode") == (1, 0.25, 4, 4, 604, 604)
    assert sums(registry, "prefill") == (0,) * 6


def test_arrivals_are_counted_without_a_step() -> None:
    registry = CollectorRegistry()
    work = WorkMetrics(FamilyFactory(registry, "m", "0", {}))
    stats = StepStats(1, 100.0, 0.0, "idle", 0, 3, 0, 100, 200)
    stats.num_arrived, stats.num_arrived_prompt_tokens = 3, 300
    work.on_steps([stats])
    assert registry.get_sample_value("trimtab_arrived_requests_total", LABELS) == 3
    assert registry.get_sample_value("trimtab_arrived_prompt_tokens_total", LABELS) == 300
    assert sums(registry, "decode") == (0,) * 6

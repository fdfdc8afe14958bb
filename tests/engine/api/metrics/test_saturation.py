"""Fill ratio of steps and length of the queue."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from trimtab_engine.api.metrics.collectors import SaturationMetrics
from trimtab_engine.api.metrics.factory import FamilyFactory
from trimtab_engine.messages.requests import StepStats

LABELS = {"model_name": "m", "engine": "0"}


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> SaturationMetrics:
    return SaturationMetrics(FamilyFactory(registry, "m", "0", {}))


def make_step(**fields: Any) -> StepStats:
    stats = StepStats(1, 100.0, 0.02, "mixed", 2, 3, 25, 100, 200)
    for name, value in fields.items():
        setattr(stats, name, value)
    return stats


def test_step_reports_budget_and_batch_fill_ratio(metrics: SaturationMetrics, registry: CollectorRegistry) -> None:
    metrics.on_steps([make_step(config_values={"max_num_seqs": 8.0})])  # idle: no step ran
    metrics.on_steps([make_step(num_scheduled_tokens=512, token_budget=2048, num_batch_requests=6)])
    assert registry.get_sample_value("trimtab_budget_used_ratio_sum", LABELS) == 0.25
    assert registry.get_sample_value("trimtab_budget_used_ratio_count", LABELS) == 1
    assert registry.get_sample_value("trimtab_batch_fill_ratio_sum", LABELS) == 0.75


def test_queue_is_reported_in_requests_tokens_and_age(metrics: SaturationMetrics, registry: CollectorRegistry) -> None:
    metrics.on_steps([make_step(num_waiting=3, num_deferred=2, num_waiting_tokens=999, oldest_waiting_arrival=88.5)])
    reasons = ("capacity", "deferred")
    waiting = [
        registry.get_sample_value("vllm:num_requests_waiting_by_reason", LABELS | {"reason": reason})
        for reason in reasons
    ]
    assert waiting == [3, 2]
    assert registry.get_sample_value("trimtab_waiting_tokens", LABELS) == 999
    assert registry.get_sample_value("trimtab_oldest_waiting_seconds", LABELS) == 11.5
    metrics.on_steps([make_step(num_waiting=0, oldest_waiting_arrival=None)])
    assert registry.get_sample_value("trimtab_oldest_waiting_seconds", LABELS) == 0


def test_late_request_is_counted_once_and_shown_while_waiting(
    metrics: SaturationMetrics, registry: CollectorRegistry
) -> None:
    assert registry.get_sample_value("trimtab_requests_late_total", LABELS) == 0  # exists from the start
    metrics.on_steps([make_step(num_late=2, num_waiting_late=2), make_step(num_late=1, num_waiting_late=3)])
    metrics.on_steps([make_step(num_waiting_late=1)])
    assert registry.get_sample_value("trimtab_requests_late_total", LABELS) == 3
    assert registry.get_sample_value("trimtab_num_requests_waiting_late", LABELS) == 1

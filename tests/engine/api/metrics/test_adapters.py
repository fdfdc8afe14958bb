"""vLLM's family of adapters: its labels are the news, and only the newest are shown."""

import time

import pytest
from trimtab_engine.api.metrics.families import EngineMetrics
from trimtab_engine.messages import AdaptersInUse, StepStats


def a_step(running: list[str] | None = None, waiting: list[str] | None = None) -> StepStats:
    told = None if running is None else AdaptersInUse(2, running, waiting or [])
    return StepStats(1, 0.0, 0.1, "decode", 1, 0, 1, 4, 4, adapters=told)


def samples(metrics: EngineMetrics) -> list[str]:
    return [line for line in metrics.exposition().decode().splitlines() if line.startswith("vllm:lora_requests_info{")]


def test_without_adapters_nothing_is_shown() -> None:
    metrics = EngineMetrics("m", 128)
    metrics.on_step(a_step())
    assert samples(metrics) == []


def test_the_newest_names_stand_with_the_time_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1700.0)
    metrics = EngineMetrics("m", 128)
    for step in (a_step(["law"]), a_step(["law", "sql"], ["art"]), a_step()):
        metrics.on_step(step)
        shown = samples(metrics)
    labels = 'max_lora="2",model_name="m",running_lora_adapters="law,sql",waiting_lora_adapters="art"'
    assert shown == [f'vllm:lora_requests_info{{engine="0",{labels}}} 1700.0']

"""vLLM's family of adapters: the labels hold the names, and only the latest sample is shown."""

import time

import pytest
from trimtab_engine.api.metrics.families import EngineMetrics
from trimtab_engine.messages.requests import AdaptersInUse, StepStats


def make_step(running: list[str] | None = None, waiting: list[str] | None = None) -> StepStats:
    adapters = None if running is None else AdaptersInUse(2, running, waiting or [])
    return StepStats(1, 0.0, 0.1, "decode", 1, 0, 1, 4, 4, adapters=adapters)


def samples(metrics: EngineMetrics) -> list[str]:
    return [line for line in metrics.exposition().decode().splitlines() if line.startswith("vllm:lora_requests_info{")]


def test_no_samples_without_adapters() -> None:
    metrics = EngineMetrics("m", 128)
    metrics.on_step(make_step())
    assert samples(metrics) == []


def test_only_latest_adapter_names_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1700.0)
    metrics = EngineMetrics("m", 128)
    for step in (make_step(["law"]), make_step(["law", "sql"], ["art"]), make_step()):
        metrics.on_step(step)
        shown = samples(metrics)
    labels = 'max_lora="2",model_name="m",running_lora_adapters="law,sql",waiting_lora_adapters="art"'
    assert shown == [f'vllm:lora_requests_info{{engine="0",{labels}}} 1700.0']

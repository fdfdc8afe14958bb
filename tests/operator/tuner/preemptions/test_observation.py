"""What a window of samples says, and which samples are believed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from trimtab_operator.tuner.preemptions.observation import EngineLoad, Window, contradiction, pressure

LOAD = EngineLoad(100, 1, 10, 1000, 10, 4, 0.9, 100, 90, 16, 737_280, 1_572_864_000)


def a_window(*changes: dict[str, float]) -> Window:
    """Samples five seconds apart."""
    samples = [replace(LOAD, at=100 + 5 * i, **change) for i, change in enumerate(changes)]  # type: ignore[arg-type]
    return Window(tuple(samples))


def test_one_sample_says_nothing() -> None:
    assert pressure("a", a_window({})) is None


def test_preemptions_are_counted_between_samples_and_tokens_too() -> None:
    steps: list[dict[str, float]] = [
        {"preemptions_total": 10, "generation_tokens_total": 1000},
        {"preemptions_total": 13, "generation_tokens_total": 1400},
        {"preemptions_total": 13, "generation_tokens_total": 1900},
    ]
    seen = pressure("a", a_window(*steps))
    assert seen is not None
    assert (seen.preemptions, seen.intervals_with_preemption, seen.generated_tokens) == (3, 1, 900)
    assert (seen.seconds, seen.preemption_rate, seen.is_recent) == (10, 0.3, True)


def test_the_size_of_a_request_comes_from_samples_with_a_full_cache_and_one_odd_sample_does_not_count() -> None:
    odd = {"running": 1.0, "kv_usage": 0.5}  # the gauge of running requests was late: 50 blocks for one request
    young = {"running": 20.0, "kv_usage": 0.2}
    seen = pressure("a", a_window(odd, young, {}, {}, {}))
    assert seen is not None
    assert (seen.blocks_per_request, seen.running_when_full) == (9.0, 10)


def test_an_idle_window_has_no_request_size() -> None:
    idle = {"running": 0.0, "kv_usage": 0.0}
    seen = pressure("a", a_window(idle, idle))
    assert seen is not None
    assert (seen.blocks_per_request, seen.demand) == (0.0, 4)


def test_a_window_forgets_what_is_old_and_starts_again_with_the_engine() -> None:
    window = Window()
    for i in range(30):
        window = window.add(replace(LOAD, at=100 + 5 * i), keep_seconds=60)
    assert len(window.samples) == 13
    assert len(window.add(replace(LOAD, at=300, preemptions_total=0), keep_seconds=60).samples) == 1
    assert len(window.add(replace(LOAD, at=300, config_generation=0), keep_seconds=60).samples) == 1


@pytest.mark.parametrize(
    ("lie", "said"),
    [
        ({"running": float("nan")}, "a metric is not a number"),
        ({"preemptions_total": float("inf")}, "a metric is not a number"),
        ({"waiting": -1.0}, "a count is negative"),
        ({"kv_usage": 1.2}, "more of the KV cache is used than there is"),
        ({"blocks_used": 101}, "more of the KV cache is used than there is"),
        ({"device_bytes": 0}, "the memory ledger is empty"),
        ({"at": 106.0}, "the sample lies in the future"),
        ({}, None),
        ({"at": 104.0}, None),  # clocks differ a little
    ],
)
def test_what_is_impossible_is_named(lie: dict[str, float], said: str | None) -> None:
    assert contradiction(replace(LOAD, **lie), now=100) == said  # type: ignore[arg-type]

"""vLLM's statistics line."""

from typing import Any

from trimtab_engine.api.metrics.stats_line import RECENT_LOOKUPS, HitRate, Interval, StatisticsLine, statistics_line
from trimtab_engine.messages.requests import StepStats


def make_step(**fields: Any) -> StepStats:
    stats = StepStats(1, 0.0, 0.02, "decode", 2, 3, 25, 100, 200)
    for name, value in fields.items():
        setattr(stats, name, value)
    return stats


def test_line_equals_vllm() -> None:
    line = statistics_line(0, Interval(50, 200, 0), make_step(), HitRate(), 10.0)
    assert line == (
        "Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 20.0 tokens/s, "
        "Running: 2 reqs, Waiting: 3 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 0.0%"
    )


def test_cpu_line_does_not_mention_gpu() -> None:
    line = StatisticsLine(device="cpu")
    line.add(make_step())
    assert ", KV cache usage: 25.0%" in line.take(10.0)[0][0]


def test_preemptions_and_deferred_appear_only_if_any() -> None:
    line = statistics_line(0, Interval(0, 0, 4), make_step(num_deferred=6), HitRate(), 10.0)
    assert "Waiting: 3 reqs, Deferred: 6 reqs, Preemptions: 4, GPU" in line


def test_cached_prompt_tokens_are_not_throughput() -> None:
    line = StatisticsLine()
    line.add(
        make_step(num_prompt_tokens=100, num_cached_prompt_tokens=60, prefix_cache_queries=100, prefix_cache_hits=60)
    )
    taken = line.take(10.0)
    assert "Avg prompt throughput: 4.0 tokens/s" in taken[0][0]
    assert "Prefix cache hit rate: 60.0%" in taken[0][0]


def test_line_covers_its_interval_and_hit_rate_a_longer_one() -> None:
    line = StatisticsLine()
    line.add(
        make_step(num_generation_tokens=10, prefix_cache_queries=10, prefix_cache_hits=5, preempted={"swap": {"r": 2}})
    )
    first = line.take(1.0)
    line.add(make_step(num_running=0, num_waiting=0))
    second = line.take(1.0)
    third = line.take(1.0)
    assert ("Preemptions: 2" in first[0][0], first[1]) == (True, False)
    assert ("Preemptions" in second[0][0], second[1]) == (False, False)  # the first idle line is still shown
    assert third[1]
    assert "generation throughput: 0.0" in second[0][0]
    assert "hit rate: 50.0%" in second[0][0]


def test_hit_rate_forgets_old_lookups() -> None:
    rate = HitRate()
    rate.add(make_step(prefix_cache_queries=1000, prefix_cache_hits=1000))
    for _ in range(RECENT_LOOKUPS):
        rate.add(make_step(prefix_cache_queries=4, prefix_cache_hits=1))
    assert rate.percent == 25.0


def test_each_core_has_its_own_line() -> None:
    line = StatisticsLine(3)
    line.add(make_step())
    assert line.take(1.0)[0][0].startswith("Engine 003: ")


def test_drafts_have_an_additional_line() -> None:
    line = StatisticsLine()
    line.add(make_step(num_drafts=2, num_draft_tokens=6, accepted_per_position=[2, 1, 0]))
    _, drafts = line.take(1.0)[0]
    assert "Accepted: 3 tokens, Drafted: 6 tokens" in drafts
    line.add(make_step())
    assert len(line.take(1.0)[0]) == 1

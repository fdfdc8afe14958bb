"""vLLM's statistics line."""

from typing import Any

from trimtab_engine.api.metrics.stats_line import RECENT_LOOKUPS, HitRate, Interval, StatisticsLine, statistics_line
from trimtab_engine.messages import StepStats


def a_step(**fields: Any) -> StepStats:
    stats = StepStats(1, 0.0, 0.02, "decode", 2, 3, 25, 100, 200)
    for name, value in fields.items():
        setattr(stats, name, value)
    return stats


def test_the_line_is_vllms() -> None:
    line = statistics_line(0, Interval(50, 200, 0), a_step(), HitRate(), 10.0)
    assert line == (
        "Engine 000: Avg prompt throughput: 5.0 tokens/s, Avg generation throughput: 20.0 tokens/s, "
        "Running: 2 reqs, Waiting: 3 reqs, GPU KV cache usage: 25.0%, Prefix cache hit rate: 0.0%"
    )


def test_on_the_cpu_no_gpu_is_named() -> None:
    line = StatisticsLine(device="cpu")
    line.add(a_step())
    assert ", KV cache usage: 25.0%" in line.take(10.0)[0][0]


def test_preemptions_and_deferred_requests_are_named_only_when_there_are_any() -> None:
    line = statistics_line(0, Interval(0, 0, 4), a_step(num_deferred=6), HitRate(), 10.0)
    assert "Waiting: 3 reqs, Deferred: 6 reqs, Preemptions: 4, GPU" in line


def test_prompt_tokens_found_in_the_prefix_cache_are_no_throughput() -> None:
    line = StatisticsLine()
    line.add(a_step(num_prompt_tokens=100, num_cached_prompt_tokens=60, prefix_cache_queries=100, prefix_cache_hits=60))
    taken = line.take(10.0)
    assert "Avg prompt throughput: 4.0 tokens/s" in taken[0][0]
    assert "Prefix cache hit rate: 60.0%" in taken[0][0]


def test_each_line_tells_of_its_own_interval_and_the_hit_rate_of_longer() -> None:
    line = StatisticsLine()
    line.add(
        a_step(num_generation_tokens=10, prefix_cache_queries=10, prefix_cache_hits=5, preempted={"swap": {"r": 2}})
    )
    first = line.take(1.0)
    line.add(a_step(num_running=0, num_waiting=0))
    second = line.take(1.0)
    third = line.take(1.0)
    assert ("Preemptions: 2" in first[0][0], first[1]) == (True, False)
    assert ("Preemptions" in second[0][0], second[1]) == (False, False)  # the first idle one is still shown
    assert third[1]
    assert "generation throughput: 0.0" in second[0][0]
    assert "hit rate: 50.0%" in second[0][0]


def test_the_hit_rate_forgets_what_is_long_ago() -> None:
    rate = HitRate()
    rate.add(a_step(prefix_cache_queries=1000, prefix_cache_hits=1000))
    for _ in range(RECENT_LOOKUPS):
        rate.add(a_step(prefix_cache_queries=4, prefix_cache_hits=1))
    assert rate.percent == 25.0


def test_each_core_has_a_line_of_its_own() -> None:
    line = StatisticsLine(3)
    line.add(a_step())
    assert line.take(1.0)[0][0].startswith("Engine 003: ")


def test_drafts_have_a_line_beside_it_when_there_were_any() -> None:
    line = StatisticsLine()
    line.add(a_step(num_drafts=2, num_draft_tokens=6, accepted_per_position=[2, 1, 0]))
    _, drafts = line.take(1.0)[0]
    assert "Accepted: 3 tokens, Drafted: 6 tokens" in drafts
    line.add(a_step())
    assert len(line.take(1.0)[0]) == 1

"""The scenario of vLLM's report, shortened: a watermark reduces preemptions as it reports."""

from __future__ import annotations

from simulator_benchmarks.recompute_tax import Setting, measure


def test_watermark_reduces_the_tax_as_vllm_reports() -> None:
    """Its 450 requests had 1,065 preemptions without and 187 with a watermark of 0.05, at 5 % more tokens a second."""
    off, on = (measure(Setting(0.2, 1, watermark, False), 0, seconds=300.0) for watermark in (0.0, 0.05))
    assert off.preemptions_per_minute > 3 * on.preemptions_per_minute > 0
    assert off.token_share > 2 * on.token_share
    assert 1.02 < on.tokens_per_s / off.tokens_per_s < 1.10
    assert 0 < off.time_share < off.token_share


def test_victim_is_the_last_or_the_cheapest_of_eight() -> None:
    last, cheapest = (measure(Setting(0.5, count, 0.0, False), 0, seconds=180.0) for count in (1, 8))
    assert last != cheapest

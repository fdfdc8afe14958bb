"""Batch requests leave interactive ones their latency, by the engine's own priorities."""

from __future__ import annotations

import random

from simulator_benchmarks.batch_fill import run


def draw(rng: random.Random, client: str, at: float) -> tuple[int, int]:
    return 1000, 50


def test_batch_fills_what_interactive_requests_leave() -> None:
    alone, both, batch = (
        run(draw, budget=512, rate=rate, has_batch=has_batch, seconds=90.0)
        for rate, has_batch in ((3.0, False), (3.0, True), (0.0, True))
    )
    assert alone.batch_tokens == 0
    assert both.attained == alone.attained == 1.0
    assert abs(both.interactive_tokens - alone.interactive_tokens) < 20
    assert both.batch_tokens > 0.8 * (batch.batch_tokens - alone.interactive_tokens)

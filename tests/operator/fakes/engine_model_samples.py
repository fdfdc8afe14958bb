"""Samples of an engine model, as a real engine would export them."""

from __future__ import annotations

from collections.abc import Iterable

from trimtab_operator.tuner.engine_model import EngineModel, Sequence
from trimtab_operator.tuner.samples import Counters, Finished, Gauges, RequestUpdates, Sample, Unfinished, Work


def sample_of(engine: EngineModel, ended: Iterable[Sequence], *, at: float, generation: int) -> Sample:
    """Return all counters and gauges of an engine, and the requests that `ended` since the previous sample."""
    c = engine.counters
    sums = {kind: Work(s.steps, s.tokens, s.sequences, s.context, s.attended, s.seconds) for kind, s in c.sums.items()}
    counters = Counters(
        c.generated_tokens,
        c.prompt_tokens,
        c.finished,
        {"capacity": c.preempted["capacity"]},
        arrived=c.arrived,
        recomputed_tokens=c.recomputed_tokens,
        blocked_seconds=dict(c.blocked_seconds),
        decode=sums["decode"],
        prefill=sums["prefill"].plus(sums["mixed"]),
    )
    usage = 1 - engine.blocks.free / engine.blocks.total
    rows = RequestUpdates(
        tuple(_row(s) for s in ended),
        tuple(Unfinished(s.arrival, s.num_prompt, n) for s, n in engine.unfinished()),
    )
    gauges = Gauges(engine.num_running, engine.num_waiting, usage, generation, engine.waiting_tokens)
    return Sample(at, counters, gauges, requests=rows)


def _row(s: Sequence) -> Finished:
    assert s.finished_at is not None
    assert s.first_token_at is not None
    ttft, rest = s.first_token_at - s.arrival, s.finished_at - s.first_token_at
    return Finished(s.arrival, s.finished_at, s.num_prompt, s.num_output, ttft, rest, preemptions=s.num_preemptions)

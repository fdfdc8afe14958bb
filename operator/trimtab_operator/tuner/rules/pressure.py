"""Preemption pressure: whether recomputation costs enough to act on, and whether KV capacity is its cause."""

from __future__ import annotations

from trimtab_operator.tuner.moves import Expectation, Measure
from trimtab_operator.tuner.parameters import Parameter, Value
from trimtab_operator.tuner.rules.gain import UNSURE, clear_gain, deciding_measure, is_harm
from trimtab_operator.tuner.situation import Situation

PRESSED_SHARE = 0.01  # recomputed share of the computed tokens: less costs less than a change may
FULL = 0.8  # KV cache usage below which capacity is not the cause of preemptions
UNSURE_RECOMPUTED = 0.25  # usual relative error of a predicted share
LEAST_RELIEF = 0.1  # of the recomputation: a change that saves less does not help against it


def is_pressed(s: Situation) -> bool:
    """Return True if capacity preemptions cost more than PRESSED_SHARE of the work and the KV cache was full.

    Preemptions with other causes (priorities, a resize) leave room in the cache and are ignored.
    """
    return s.window.recomputed_share > PRESSED_SHARE and s.window.preempted_for_room >= 1 and peak_usage(s) >= FULL


def peak_usage(s: Situation) -> float:
    """Return the highest KV cache usage of a trusted replica in the last minute."""
    start = s.now - s.settings.pace.window_seconds
    return max((part.gauges.kv_usage for seen in s.observation.trusted for part in seen.since(start)), default=0.0)


def evidence(s: Situation) -> dict[str, float]:
    """Return the preemption figures of the last minute."""
    return {
        "recomputed_share": round(s.window.recomputed_share, 4),
        "preemptions": s.window.preempted_for_room,
        "replica_seconds": round(s.window.seconds, 1),
        "kv_usage": round(peak_usage(s), 4),
        "kv_tokens": s.ledger.kv_tokens,
        "requests_per_second": round(s.rate, 4),
    }


def expected_relief(s: Situation, parameter: Parameter, value: Value) -> tuple[Expectation, ...] | None:
    """Return the expected effect of a change against preemption; None if it is predicted not to be worth it. Without a
    predictor, about half of the recomputation should disappear.

    For open-loop load, no harm is enough, because the queue drains by the saved work. For closed-loop clients the queue
    fills again, so the deciding measure must improve clearly. A preemption storm follows a rising load, so it is judged
    by the rate since the rise, not by the mean of the minute.
    """
    share, rate = s.window.recomputed_share, s.recent_rate
    before, after = s.predict(s.candidate, rate), s.predict(s.with_parameter(parameter, value), rate)
    if before is None or after is None:
        return (Expectation(Measure.RECOMPUTED, share, share / 2, 0.0, share),)
    left = after.recomputed_share
    if before.recomputed_share > 0 and not s.state.clients.are_closed_loop:
        left *= share / before.recomputed_share  # the queue drains: the observed share, scaled as the prediction
    if left > (1 - LEAST_RELIEF) * share:
        return None
    is_worth_it = (
        clear_gain(s, before, after) is not None if s.state.clients.are_closed_loop else not is_harm(s, before, after)
    )
    if not is_worth_it:
        return None
    unsure = max(UNSURE, UNSURE_RECOMPUTED * left)
    spared = Expectation(Measure.RECOMPUTED, share, left, max(0.0, left - unsure), left + unsure)
    return (spared, deciding_measure(s, before, after))

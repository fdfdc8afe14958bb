"""Whether preemption costs enough to act on, and whether want of room is really its cause."""

from __future__ import annotations

from trimtab_operator.tuner.foresight import Prediction
from trimtab_operator.tuner.knobs import Knob, Value
from trimtab_operator.tuner.moves import Expectation, Measure
from trimtab_operator.tuner.situation import Situation

PRESSED_SHARE = 0.01  # of the computed tokens, computed twice: less costs less than a move may
FULL = 0.8  # of the KV cache: where no look found more in use, want of room is not the cause
HARM = 0.005  # of the requests that keep their promises: a move that is predicted to cost more is not made
GAIN_DEVIATIONS = 2.0  # standard errors of that share, which clients that wait must gain of what they were promised
UNSURE = 0.02  # of a share: what a prediction of it is off by, mostly


def is_pressed(s: Situation) -> bool:
    """Preemption for want of room costs more than a hundredth of the work, and the KV cache was really full.

    Preemptions of another cause (priorities, a resize) leave room in the cache, and are none of the tuner's business.
    """
    return s.window.recomputed_share > PRESSED_SHARE and s.window.preempted_for_room >= 1 and peak_usage(s) >= FULL


def peak_usage(s: Situation) -> float:
    """The highest share of a KV cache in use that a look of the last minute found."""
    start = s.now - s.settings.pace.window_seconds
    return max((part.gauges.kv_usage for seen in s.observation.trusted for part in seen.since(start)), default=0.0)


def evidence(s: Situation) -> dict[str, float]:
    """The numbers of preemption in the last minute."""
    return {
        "recomputed_share": round(s.window.recomputed_share, 4),
        "preemptions": s.window.preempted_for_room,
        "replica_seconds": round(s.window.seconds, 1),
        "kv_usage": round(peak_usage(s), 4),
        "kv_tokens": s.ledger.kv_tokens,
        "requests_per_second": round(s.rate, 4),
    }


def expected_relief(s: Situation, knob: Knob, value: Value) -> tuple[Expectation, ...] | None:
    """What a move against preemption should bring; None when it is predicted not to be worth it. Without foresight:
    that at least half of what is computed twice is spared."""
    share = s.window.recomputed_share
    before, after = s.predicted(s.candidate), s.predicted(s.with_knob(knob, value))
    if before is None or after is None:
        return (Expectation(Measure.RECOMPUTED, share, 0.0, 0.0, share / 2),)
    if not _is_worth_it(s, before, after):
        return None
    spared = Expectation(
        Measure.RECOMPUTED, share, after.recomputed_share, 0.0, max(share / 2, after.recomputed_share + UNSURE)
    )
    return (spared, expected_attainment(s, after.attainment))


def _is_worth_it(s: Situation, before: Prediction, after: Prediction) -> bool:
    """Whether users are better off for it. A stream's queue drains by what is spared: no harm is enough. That of
    clients that wait fills again: for them it must bring more answers that keep their promises or, where nobody
    promised anything and most of the defaults are broken whatever is done, more tokens."""
    if not s.memory.clients.do_wait:
        return after.good_share >= before.good_share - HARM
    if s.objectives.are_given:
        return after.good_share >= before.good_share + GAIN_DEVIATIONS * after.good_error
    return after.tokens_per_second > before.tokens_per_second


def expected_attainment(s: Situation, after: float) -> Expectation:
    """The share of requests that keep their promises, as felt or predicted now and as predicted afterwards."""
    now = s.predicted(s.candidate)
    before = now.attainment if now is not None else (s.attained if s.attained is not None else after)
    return Expectation(Measure.ATTAINMENT, before, after, max(0.0, after - UNSURE), min(1.0, after + UNSURE))

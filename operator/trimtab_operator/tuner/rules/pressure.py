"""Whether preemption costs enough to act on, and whether want of room is really its cause."""

from __future__ import annotations

from trimtab_operator.tuner.knobs import Knob, Value
from trimtab_operator.tuner.moves import Expectation, Measure
from trimtab_operator.tuner.rules.gain import UNSURE, clear_gain, is_harm, what_decides
from trimtab_operator.tuner.situation import Situation

PRESSED_SHARE = 0.01  # of the computed tokens, computed twice: less costs less than a move may
FULL = 0.8  # of the KV cache: where no look found more in use, want of room is not the cause
LEAST_RELIEF = 0.1  # of what is computed twice: a move that is predicted to spare less of it is none against it


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
    that at least half of what is computed twice is spared.

    The queue of a stream drains by what is spared: no harm is enough. That of clients that wait fills again: for them
    it must bring clearly more of what decides. A storm comes with a load that has risen: it is judged by what comes
    since then, as the mean of the minute is a load that nobody will see again.
    """
    share, rate = s.window.recomputed_share, s.risen_rate
    before, after = s.predicted(s.candidate, rate), s.predicted(s.with_knob(knob, value), rate)
    if before is None or after is None:
        return (Expectation(Measure.RECOMPUTED, share, 0.0, 0.0, share / 2),)
    left = after.recomputed_share
    if before.recomputed_share > 0:
        left *= share / before.recomputed_share  # what is seen, changed as the prediction is
    if left > (1 - LEAST_RELIEF) * share:
        return None
    is_worth_it = (
        clear_gain(s, before, after) is not None if s.memory.clients.do_wait else not is_harm(s, before, after)
    )
    if not is_worth_it:
        return None
    spared = Expectation(Measure.RECOMPUTED, share, left, 0.0, max(share / 2, left + UNSURE))
    return (spared, what_decides(s, before, after))

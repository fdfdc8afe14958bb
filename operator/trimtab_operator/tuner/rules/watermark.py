"""The watermark: KV blocks that stay free when a request is admitted beside others, so that what runs can grow.

The guide has no such knob: it lowers `max_num_seqs` when the cache is too small, which "reduces the number of
concurrent requests in a batch, thereby requiring less KV cache space". A watermark does that only while the cache is
full, and by as much as it is: in replays it ended preemption and raised throughput where fewer seats made users wait.
"""

from __future__ import annotations

from trimtab_operator.tuner.knobs import Knob, typed
from trimtab_operator.tuner.moves import Move, Reason
from trimtab_operator.tuner.rules.pressure import PRESSED_SHARE, evidence, expected_relief, is_pressed
from trimtab_operator.tuner.situation import Situation

STEP = 0.05  # of the KV cache
LEARN_SECONDS = 120.0  # that a new tuner waits for enough lengths to predict from
USUAL_MAXIMUM = 0.10  # beyond it what stays free costs more than preemption does; bounds may allow more


def raise_watermark(s: Situation) -> Move | None:
    """Preemptions, and no headroom on the device: too much is admitted for this KV cache."""
    found = s.ranges.get(Knob.WATERMARK)
    if found is None or not is_pressed(s) or _is_learning(s):
        return None
    bounds = s.settings.bounds.get(Knob.WATERMARK)
    most = found.highest if bounds is not None and bounds.maximum is not None else min(found.highest, USUAL_MAXIMUM)
    after = min(most, typed(Knob.WATERMARK, found.current + STEP))
    if after <= found.current or not found.is_live:
        return None
    expected = expected_relief(s, Knob.WATERMARK, after)
    if expected is None:
        return None
    return Move(
        Reason.ADMITTED_TOO_EARLY,
        Knob.WATERMARK,
        found.current,
        after,
        evidence(s),
        expected,
        f"less than {PRESSED_SHARE:.0%} of the tokens computed twice, or headroom for more KV memory",
    )


def _is_learning(s: Situation) -> bool:
    """Whether it will soon be known what a watermark does to those who were promised something: clients that send their
    next request when they have an answer fill the queue again that it was to drain."""
    told = s.objectives.are_given and (s.memory.lengths.pairs or s.memory.lengths.unfinished)
    return s.foresight is None and bool(told) and s.memory.demand.seen_seconds(2 * LEARN_SECONDS) < LEARN_SECONDS


def lower_watermark(s: Situation) -> Move | None:
    """Nothing was preempted for long: admit earlier again, a step at a time. The twin of `raise_watermark`."""
    found = s.ranges.get(Knob.WATERMARK)
    start = float(s.memory.starts.get(Knob.WATERMARK, 0.0))
    if found is None or found.current <= start or s.quiet_seconds < s.settings.pace.quiet_seconds:
        return None
    after = max(start, float(typed(Knob.WATERMARK, found.current - STEP)))
    if not found.holds_load(after):
        return None
    return Move(
        Reason.WATERMARK_NOT_NEEDED,
        Knob.WATERMARK,
        found.current,
        after,
        {"quiet_seconds": round(s.quiet_seconds), "kv_peak": round(s.memory.kv_peak, 4)},
        (),
        "a preemption for want of room",
    )

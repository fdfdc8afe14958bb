"""Watermark: KV blocks that stay free when another request is admitted, so that running requests can grow.

vLLM's guide has no such parameter: it lowers `max_num_seqs` when the cache is too small, which "reduces the number of
concurrent requests in a batch, thereby requiring less KV cache space". A watermark does that only while the cache is
full, and only as far as needed: in replays it ended preemption and raised throughput where fewer slots made users wait.
"""

from __future__ import annotations

from trimtab_operator.tuner.moves import Move, Reason
from trimtab_operator.tuner.parameters import Parameter, typed
from trimtab_operator.tuner.rules.pressure import PRESSED_SHARE, evidence, expected_relief, is_pressed
from trimtab_operator.tuner.situation import Situation

STEP = 0.05  # of the KV cache
LEARN_SECONDS = 120.0  # during which a new tuner waits for enough lengths to predict
USUAL_MAXIMUM = 0.10  # above it, free blocks cost more than preemption; bounds may allow more


def raise_watermark(s: Situation) -> Move | None:
    """Raise the watermark: requests are preempted, the device has no headroom, and too much is admitted."""
    found = s.ranges.get(Parameter.WATERMARK)
    if found is None or not is_pressed(s) or _is_learning(s):
        return None
    bounds = s.settings.bounds.get(Parameter.WATERMARK)
    most = found.highest if bounds is not None and bounds.maximum is not None else min(found.highest, USUAL_MAXIMUM)
    after = min(most, typed(Parameter.WATERMARK, found.current + STEP))
    if after <= found.current or not found.is_live:
        return None
    expected = expected_relief(s, Parameter.WATERMARK, after)
    if expected is None:
        return None
    return Move(
        Reason.ADMITTED_TOO_EARLY,
        Parameter.WATERMARK,
        found.current,
        after,
        evidence(s),
        expected,
        f"less than {PRESSED_SHARE:.0%} of tokens recomputed, or headroom for more KV memory",
    )


def _is_learning(s: Situation) -> bool:
    """Return True if the effect on the given objectives will soon be predictable. Closed-loop clients refill the queue
    that a watermark should drain.
    """
    has_requests = s.objectives.are_given and (s.state.lengths.pairs or s.state.lengths.unfinished)
    return s.predictor is None and bool(has_requests) and s.state.demand.seen_seconds(2 * LEARN_SECONDS) < LEARN_SECONDS


def lower_watermark(s: Situation) -> Move | None:
    """Lower the watermark one step after a long time without preemption. Counterpart of `raise_watermark`."""
    found = s.ranges.get(Parameter.WATERMARK)
    start = float(s.state.starts.get(Parameter.WATERMARK, 0.0))
    if found is None or found.current <= start or s.quiet_seconds < s.settings.pace.quiet_seconds:
        return None
    after = max(start, float(typed(Parameter.WATERMARK, found.current - STEP)))
    if not found.allows(after):
        return None
    return Move(
        Reason.WATERMARK_NOT_NEEDED,
        Parameter.WATERMARK,
        found.current,
        after,
        {"quiet_seconds": round(s.quiet_seconds), "kv_peak": round(s.state.kv_peak, 4)},
        (),
        "a capacity preemption",
    )

"""Watermark: KV blocks that stay free when another request is admitted, so that running requests can grow.

vLLM's guide has no such parameter: it lowers `max_num_seqs` when the cache is too small, which "reduces the number of
concurrent requests in a batch, thereby requiring less KV cache space". A watermark does that only while the cache is
full, and only as far as needed: in replays it ended preemption and raised throughput where fewer slots made users wait.
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.moves import Expectation, Move, Reason
from trimtab_operator.tuner.parameters import Parameter, Value, typed
from trimtab_operator.tuner.rules.pressure import PRESSED_SHARE, evidence, expected_relief, is_pressed
from trimtab_operator.tuner.situation import Situation

STEP = 0.05  # of the KV cache
LEARN_SECONDS = 120.0  # during which a new tuner waits for enough lengths to predict
WORTH_A_STEP = 0.01  # of the deciding measure: a higher watermark must gain more than a lower one by this factor
USUAL_MAXIMUM = 0.10  # above it, free blocks cost more than preemption; bounds may allow more


def raise_watermark(s: Situation) -> Move | None:
    """Raise the watermark to the value with the best prediction: requests are preempted, the device has no headroom,
    and too much is admitted. Without predictions it is raised by one step.
    """
    found = s.ranges.get(Parameter.WATERMARK)
    if found is None or not is_pressed(s) or _is_learning(s):
        return None
    bounds = s.settings.bounds.get(Parameter.WATERMARK)
    most = found.highest if bounds is not None and bounds.maximum is not None else min(found.highest, USUAL_MAXIMUM)
    if most <= found.current or not found.is_live:
        return None
    best: tuple[Value, tuple[Expectation, ...]] | None = None
    for after in _steps(found.current, most) if s.predictor is not None else _steps(found.current, most)[:1]:
        expected = expected_relief(s, Parameter.WATERMARK, after)
        if expected is not None and (best is None or expected[-1].after > (1 + WORTH_A_STEP) * best[1][-1].after):
            best = after, expected
    if best is None:
        return None
    after, expected = best
    return Move(
        Reason.ADMITTED_TOO_EARLY,
        Parameter.WATERMARK,
        found.current,
        after,
        evidence(s),
        expected,
        f"less than {PRESSED_SHARE:.0%} of tokens recomputed, or headroom for more KV memory",
    )


def _steps(current: Value, most: Value) -> list[Value]:
    """Return the values above the present one, up to `most`."""
    count = math.ceil((most - current) / STEP - 1e-6)
    return [min(most, typed(Parameter.WATERMARK, current + STEP * (index + 1))) for index in range(count)]


def _is_learning(s: Situation) -> bool:
    """Return True if the effect will soon be predictable. Closed-loop clients refill the queue that a watermark should
    drain.
    """
    has_requests = s.state.lengths.pairs or s.state.lengths.unfinished
    is_known = s.predictor is not None and s.state.clients.are_known
    return not is_known and bool(has_requests) and s.state.demand.seen_seconds(2 * LEARN_SECONDS) < LEARN_SECONDS


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

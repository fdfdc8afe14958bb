"""KV memory: more of it where requests are preempted for want of room, back where it is not needed.

The guide: "Increase gpu_memory_utilization. […] By increasing utilization, you can provide more KV cache space."
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.knobs import Knob
from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason
from trimtab_operator.tuner.rules.pressure import PRESSED_SHARE, evidence, expected_relief, is_pressed
from trimtab_operator.tuner.situation import Range, Situation

STEPS = (0.35, 0.6, 1.0)  # of the headroom, smallest first: what is enough by prediction is taken
UNFORESEEN_STEP = 0.6  # of the headroom, where nothing can be predicted: steps taper towards the bound
LAST_STEP = 0.05  # of the device: with less headroom than this, one step takes the rest
SMALLEST_STEP = 0.001  # of the device: less headroom than this is none
SLACK_SHARE = 0.01  # of the device that stays free by the ledger
ENOUGH_SHARE = PRESSED_SHARE / 2  # of tokens computed twice, by prediction
RETURN_ROOM = 0.7  # of the KV cache at the start value: when no more than this was needed for long, it goes back


def grow_kv(s: Situation) -> Move | None:
    """Preemptions, and the device has headroom: the KV cache is too small."""
    found = s.ranges.get(Knob.GPU_MEMORY_UTILIZATION)
    if found is None or not is_pressed(s):
        return None
    room = _headroom(s, found)
    if room < SMALLEST_STEP or room * s.ledger.device_bytes < s.ledger.bytes_per_block:
        return None
    for after in _targets(s, float(found.current), room):
        gained = (s.blocks_at(after) - s.ledger.blocks_total) * s.ledger.block_size
        if gained <= 0:
            continue
        expected = expected_relief(s, Knob.GPU_MEMORY_UTILIZATION, after)
        if expected is None:
            continue
        tokens = Expectation(
            Measure.KV_TOKENS,
            s.ledger.kv_tokens,
            s.ledger.kv_tokens + gained,
            s.ledger.kv_tokens + 0.9 * gained,
            math.inf,
        )
        return Move(
            Reason.KV_CACHE_TOO_SMALL,
            Knob.GPU_MEMORY_UTILIZATION,
            found.current,
            after,
            {**evidence(s), "headroom_bytes": math.floor(room * s.ledger.device_bytes), "kv_tokens_gained": gained},
            (*expected, tokens),
            f"less than {PRESSED_SHARE:.0%} of the tokens computed twice",
        )
    return None


def _headroom(s: Situation, found: Range) -> float:
    """Share of the device by which the utilisation may rise: bounds, envelope, and what is free by the ledger."""
    room = found.can_rise
    if s.ledger.free_bytes is not None:
        room = min(room, s.ledger.free_bytes / s.ledger.device_bytes - SLACK_SHARE)
    return room


def _targets(s: Situation, current: float, room: float) -> list[float]:
    """Values to try: those that are enough by prediction, smallest first; where none is, the largest first."""
    if room <= LAST_STEP:
        return [_rounded(current + room, current)]
    values = [_rounded(current + share * room, current) for share in STEPS]
    if s.foresight is None:
        return [_rounded(current + UNFORESEEN_STEP * room, current)]
    enough = []
    for value in values:
        prediction = s.predicted(s.with_knob(Knob.GPU_MEMORY_UTILIZATION, value))
        if prediction is not None and prediction.recomputed_share <= ENOUGH_SHARE:
            enough.append(value)
    return enough or values[::-1]


def _rounded(utilization: float, above: float) -> float:
    """Down to two decimals, for people's sake, unless that would undo the step; then to the engine's four."""
    coarse = math.floor(utilization * 100 + 1e-9) / 100
    return coarse if coarse - above >= SMALLEST_STEP else math.floor(utilization * 10_000 + 1e-9) / 10_000


def shrink_kv(s: Situation) -> Move | None:
    """Memory above the start value that nobody has needed for long goes back. The twin of `grow_kv`."""
    found = s.ranges.get(Knob.GPU_MEMORY_UTILIZATION)
    start = s.memory.starts.get(Knob.GPU_MEMORY_UTILIZATION)
    if found is None or start is None or found.current <= start or not found.holds_load(start):
        return None
    if s.quiet_seconds < s.settings.pace.quiet_seconds or not s.observation.is_complete:
        return None
    needed = s.memory.kv_peak * s.ledger.blocks_total
    if needed > RETURN_ROOM * s.blocks_at(float(start)):
        return None
    return Move(
        Reason.KV_CACHE_LARGER_THAN_NEEDED,
        Knob.GPU_MEMORY_UTILIZATION,
        found.current,
        start,
        {
            "kv_peak": round(s.memory.kv_peak, 4),
            "quiet_seconds": round(s.quiet_seconds),
            "kv_tokens": s.ledger.kv_tokens,
        },
        (),
        "a preemption for want of room, or more of the cache in use",
    )

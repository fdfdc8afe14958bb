"""KV memory: raised when requests are preempted for capacity, lowered when it is not needed.

vLLM's guide: "Increase gpu_memory_utilization. […] By increasing utilization, you can provide more KV cache space."
"""

from __future__ import annotations

import math

from trimtab_operator.tuner.moves import Expectation, Measure, Move, Reason
from trimtab_operator.tuner.parameters import Parameter
from trimtab_operator.tuner.rules.pressure import PRESSED_SHARE, evidence, expected_relief, is_pressed
from trimtab_operator.tuner.situation import Range, Situation

STEPS = (0.35, 0.6, 1.0)  # of the headroom: the smallest that suffices by prediction is taken
UNPREDICTED_STEP = 0.6  # of the headroom, without predictions: steps taper towards the bound
LAST_STEP = 0.05  # of the device: less headroom is used in one step
SMALLEST_STEP = 0.001  # of the device: less headroom is ignored
SLACK_SHARE = 0.01  # of the device that stays free by the ledger
ENOUGH_SHARE = PRESSED_SHARE / 2  # predicted share of recomputed tokens that suffices
RETURN_ROOM = 0.7  # of the KV cache at the start value: if usage stays below it, memory is returned


def grow_kv(s: Situation) -> Move | None:
    """Raise KV memory: requests are preempted and the device has headroom."""
    found = s.ranges.get(Parameter.GPU_MEMORY_UTILIZATION)
    if found is None or not is_pressed(s):
        return None
    room = _headroom(s, found)
    if room < SMALLEST_STEP or room * s.ledger.device_bytes < s.ledger.bytes_per_block:
        return None
    for after in _targets(s, float(found.current), room):
        gained = (s.blocks_at(after) - s.ledger.blocks_total) * s.ledger.block_size
        if gained <= 0:
            continue
        expected = expected_relief(s, Parameter.GPU_MEMORY_UTILIZATION, after)
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
            Parameter.GPU_MEMORY_UTILIZATION,
            found.current,
            after,
            {**evidence(s), "headroom_bytes": math.floor(room * s.ledger.device_bytes), "kv_tokens_gained": gained},
            (*expected, tokens),
            f"less than {PRESSED_SHARE:.0%} of tokens recomputed",
        )
    return None


def _headroom(s: Situation, found: Range) -> float:
    """Return the share of the device by which the utilization may rise: bounds, engine limits and free memory."""
    room = found.can_rise
    if s.ledger.free_bytes is not None:
        room = min(room, s.ledger.free_bytes / s.ledger.device_bytes - SLACK_SHARE)
    return room


def _targets(s: Situation, current: float, room: float) -> list[float]:
    """Return values to try: those that suffice by prediction, smallest first; if none does, largest first."""
    if room <= LAST_STEP:
        return [_round_utilization(current + room, current)]
    values = [_round_utilization(current + share * room, current) for share in STEPS]
    if s.predictor is None:
        return [_round_utilization(current + UNPREDICTED_STEP * room, current)]
    enough = []
    for value in values:
        prediction = s.predict(s.with_parameter(Parameter.GPU_MEMORY_UTILIZATION, value))
        if prediction is not None and prediction.recomputed_share <= ENOUGH_SHARE:
            enough.append(value)
    return enough or values[::-1]


def _round_utilization(utilization: float, above: float) -> float:
    """Round down to two decimals for readability, unless that undoes the step; otherwise to the engine's four."""
    coarse = math.floor(utilization * 100 + 1e-9) / 100
    return coarse if coarse - above >= SMALLEST_STEP else math.floor(utilization * 10_000 + 1e-9) / 10_000


def shrink_kv(s: Situation) -> Move | None:
    """Return unneeded KV memory above the start value. Counterpart of `grow_kv`."""
    found = s.ranges.get(Parameter.GPU_MEMORY_UTILIZATION)
    start = s.state.starts.get(Parameter.GPU_MEMORY_UTILIZATION)
    if found is None or start is None or found.current <= start or not found.allows(start):
        return None
    if s.quiet_seconds < s.settings.pace.quiet_seconds or not s.observation.is_complete:
        return None
    needed = s.state.kv_peak * s.ledger.blocks_total
    if needed > RETURN_ROOM * s.blocks_at(float(start)):
        return None
    return Move(
        Reason.KV_CACHE_LARGER_THAN_NEEDED,
        Parameter.GPU_MEMORY_UTILIZATION,
        found.current,
        start,
        {
            "kv_peak": round(s.state.kv_peak, 4),
            "quiet_seconds": round(s.quiet_seconds),
            "kv_tokens": s.ledger.kv_tokens,
        },
        (),
        "a capacity preemption, or higher KV cache usage",
    )

"""The rules: what to do about preemptions. Priority order, one named function each, no clock and no client.

From the optimisation guide: "Increase gpu_memory_utilization … Decrease max_num_seqs or max_num_batched_tokens".
The first rule that has something to move wins; when none has, only more replicas help, and that is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab_operator.tuner.preemptions.diagnosis import Situation
from trimtab_operator.tuner.preemptions.observation import Knob, Value
from trimtab_operator.tuner.preemptions.state import Reason

GROWTH_MARGIN = 1.5  # a request seen in mid-life grows on: ask for half as much KV again
RAISE_AT_LEAST = 0.35  # of the headroom, so that a few steps reach the bound
RAISE_AT_MOST = 0.6  # of the headroom, so that steps taper towards it
LAST_STEP = 0.05  # of the device: with less headroom than this, one step takes the rest
SMALLEST_RAISE = 0.001  # of the device: less headroom than this is none
SEQS_CUT = 0.75  # of the requests that the KV cache holds: the usual multiplicative decrease
TOKENS_CUT = 0.5  # of the token budget: each step changes how much one prefill chunk can claim


@dataclass(frozen=True, slots=True)
class Move:
    """A chosen change with the numbers behind it. `knob` None: nothing is left to move."""

    reason: Reason
    knob: Knob | None
    before: Value | None
    after: Value | None
    evidence: Mapping[str, float]


def raise_gpu_memory_utilization(situation: Situation) -> Move | None:
    """Preemptions and headroom on the device: a larger KV cache, sized by what the waiting requests would need."""
    knob = situation.ranges.get(Knob.GPU_MEMORY_UTILIZATION)
    engine = situation.worst.latest
    if knob is None or knob.can_rise < SMALLEST_RAISE or knob.can_rise * engine.device_bytes < engine.bytes_per_block:
        return None
    needed = missing_blocks(situation) * engine.bytes_per_block / engine.device_bytes
    step = min(max(needed, RAISE_AT_LEAST * knob.can_rise), RAISE_AT_MOST * knob.can_rise)
    after = knob.highest if knob.can_rise <= LAST_STEP else round_down(knob.current + step, above=knob.current)
    gained_bytes = (after - knob.current) * engine.device_bytes
    return Move(
        Reason.KV_CACHE_TOO_SMALL,
        Knob.GPU_MEMORY_UTILIZATION,
        knob.current,
        after,
        evidence_of(situation)
        | {
            "headroom_bytes": math.floor(knob.can_rise * engine.device_bytes),
            "expected_kv_tokens": math.floor(gained_bytes / engine.bytes_per_block) * engine.block_size,
        },
    )


def missing_blocks(situation: Situation) -> float:
    """KV blocks that the requests which may run at once would need beyond those there are; 0 or more."""
    seen = situation.worst
    seats = situation.ranges.get(Knob.MAX_NUM_SEQS)
    requests = min(seen.demand, seats.current) if seats is not None else seen.demand
    return max(0.0, requests * seen.blocks_per_request * GROWTH_MARGIN - seen.latest.blocks_total)


def round_down(utilization: float, *, above: float) -> float:
    """To two decimals, for people's sake, unless that would undo the step; then to the engine's four."""
    coarse = math.floor(utilization * 100 + 1e-9) / 100
    return coarse if coarse - above >= SMALLEST_RAISE else math.floor(utilization * 10_000 + 1e-9) / 10_000


def lower_max_num_seqs(situation: Situation) -> Move | None:
    """Preemptions and no headroom: admit fewer requests at once, starting from those that the KV cache really holds."""
    knob = situation.ranges.get(Knob.MAX_NUM_SEQS)
    if knob is None:
        return None
    held = requests_held(situation)
    floor = max(int(knob.lowest), requests_that_always_fit(situation), 1)
    after = max(floor, math.floor(SEQS_CUT * min(knob.current, held)))
    if after >= knob.current or not knob.is_live:
        return None
    return Move(
        Reason.TOO_MANY_SEQS,
        Knob.MAX_NUM_SEQS,
        knob.current,
        after,
        evidence_of(situation) | {"requests_held": held, "blocks_per_request": situation.worst.blocks_per_request},
    )


def requests_held(situation: Situation) -> int:
    """How many requests of the observed size the KV cache holds: no fewer than it was seen to hold, and at least 1."""
    seen = situation.worst
    fit = seen.latest.blocks_total / seen.blocks_per_request if seen.blocks_per_request > 0 else seen.running
    return max(1, math.floor(fit), math.floor(seen.running_when_full))


def requests_that_always_fit(situation: Situation) -> int:
    """With this many requests of full length nothing is ever preempted, so lowering further gains nothing."""
    engine = situation.worst.latest
    if situation.max_model_len is None:
        return 1
    return engine.blocks_total // math.ceil(situation.max_model_len / engine.block_size)


def lower_max_num_batched_tokens(situation: Situation) -> Move | None:
    """The sequences are at their floor: smaller steps, so that prefill claims KV blocks more slowly."""
    knob = situation.ranges.get(Knob.MAX_NUM_BATCHED_TOKENS)
    if knob is None or knob.can_fall < 1:
        return None
    after = max(int(knob.lowest), math.floor(TOKENS_CUT * knob.current), 1)
    if after >= knob.current:
        return None
    return Move(Reason.TOO_MANY_TOKENS, Knob.MAX_NUM_BATCHED_TOKENS, knob.current, after, evidence_of(situation))


def saturated(situation: Situation) -> Move:
    """Every knob is at its bound: only more replicas (or a wider layout) help."""
    return Move(Reason.SATURATED, None, None, None, evidence_of(situation))


def evidence_of(situation: Situation) -> dict[str, float]:
    seen = situation.worst
    return {
        "preemptions": seen.preemptions,
        "seconds": round(seen.seconds, 1),
        "kv_usage": round(seen.kv_usage_peak, 4),
        "running": round(seen.running, 2),
        "waiting": round(seen.waiting, 2),
        "kv_tokens": seen.latest.blocks_total * seen.latest.block_size,
    }


RULES: tuple[Callable[[Situation], Move | None], ...] = (
    raise_gpu_memory_utilization,
    lower_max_num_seqs,
    lower_max_num_batched_tokens,
    saturated,
)


def decide(situation: Situation) -> Move:
    """The first rule that has something to say. `saturated` always has."""
    return next(move for rule in RULES if (move := rule(situation)) is not None)

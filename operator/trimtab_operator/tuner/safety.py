"""Safety, as pure rules that come before all others: bounds, crashes, memory that others took, what engines refuse.

They act at once, need no window of evidence and wait for no trial. Whatever raises waits for them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from trimtab_operator.tuner.knobs import Knob, Value, Values, is_same, typed
from trimtab_operator.tuner.moves import Move, Reason
from trimtab_operator.tuner.observation import Observation, Seen
from trimtab_operator.tuner.samples import Config
from trimtab_operator.tuner.settings import Bounds, Settings
from trimtab_operator.tuner.state import Memory, Pin

LEAST_FREE_SHARE = 0.005  # of the device: with less free, somebody else's memory has grown into ours
WANTED_FREE_SHARE = 0.01
KEEP_CRASHES = 8


def clamped(knob: Knob, value: float, *ranges: tuple[float | None, float | None]) -> Value:
    """The nearest value that all of these ranges allow; of two that contradict each other the last wins."""
    for low, high in ranges:
        if high is not None:
            value = min(value, high)
        if low is not None:
            value = max(value, low)
    return typed(knob, value)


def out_of_bounds(memory: Memory, settings: Settings, observation: Observation) -> list[Move]:
    """Applied values that the owner's bounds, or every engine's, no longer allow go to the nearest one that they do."""
    moves = []
    for knob, value in memory.applied.items():
        bounds = settings.bounds.get(knob, Bounds())
        inside = clamped(knob, value, _of_engines(observation, knob), (bounds.minimum, bounds.maximum))
        if not is_same(inside, value):
            moves.append(Move(Reason.BOUNDS_CHANGED, knob, value, inside))
    return moves


def _of_engines(observation: Observation, knob: Knob) -> tuple[float | None, float | None]:
    """The widest range of a count that an engine allows; shares depend on each engine's own memory and are clamped
    where they are sent."""
    fields = [s.config.fields[knob] for s in observation.replicas if s.config is not None and knob in s.config.fields]
    if not fields or knob.is_share:
        return None, None
    return min(field.minimum for field in fields), max(field.maximum for field in fields)


def crashed(memory: Memory, observation: Observation, *, now: float, pin_seconds: float) -> tuple[Memory, list[Move]]:
    """An engine that ran out of memory, or crashed, while values were above their starts: all of them go back at once.

    Raising is avoided for `pin_seconds`, and altogether once the crash budget is spent. It does not matter who was
    there to see the crash, nor how long ago the raise was: which engines were told the values is remembered.
    """
    victims = [seen for seen in observation.replicas if seen.has_crashed or _has_ended_since(memory, seen)]
    raised = {knob: value for knob, value in memory.applied.items() if is_above_start(memory, knob, value)}
    if not victims or not raised:
        return memory, []
    evidence = {"crashes": len(memory.crashes) + 1, "out_of_memory": float(any(s.was_oom_killed for s in victims))}
    codes = [s.exit_code for s in victims if s.exit_code is not None and not s.was_oom_killed]
    evidence |= {"exit_code": codes[0]} if codes else {}
    moves = [Move(Reason.RESTARTED_AFTER, knob, value, memory.starts[knob], evidence) for knob, value in raised.items()]
    pins = tuple(Pin(knob, value, memory.starts[knob], now + pin_seconds) for knob, value in raised.items())
    crashes = (*memory.crashes, now)[-KEEP_CRASHES:]
    return replace(memory, crashes=crashes, pins=(*memory.pins, *pins), trial=None), moves


def _has_ended_since(memory: Memory, seen: Seen) -> bool:
    """Whether it ended after it was told values above the start ones."""
    return seen.restarts > memory.raised.get(seen.instance, seen.restarts)


def engines_raised(memory: Memory, observation: Observation, patches: Mapping[str, Values]) -> dict[str, int]:
    """Engines that run values above the start ones, or are about to be told to, by instance: how often each has ended.

    One that cannot be read now is what it was. As long as no value is above its start none was told any: an owner who
    lowers a start replaces the engines that still run the old one.
    """
    if not any(is_above_start(memory, knob, value) for knob, value in memory.applied.items()):
        return {}
    found = {}
    for seen in observation.replicas:
        if seen.config is None:
            known = memory.raised.get(seen.instance)
            is_same_engine = known == seen.restarts
        else:
            runs = {**seen.config.applied, **patches.get(seen.replica, {})}
            is_same_engine = any(is_above_start(memory, knob, value) for knob, value in runs.items())
        if seen.instance and is_same_engine:
            found[seen.instance] = seen.restarts
    return found


def is_budget_spent(memory: Memory, settings: Settings) -> bool:
    """Whether engines have crashed above the start values so often that nothing is raised above them any more."""
    return len(memory.crashes) >= settings.pace.crash_budget


def standing_pins(memory: Memory, settings: Settings) -> tuple[Pin, ...]:
    """What is avoided now: what did harm, for its time, and everything above the starts once the budget is spent."""
    if not is_budget_spent(memory, settings):
        return memory.pins
    starts = {knob: start for knob, start in memory.starts.items() if knob is not Knob.WATERMARK}
    return (*memory.pins, *(Pin(knob, start + 1, start, math.inf) for knob, start in starts.items()))


def is_above_start(memory: Memory, knob: Knob, value: Value) -> bool:
    """Whether a value is above the one that its owner, or the engine itself, starts with, and so may cost memory."""
    start = memory.starts.get(knob)
    return knob is not Knob.WATERMARK and start is not None and value > start and not is_same(value, start)


def memory_taken(memory: Memory, observation: Observation) -> list[Move]:
    """The device is nearly full by the ledger, with our memory above its start: others have grown, and we give way."""
    knob = Knob.GPU_MEMORY_UTILIZATION
    value, start = memory.applied.get(knob), memory.starts.get(knob)
    if value is None or start is None or value <= start:
        return []
    shares = [_free_share(seen) for seen in observation.trusted]
    free = min((share for share in shares if share is not None), default=None)
    if free is None or free >= LEAST_FREE_SHARE:
        return []
    after = max(float(start), float(typed(knob, value - (WANTED_FREE_SHARE - free))))
    return [Move(Reason.MEMORY_TAKEN, knob, value, after, {"free_share": round(free, 5)})]


def _free_share(seen: Seen) -> float | None:
    ledger = seen.ledger
    return None if ledger is None or ledger.free_bytes is None else ledger.free_bytes / ledger.device_bytes


def possible(config: Config, wanted: Values) -> dict[Knob, Value]:
    """What one engine can be asked to run: live fields that differ, each clamped to the nearest that it takes."""
    fields: dict[Knob, Value] = {}
    for knob, value in wanted.items():
        limits, runs = config.fields.get(knob), config.applied.get(knob)
        if limits is None or runs is None or not limits.live:
            continue
        inside = clamped(knob, value, (limits.minimum, limits.maximum))
        if not is_same(inside, runs):
            fields[knob] = inside
    return fields

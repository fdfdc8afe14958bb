"""Rates and windows of `spec.scaling.behavior`, with the semantics of autoscaling/v2.

Scaling up takes the lowest recommendation of its window, scaling down the highest of its own; policies then limit the
change within their periods, counted from the events of that period. Source: Kubernetes' horizontal controller.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Select(StrEnum):
    """The policy that decides when several apply."""

    MAX = "Max"
    MIN = "Min"
    DISABLED = "Disabled"


class Unit(StrEnum):
    """Unit of a policy's value."""

    PODS = "Pods"
    PERCENT = "Percent"


@dataclass(frozen=True, slots=True)
class Policy:
    """At most `value` replicas, or percent of them, within a period."""

    unit: Unit
    value: int
    period_seconds: float


@dataclass(frozen=True, slots=True)
class Rules:
    """One direction. `stabilization_seconds` None uses the tuner's own hold time."""

    stabilization_seconds: float | None = None
    select: Select = Select.MAX
    policies: tuple[Policy, ...] = ()


@dataclass(frozen=True, slots=True)
class Behavior:
    """Both directions."""

    up: Rules = Rules()
    down: Rules = Rules()


@dataclass(frozen=True, slots=True)
class ScaleEvent:
    """Change of the count by `change` replicas at a time."""

    at: float
    change: int


def stabilize(
    behavior: Behavior, current: int, wanted: Sequence[tuple[float, int]], *, now: float, tuner_hold: float
) -> int:
    """Return the count after both windows. `wanted` are recommendations by time, the newest last."""
    newest = wanted[-1][1]
    up_window = behavior.up.stabilization_seconds or 0.0
    down_window = tuner_hold if behavior.down.stabilization_seconds is None else behavior.down.stabilization_seconds
    lowest = min((count for at, count in wanted if at >= now - up_window), default=newest)
    highest = max((count for at, count in wanted if at >= now - down_window), default=newest)
    result = current
    if result < min(newest, lowest):
        result = min(newest, lowest)
    if result > max(newest, highest):
        result = max(newest, highest)
    return result


def limit_change(behavior: Behavior, current: int, target: int, events: Sequence[ScaleEvent], *, now: float) -> int:
    """Return the count nearest to `target` that the policies allow now."""
    if target > current:
        return min(target, _ceiling(behavior.up, current, events, now))
    if target < current:
        return max(target, _floor(behavior.down, current, events, now))
    return target


def _ceiling(rules: Rules, current: int, events: Sequence[ScaleEvent], now: float) -> int:
    if rules.select is Select.DISABLED:
        return current
    if not rules.policies:
        return 1 << 30
    limits = []
    for policy in rules.policies:
        recent = [event.change for event in events if event.at > now - policy.period_seconds]
        start = current - sum(change for change in recent if change > 0) - sum(c for c in recent if c < 0)
        if policy.unit is Unit.PODS:
            limits.append(start + policy.value)
        else:
            limits.append(math.ceil(start * (1 + policy.value / 100)))
    return max(current, max(limits) if rules.select is Select.MAX else min(limits))


def _floor(rules: Rules, current: int, events: Sequence[ScaleEvent], now: float) -> int:
    if rules.select is Select.DISABLED:
        return current
    if not rules.policies:
        return 0
    limits = []
    for policy in rules.policies:
        recent = [event.change for event in events if event.at > now - policy.period_seconds]
        start = current - sum(change for change in recent if change > 0) - sum(c for c in recent if c < 0)
        if policy.unit is Unit.PODS:
            limits.append(start - policy.value)
        else:
            limits.append(math.floor(start * (1 - policy.value / 100)))
    return min(current, min(limits) if rules.select is Select.MAX else max(limits))

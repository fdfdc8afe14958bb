"""Suppression of repeated applies of children that an admission policy reverts. Pure.

A child that was applied unchanged and differs in the same field again and again is applied only every RETRY_SECONDS,
and reported once. If it was correct in between, a user edits it, and it is corrected each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab_operator.observed.actions import Action, Apply, Event
from trimtab_operator.resource.canonical_json import compact

MAX_REPEATED_APPLIES = 4  # consecutive applies before the back-off
RETRY_SECONDS = 600.0  # the policy may have been removed by then


@dataclass(frozen=True, slots=True)
class RepeatedApply:
    """How often a child was applied for the same difference, and when last (Unix time)."""

    digest: str
    where: str
    times: int
    at: float


@dataclass(frozen=True, slots=True)
class FilteredActions:
    """Actions to execute, the updated repeat counts, and Events to emit."""

    actions: tuple[Action, ...]
    repeated_applies: Mapping[str, RepeatedApply]
    events: tuple[Event, ...]


def suppress_repeated_applies(
    actions: Iterable[Action], known: Mapping[str, RepeatedApply], *, now: float
) -> FilteredActions:
    """Drop applies that were repeated without effect. Counts of children without an action are forgotten."""
    kept: list[Action] = []
    repeated_applies: dict[str, RepeatedApply] = {}
    events: list[Event] = []
    for action in actions:
        if not isinstance(action, Apply) or action.is_new:
            kept.append(action)
            continue
        digest = hashlib.sha256(compact(action.manifest).encode()).hexdigest()
        name = f"{action.manifest['kind']} {action.manifest['metadata']['name']}"
        before = known.get(name)
        is_same = before is not None and (before.digest, before.where) == (digest, action.reason)
        if before is None or not is_same:
            kept.append(action)
            repeated_applies[name] = RepeatedApply(digest, action.reason, 1, now)
        elif before.times < MAX_REPEATED_APPLIES or now - before.at >= RETRY_SECONDS:
            kept.append(action)
            repeated_applies[name] = RepeatedApply(digest, action.reason, before.times + 1, now)
        else:
            repeated_applies[name] = before
            if before.times == MAX_REPEATED_APPLIES:
                repeated_applies[name] = RepeatedApply(before.digest, before.where, MAX_REPEATED_APPLIES + 1, before.at)
                events.append(_conflict_event(name, action))
    return FilteredActions(tuple(kept), repeated_applies, tuple(events))


def _conflict_event(name: str, action: Apply) -> Event:
    message = (
        f"{name}: {action.reason} right after each of {MAX_REPEATED_APPLIES} applies; an admission policy or webhook"
        f" keeps reverting this object; retrying every {RETRY_SECONDS / 60:.0f} minutes"
    )
    return Event("Warning", "ApplyConflict", message, name)

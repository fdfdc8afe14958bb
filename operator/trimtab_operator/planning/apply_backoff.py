"""Children that are rewritten whenever they are applied: a policy at admission wants them otherwise. Pure.

Applying them for ever would help nobody. So a child that was applied as it is wanted, and that differs at the same
place again and again, is left alone for a while and told once. One that was as wanted in between is another matter:
somebody edits it, and it is put back each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trimtab_operator.observed.actions import Action, Apply, Note
from trimtab_operator.resource.canonical_json import compact

MAX_TIMES = 4  # in a row, before it is given up
RETRY_SECONDS = 600.0  # the policy may be gone by then


@dataclass(frozen=True, slots=True)
class Futile:
    """How often a child was applied for the same difference, and when last (Unix time)."""

    digest: str
    where: str
    times: int
    at: float


@dataclass(frozen=True, slots=True)
class Sifted:
    """The actions that are worth their while, what is remembered of the children, and what is told."""

    actions: tuple[Action, ...]
    futile: Mapping[str, Futile]
    notes: tuple[Note, ...]


def sift(actions: Iterable[Action], known: Mapping[str, Futile], *, now: float) -> Sifted:
    """Leave out what has been applied in vain. A child that is no longer among the actions is forgotten."""
    kept: list[Action] = []
    futile: dict[str, Futile] = {}
    notes: list[Note] = []
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
            futile[name] = Futile(digest, action.reason, 1, now)
        elif before.times < MAX_TIMES or now - before.at >= RETRY_SECONDS:
            kept.append(action)
            futile[name] = Futile(digest, action.reason, before.times + 1, now)
        else:
            futile[name] = before
            if before.times == MAX_TIMES:
                futile[name] = Futile(before.digest, before.where, MAX_TIMES + 1, before.at)
                notes.append(_note(name, action))
    return Sifted(tuple(kept), futile, tuple(notes))


def _note(name: str, action: Apply) -> Note:
    message = (
        f"{name} was applied {MAX_TIMES} times, and each time {action.reason} at once: a policy, or a webhook, rewrites"
        f" it; it is left as it is and tried again every {RETRY_SECONDS / 60:.0f} minutes"
    )
    return Note("Warning", "AppliedInVain", message, name)

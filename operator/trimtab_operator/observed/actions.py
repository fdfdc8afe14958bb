"""What a turn can do, as values: to the children of a resource, to its engines, and for whoever reads its Events."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from trimtab_operator.observed.engines import Target
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.tuner.knobs import Value

MAX_EVENT_MESSAGE = 1024  # characters: the API server refuses longer ones

LiveValues = Mapping[str, Value | str]
"""Live fields of an engine, by their names in its admin API."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply this. `is_new` says that no such child was seen. `otherwise` is applied in its place where the
    API server calls it invalid."""

    manifest: Manifest
    is_new: bool
    reason: str
    otherwise: Manifest | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete this child, if it still is the one that was seen."""

    kind: str
    name: str
    uid: str
    reason: str
    grace_seconds: int | None = None
    """None: the child's own. 0 does not wait for its node, which may be gone."""
    budget: str | None = None
    """The PodDisruptionBudget that is asked first: while it has nobody to spare, nothing is deleted. None: none is."""


Action = Apply | Delete


@dataclass(frozen=True, slots=True)
class Patch:
    """Set live fields of the engine of one group, if its configuration still is of generation `if_match`. `otherwise`
    is set in their place as long as the engine has refused them."""

    target: Target
    fields: LiveValues
    if_match: int
    otherwise: LiveValues | None = None


@dataclass(frozen=True, slots=True)
class Note:
    """An Event to be told: its type (Normal or Warning), reason and message, and what tells it from others of the same
    text."""

    type: str
    reason: str
    message: str
    key: str = ""


def note_of(action: Action) -> Note | None:
    """What is told of an action that was carried out: replicas that come, change and go; nothing of the rest."""
    if isinstance(action, Delete):
        if action.kind != "StatefulSet":
            return None
        return Note("Normal", "ReplicaRemoved", f"{action.name}: {action.reason}; it drains", action.uid)
    name = action.manifest["metadata"]["name"]
    if action.manifest["kind"] != "StatefulSet":
        return None
    if action.is_new:
        return Note("Normal", "ReplicaCreated", f"{name} was created")
    return Note("Normal", "ReplicaUpdated", f"{name} was brought back in line: {action.reason}")


def joined(notes: Iterable[Note]) -> tuple[Note, ...]:
    """The same words in as few Events as hold them: what was told of several replicas for one reason is one Event."""
    found: list[Note] = []
    for note in notes:
        fellow = next((n for n in reversed(found) if (n.type, n.reason) == (note.type, note.reason)), None)
        if fellow is None or len(fellow.message) + len(note.message) + 2 > MAX_EVENT_MESSAGE:
            found.append(note)
        elif (note.message, note.key) != (fellow.message, fellow.key):
            both = replace(
                fellow, message=f"{fellow.message}; {note.message}", key=",".join(filter(None, (fellow.key, note.key)))
            )
            found[found.index(fellow)] = both
    return tuple(found)


def delete_of(
    kind: str, manifest: Manifest, reason: str, *, grace_seconds: int | None = None, budget: str | None = None
) -> Delete:
    """Delete what was seen."""
    metadata = manifest["metadata"]
    return Delete(kind, str(metadata["name"]), str(metadata.get("uid", "")), reason, grace_seconds, budget)

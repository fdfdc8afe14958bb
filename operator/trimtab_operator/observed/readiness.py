"""Whether a replica counts as ready: its pods are, and its engine runs the layout that was asked for. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.phases import EngineView


class Readiness(Enum):
    """How far a replica may be believed to serve as asked."""

    NOT_READY = auto()  # some pod of it is not
    UNVERIFIED = auto()  # its pods are; its engine has not said yet what it runs
    OTHER_LAYOUT = auto()  # its engine runs another layout than the spec asks for
    READY = auto()


def readiness_of(
    group: Group,
    engines: Mapping[str, EngineView] | None,
    *,
    revision: str,
    wanted: Degrees,
    previous: Mapping[str, Any],
) -> Readiness:
    """`engines` is what engines said in this tick (None: nobody was asked), `revision` what the spec renders to,
    `previous` the status so far.

    A replica of another revision was asked for something else: its pods alone are judged. So is one that was ready
    before and does not answer now: a busy engine is not a wrong one.
    """
    if not group.is_ready:
        return Readiness.NOT_READY
    if engines is None or group.revision != revision:
        return Readiness.READY
    reported = engines.get(group.name, EngineView()).layout
    if reported is None:
        return Readiness.READY if _was_ready(group, previous) else Readiness.UNVERIFIED
    return Readiness.READY if reported == wanted else Readiness.OTHER_LAYOUT


def reported_layouts(
    groups: Iterable[Group], engines: Mapping[str, EngineView] | None, revision: str
) -> Iterator[tuple[str, Degrees]]:
    """What the ready replicas of the present revision report, by name."""
    for group in groups:
        view = (engines or {}).get(group.name)
        if group.is_ready and group.revision == revision and view is not None and view.layout is not None:
            yield group.name, view.layout


def _was_ready(group: Group, previous: Mapping[str, Any]) -> bool:
    entries = previous.get("groups") or []
    same = (e for e in entries if e.get("name") == group.name and e.get("revision") == group.revision)
    return any(entry.get("ready") is True for entry in same)

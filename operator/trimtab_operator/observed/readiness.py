"""Readiness of a replica: its pods are Ready and its engine runs the wanted layout. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from typing import Any

from trimtab_operator.layout.degrees import Degrees
from trimtab_operator.observed.groups import Group
from trimtab_operator.observed.phases import EngineView


class Readiness(Enum):
    """Readiness of a replica, including its layout."""

    NOT_READY = auto()  # some pod is not Ready
    UNVERIFIED = auto()  # its pods are Ready; its engine has not reported a layout yet
    OTHER_LAYOUT = auto()  # its engine runs another layout than the spec
    READY = auto()


def readiness_of(
    group: Group,
    engines: Mapping[str, EngineView] | None,
    *,
    revision: str,
    wanted: Degrees,
    previous: Mapping[str, Any],
) -> Readiness:
    """Return the readiness of a group.

    `engines` holds this reconcile's reports (None if engines were not polled), `revision` is the revision of the spec,
    and `previous` is the current status.

    A replica of another revision is judged by its pods only, because its layout may differ on purpose. So is one that
    was ready before and did not answer this time: a busy engine is not a wrong one.
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
    """Yield the name and layout of each ready replica of `revision` that reports one."""
    for group in groups:
        view = (engines or {}).get(group.name)
        if group.is_ready and group.revision == revision and view is not None and view.layout is not None:
            yield group.name, view.layout


def _was_ready(group: Group, previous: Mapping[str, Any]) -> bool:
    entries = previous.get("groups") or []
    same = (e for e in entries if e.get("name") == group.name and e.get("revision") == group.revision)
    return any(entry.get("ready") is True for entry in same)

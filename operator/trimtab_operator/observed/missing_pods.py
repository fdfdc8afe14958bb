"""Pods that a StatefulSet does not get: a quota or a policy refuses them, so that there is no pod to look at. Pure.

A StatefulSet has no condition that would say so. What the API server said stands in Events, which go with time and are
not made at every attempt: that pods are missing is seen in the pods, and only the words are taken from there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from trimtab_operator.observed.groups import Group, Missing
from trimtab_operator.resource.manifest import Manifest

SOON_SECONDS = 5.0  # a StatefulSet makes its pods within a second; what takes longer was refused
WORDS_SECONDS = 60.0  # what was refused is read again so often: the reason may be another one by now
REFUSED_CREATION = "FailedCreate"  # the reason of these Events
_BEFORE_THE_WORDS = " failed error: "  # create Pod NAME in StatefulSet NAME failed error: what the API server said


def missing_pods(groups: Iterable[Group], known: Mapping[str, Missing], *, now: float) -> dict[str, Missing]:
    """Find, by name, the groups that have fewer pods than they ask for, and since when, by the operator's own clock.

    One that still restarts may have to wait for the pods that go. `now` is Unix time.
    """
    found = {}
    for group in groups:
        before = known.get(group.name)
        if len(group.pods) < group.num_pods and not group.is_terminating:
            is_same = before is not None and before.num_pods == len(group.pods)
            found[group.name] = before if before is not None and is_same else Missing(now, len(group.pods))
    return found


def wants_words(missing: Missing, *, now: float) -> bool:
    """Whether it is time to look what was refused."""
    if missing.read_at is not None:
        return now - missing.read_at >= WORDS_SECONDS
    return now - missing.since >= SOON_SECONDS


def with_words(
    groups: Iterable[Group], known: Mapping[str, Missing], events: Iterable[Manifest], *, now: float
) -> dict[str, Missing]:
    """What is known, with what the API server said of each group's pods last."""
    said = list(events)
    missing = {group.name: (group, known[group.name]) for group in groups if group.name in known}
    return {name: replace(found, words=_words(group, said), read_at=now) for name, (group, found) in missing.items()}


def _words(group: Group, events: Iterable[Manifest]) -> str | None:
    names = {stateful_set["metadata"]["name"] for stateful_set in group.stateful_sets}
    said = [
        (str(event.get("lastTimestamp") or ""), str(event.get("message") or "").rpartition(_BEFORE_THE_WORDS)[2])
        for event in events
        if (event.get("involvedObject") or {}).get("name") in names
    ]
    return max(said)[1] if said else None


def missing_sentence(group: Group) -> str:
    """How many pods are missing, and why, as far as it is known."""
    missing = group.num_pods - len(group.pods)
    words = None if group.missing is None else group.missing.words
    which = "the pod is" if group.num_pods == 1 else f"{missing} of {group.num_pods} pods are"
    return f"{which} not created yet" + (f": {words}" if words else "")

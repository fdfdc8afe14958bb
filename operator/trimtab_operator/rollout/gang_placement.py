"""Groups that race for the last GPUs: who has only some of its pods placed gives them back. Pure.

Kubernetes places pods one by one. Two groups of two pods that race for two GPUs may get one each, and would wait for
each other for ever. So a group that has been partly placed for too long gives its pods back, and tries again after a
backoff that grows and that differs from group to group. The oldest of those that are partly placed is patient, the
others soon give way to it. A group of which no pod is placed holds nothing, and simply waits. A quota is such a
resource, too: what it refuses is never created, and what was created holds a part of it, placed or not.

A hold is for what was asked for then: an edit of the resource, or a change that is taken back, ends it, and the group
tries again at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from trimtab_operator.builders.stateful_set import GAVE_BACK_ANNOTATION, Held
from trimtab_operator.observed.groups import Group, Observed, groups_of
from trimtab_operator.observed.hold import MAX_BACKOFF_SECONDS, Hold, hold_of
from trimtab_operator.observed.missing_pods import missing_sentence
from trimtab_operator.observed.phases import is_placed
from trimtab_operator.observed.pods import node_of, placed_since, unschedulable, unschedulable_since
from trimtab_operator.resource.manifest import Manifest

PATIENCE_SECONDS = 120.0  # of the oldest: a node may be on its way
PATIENCE_BESIDE_AN_OLDER_SECONDS = 20.0  # the scheduler has looked at every pod several times by then
FIRST_BACKOFF_SECONDS = 30.0

Age = tuple[str, str, str]
"""(creation time, namespace, name): the smaller, the older."""


def is_partly_placed(group: Group) -> bool:
    """Whether it holds for some of its pods what another one lacks: a node, or a part of a quota."""
    if 0 < len(group.pods) < group.num_pods:
        return True
    return any(node_of(pod) for pod in group.pods) and any(unschedulable(pod) for pod in group.pods)


def partly_placed_since(group: Group) -> datetime | None:
    """Since when it holds something for one pod and lacks the same for another; None while it does not."""
    stuck = [when for pod in group.pods if (when := unschedulable_since(pod)) is not None]
    placed = [when for pod in group.pods if (when := placed_since(pod)) is not None]
    since = [max(min(stuck), min(placed))] if stuck and placed else []
    if group.missing is not None and group.pods:
        since.append(datetime.fromtimestamp(group.missing.since, UTC))
    return min(since, default=None)


def age_of(group: Group) -> Age:
    metadata = group.stateful_set["metadata"]
    return str(metadata.get("creationTimestamp", "")), str(metadata.get("namespace", "")), group.name


def ages_of_partly_placed(stateful_sets: Iterable[Manifest], pods: Iterable[Manifest]) -> tuple[Age, ...]:
    """The ages of all groups, of whatever resource, that are partly placed."""
    sets, owned_pods = _by_resource(stateful_sets), _by_resource(pods)
    ages = []
    for key, own in sets.items():
        observed = Observed(stateful_sets=tuple(own), pods=tuple(owned_pods.get(key, ())))
        ages += [age_of(group) for group in groups_of(observed) if is_partly_placed(group)]
    return tuple(ages)


def _by_resource(manifests: Iterable[Manifest]) -> Mapping[tuple[str, str], list[Manifest]]:
    found: dict[tuple[str, str], list[Manifest]] = {}
    for manifest in manifests:
        metadata = manifest["metadata"]
        name = str((metadata.get("labels") or {}).get("trimtab.dev/deployment", ""))
        found.setdefault((str(metadata.get("namespace", "")), name), []).append(manifest)
    return found


def holds(groups: Iterable[Group], rivals: Iterable[Age], now: datetime, *, asked: str | None) -> dict[int, Hold]:
    """Find, by ordinal, the groups that hold no pods at `now` or remember that they did. Groups of one pod never do.

    `asked` names what is asked for now: another one than that of a hold ends it. None: nobody asks now.
    """
    oldest = min(rivals, default=None)
    found = {}
    for group in groups:
        if group.worker_set is None:
            continue
        hold = _hold(group, hold_of(group), oldest, now, asked)
        if hold is not None:
            found[group.ordinal] = hold
    return found


def _hold(group: Group, before: Hold | None, oldest: Age | None, now: datetime, asked: str | None) -> Hold | None:
    if before is not None and before.is_on(now):
        if asked is None or asked == before.asked:
            return before
        return replace(before, retry_at=now.replace(microsecond=0), asked=asked)
    if is_placed(group):
        return None
    since = partly_placed_since(group)
    if since is None:
        return before
    is_oldest = oldest is None or age_of(group) <= oldest
    patience = PATIENCE_SECONDS if is_oldest else PATIENCE_BESIDE_AN_OLDER_SECONDS
    if (now - since).total_seconds() < patience:
        return before
    count = 1 if before is None else before.count + 1
    retry_at = now + timedelta(seconds=backoff_seconds(group, count))
    return Hold(count, retry_at.replace(microsecond=0), _why(group), asked or "")


def _why(group: Group) -> str:
    """Which of its pods cannot be had, in the words of who refuses it."""
    said = next((said for pod in group.pods if (said := unschedulable(pod))), None)
    return said or missing_sentence(group)


def held_groups(groups: Iterable[Group], kept: Mapping[int, Hold], now: datetime) -> dict[int, Held]:
    """Say, by ordinal, what is rendered at the groups: a hold, or nothing in the place of one that is forgotten."""
    found = {}
    for group in groups:
        hold = kept.get(group.ordinal)
        if hold is not None:
            found[group.ordinal] = Held(hold.to_json(), has_pods=not hold.is_on(now))
        elif (group.stateful_set["metadata"].get("annotations") or {}).get(GAVE_BACK_ANNOTATION):
            found[group.ordinal] = Held("", has_pods=True)
    return found


def backoff_seconds(group: Group, count: int) -> float:
    """Doubles from time to time, and is between one and two times that by the group's identity."""
    base = min(FIRST_BACKOFF_SECONDS * 2.0 ** min(count - 1, 10), MAX_BACKOFF_SECONDS)
    metadata = group.stateful_set["metadata"]
    digest = hashlib.sha256(f"{metadata.get('namespace')}/{group.name}/{metadata.get('uid')}".encode()).digest()
    return base * (1 + digest[0] / 256)

"""Gang scheduling for groups that compete for the last GPUs: a partly scheduled group releases its pods. Pure.

Kubernetes schedules pods one by one. Two groups of two pods that compete for two GPUs may get one each and would wait
for each other forever. A group that has been partly scheduled for too long therefore removes its pods, and retries
after a back-off that grows and differs between groups. The oldest partly scheduled group waits longer than the others.
A group without scheduled pods holds no resources and simply waits. Quotas are treated alike: rejected pods are never
created, and created pods use part of the quota, scheduled or not.

A back-off ends when the resource is edited or a change is rolled back; the group then retries at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta

from trimtab_operator.builders.stateful_set import GANG_BACKOFF_ANNOTATION, Held
from trimtab_operator.observed.gang_backoff import MAX_BACKOFF_SECONDS, GangBackoff, gang_backoff_of
from trimtab_operator.observed.groups import Group, ObservedChildren, groups_of
from trimtab_operator.observed.missing_pods import missing_pods_message
from trimtab_operator.observed.phases import is_placed
from trimtab_operator.observed.pods import node_of, placed_since, unschedulable_message, unschedulable_since
from trimtab_operator.resource.manifest import Manifest

OLDEST_TIMEOUT_SECONDS = 120.0  # of the oldest group: the autoscaler may be adding a node
YOUNGER_TIMEOUT_SECONDS = 20.0  # of all others: enough for the scheduler to try every pod several times
INITIAL_BACKOFF_SECONDS = 30.0

Age = tuple[str, str, str]
"""(creation time, namespace, name): smaller is older."""


def is_partly_placed(group: Group) -> bool:
    """Return True if some of the group's pods hold a node or quota that another of its pods lacks."""
    if 0 < len(group.pods) < group.num_pods:
        return True
    return any(node_of(pod) for pod in group.pods) and any(unschedulable_message(pod) for pod in group.pods)


def partly_placed_since(group: Group) -> datetime | None:
    """Return since when the group has been partly scheduled, or None if it is not."""
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
    """Return the ages of all partly scheduled groups of all resources."""
    sets, owned_pods = _by_resource(stateful_sets), _by_resource(pods)
    ages = []
    for key, own in sets.items():
        observed = ObservedChildren(stateful_sets=tuple(own), pods=tuple(owned_pods.get(key, ())))
        ages += [age_of(group) for group in groups_of(observed) if is_partly_placed(group)]
    return tuple(ages)


def _by_resource(manifests: Iterable[Manifest]) -> Mapping[tuple[str, str], list[Manifest]]:
    found: dict[tuple[str, str], list[Manifest]] = {}
    for manifest in manifests:
        metadata = manifest["metadata"]
        name = str((metadata.get("labels") or {}).get("trimtab.dev/deployment", ""))
        found.setdefault((str(metadata.get("namespace", "")), name), []).append(manifest)
    return found


def plan_gang_backoffs(
    groups: Iterable[Group], partly_placed: Iterable[Age], now: datetime, *, change_id: str | None
) -> dict[int, GangBackoff]:
    """Return, by ordinal, the back-offs of the groups at `now`, active or expired. Single-pod groups never have one.

    `change_id` names the current generation and revision; a back-off stored for another one ends. None keeps all.
    """
    oldest = min(partly_placed, default=None)
    found = {}
    for group in groups:
        if group.worker_set is None:
            continue
        backoff = _backoff(group, gang_backoff_of(group), oldest, now, change_id)
        if backoff is not None:
            found[group.ordinal] = backoff
    return found


def _backoff(
    group: Group, before: GangBackoff | None, oldest: Age | None, now: datetime, change_id: str | None
) -> GangBackoff | None:
    if before is not None and before.is_active(now):
        if change_id is None or change_id == before.change_id:
            return before
        return replace(before, retry_at=now.replace(microsecond=0), change_id=change_id)
    if is_placed(group):
        return None
    since = partly_placed_since(group)
    if since is None:
        return before
    is_oldest = oldest is None or age_of(group) <= oldest
    timeout = OLDEST_TIMEOUT_SECONDS if is_oldest else YOUNGER_TIMEOUT_SECONDS
    if (now - since).total_seconds() < timeout:
        return before
    count = 1 if before is None else before.count + 1
    retry_at = now + timedelta(seconds=backoff_seconds(group, count))
    return GangBackoff(count, retry_at.replace(microsecond=0), _obstacle(group), change_id or "")


def _obstacle(group: Group) -> str:
    """Return why some of the group's pods are missing or unscheduled, as the scheduler or API server reports it."""
    message = next((message for pod in group.pods if (message := unschedulable_message(pod))), None)
    return message or missing_pods_message(group)


def render_gang_backoffs(groups: Iterable[Group], kept: Mapping[int, GangBackoff], now: datetime) -> dict[int, Held]:
    """Return, by ordinal, the back-off to render at each group; an empty one clears an old annotation."""
    found = {}
    for group in groups:
        backoff = kept.get(group.ordinal)
        if backoff is not None:
            found[group.ordinal] = Held(backoff.to_json(), has_pods=not backoff.is_active(now))
        elif (group.stateful_set["metadata"].get("annotations") or {}).get(GANG_BACKOFF_ANNOTATION):
            found[group.ordinal] = Held("", has_pods=True)
    return found


def backoff_seconds(group: Group, count: int) -> float:
    """Return the back-off for the `count`th attempt in seconds.

    It doubles with each attempt and is multiplied by a factor between 1 and 2 derived from the group's identity, so
    that groups do not retry at the same time.
    """
    base = min(INITIAL_BACKOFF_SECONDS * 2.0 ** min(count - 1, 10), MAX_BACKOFF_SECONDS)
    metadata = group.stateful_set["metadata"]
    digest = hashlib.sha256(f"{metadata.get('namespace')}/{group.name}/{metadata.get('uid')}".encode()).digest()
    return base * (1 + digest[0] / 256)

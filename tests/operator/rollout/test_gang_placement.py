"""Groups that compete for the last GPUs: none waits forever, and the older one starts first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, LEADER, ROLE_LABEL, WORKER
from trimtab_operator.builders.stateful_set import GANG_BACKOFF_ANNOTATION
from trimtab_operator.observed.gang_backoff import GangBackoff, gang_backoff_of
from trimtab_operator.observed.groups import Group, MissingPods
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import timestamp
from trimtab_operator.rollout.gang_placement import (
    OLDEST_TIMEOUT_SECONDS,
    YOUNGER_TIMEOUT_SECONDS,
    Age,
    age_of,
    ages_of_partly_placed,
    backoff_seconds,
    is_partly_placed,
)
from trimtab_operator.rollout.gang_placement import plan_gang_backoffs as holds_at

NOW = datetime(2026, 1, 1, 12, tzinfo=UTC)
QUOTA = 'pods "b-w-0" is forbidden: exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: 2, limited: 2'
WHY = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."


def a_pod(group: str, role: str, number: int, *, node: str | None, since: float = 0.0) -> dict[str, Any]:
    name = f"{group}-{number}" if role == LEADER else f"{group}-w-{number}"
    labels = {DEPLOYMENT_LABEL: group, GROUP_LABEL: "0", ROLE_LABEL: role}
    pod: dict[str, Any] = {"metadata": {"name": name, "namespace": "n", "labels": labels}, "spec": {}, "status": {}}
    since_text = timestamp(NOW + timedelta(seconds=since))
    condition = {"type": "PodScheduled", "status": "True", "lastTransitionTime": since_text}
    if node is not None:
        pod["spec"]["nodeName"] = node
    else:
        condition |= {"status": "False", "message": WHY}
    pod["status"]["conditions"] = [condition]
    return pod


def a_group(
    name: str, *nodes: str | None, created: float = 0.0, backoff: GangBackoff | None = None, pods: int = 2
) -> Group:
    labels = {DEPLOYMENT_LABEL: name, GROUP_LABEL: "0", ROLE_LABEL: LEADER}
    annotations = {} if backoff is None else {GANG_BACKOFF_ANNOTATION: backoff.to_json()}
    metadata = {
        "name": name,
        "namespace": "n",
        "uid": f"u-{name}",
        "labels": labels,
        "annotations": annotations,
        "creationTimestamp": timestamp(NOW + timedelta(seconds=created)),
    }
    leader = {"metadata": metadata, "spec": {"replicas": 1 if nodes else 0}}
    worker_labels = {**labels, ROLE_LABEL: WORKER}
    workers = {
        "metadata": {"name": f"{name}-w", "namespace": "n", "labels": worker_labels},
        "spec": {"replicas": pods - 1 if nodes else 0},
    }
    placed = [a_pod(name, LEADER if i == 0 else WORKER, max(0, i - 1), node=node) for i, node in enumerate(nodes)]
    return Group(0, leader, tuple(placed), workers)


def refused(group: Group, *, since: float = 0.0, error: str | None = QUOTA) -> Group:
    """Pods without quota do not exist: the API server does not create them."""
    pods = tuple(pod for pod in group.pods if pod["spec"])
    return replace(group, pods=pods, missing=MissingPods(after(since).timestamp(), len(pods), error))


def plan_gang_backoffs(
    groups: list[Group], partly_placed: Iterable[Age], now: datetime, *, change_id: str | None = "r1"
) -> dict[int, GangBackoff]:
    return holds_at(groups, partly_placed, now, change_id=change_id)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_partly_placed_group_backs_off_with_reason() -> None:
    group = a_group("a", "one", None)
    assert plan_gang_backoffs([group], [age_of(group)], after(OLDEST_TIMEOUT_SECONDS - 1)) == {}
    (backoff,) = plan_gang_backoffs([group], [age_of(group)], after(OLDEST_TIMEOUT_SECONDS)).values()
    assert backoff.count == 1
    assert backoff.is_active(after(OLDEST_TIMEOUT_SECONDS + 1))
    assert WHY in backoff.message
    assert gang_backoff_of(a_group("a", backoff=backoff)) == backoff


def test_younger_group_backs_off_sooner() -> None:
    old, young = a_group("old", "one", None, created=-10), a_group("young", None, "two")
    ages, soon = [age_of(old), age_of(young)], after(YOUNGER_TIMEOUT_SECONDS)
    assert plan_gang_backoffs([old], ages, soon) == {}
    assert plan_gang_backoffs([young], ages, soon)


def test_timeout_starts_when_partly_placed() -> None:
    """The time without any scheduled pod does not count."""
    placed = a_pod("a", LEADER, 0, node="one", since=1000)
    group = a_group("a", "one", None)
    late = Group(0, group.stateful_set, (placed, *group.pods[1:]), group.worker_set)
    assert plan_gang_backoffs([late], [], after(1000 + OLDEST_TIMEOUT_SECONDS - 1)) == {}
    assert plan_gang_backoffs([late], [], after(1000 + OLDEST_TIMEOUT_SECONDS))


def test_quota_limited_group_backs_off_and_names_quota() -> None:
    group = refused(a_group("a", "one", None))
    assert plan_gang_backoffs([group], [age_of(group)], after(OLDEST_TIMEOUT_SECONDS - 1)) == {}
    (backoff,) = plan_gang_backoffs([group], [age_of(group)], after(OLDEST_TIMEOUT_SECONDS)).values()
    assert QUOTA in backoff.message


def test_younger_group_under_same_quota_backs_off_sooner() -> None:
    old, young = refused(a_group("old", "one", None, created=-10)), refused(a_group("young", "two", None))
    ages, soon = [age_of(g) for g in (old, young) if is_partly_placed(g)], after(YOUNGER_TIMEOUT_SECONDS)
    assert len(ages) == 2
    assert plan_gang_backoffs([old], ages, soon) == {}
    assert plan_gang_backoffs([young], ages, soon)


def test_created_pods_use_quota_without_node() -> None:
    group = a_group("a", None, None)
    half = replace(group, pods=group.pods[:1], missing=MissingPods(NOW.timestamp(), 1, None))
    (backoff,) = plan_gang_backoffs([half], [], after(OLDEST_TIMEOUT_SECONDS)).values()
    assert WHY in backoff.message


def test_a_group_that_gets_no_pod_at_all_holds_nothing_and_waits() -> None:
    group = refused(a_group("a", None, None))
    assert group.pods == ()
    assert plan_gang_backoffs([group], [], after(3600)) == {}


def test_edit_ends_backoff_and_keeps_count() -> None:
    """An autoscaler also edits the resource, which must not reset the back-off permanently."""
    backoff = GangBackoff(3, after(600), WHY, change_id="r1")
    waiting = a_group("a", backoff=backoff)
    assert plan_gang_backoffs([waiting], [], after(10), change_id="r1") == {0: backoff}
    (ended,) = plan_gang_backoffs([waiting], [], after(10), change_id="r2").values()
    assert not ended.is_active(after(10))
    assert (ended.count, ended.change_id) == (3, "r2")
    assert plan_gang_backoffs([a_group("a", backoff=ended)], [], after(11), change_id="r2") == {0: ended}
    (again,) = plan_gang_backoffs(
        [a_group("a", "one", None, backoff=ended)], [], after(OLDEST_TIMEOUT_SECONDS), change_id="r2"
    ).values()
    assert again.count == 4
    assert again.is_active(after(OLDEST_TIMEOUT_SECONDS + 1))


def test_unknown_revision_keeps_backoff() -> None:
    """For example because the spec is invalid and nothing is rendered."""
    backoff = GangBackoff(3, after(600), WHY, change_id="r1")
    assert plan_gang_backoffs([a_group("a", backoff=backoff)], [], after(10), change_id=None) == {0: backoff}


def test_a_hold_longer_than_any_back_off_is_none() -> None:
    assert not GangBackoff(1, after(1e9), WHY).is_active(NOW)


def test_a_hold_that_an_older_operator_wrote_is_over() -> None:
    text = json.dumps({"count": 2, "retryAt": timestamp(after(600)), "reason": WHY})
    waiting = a_group("a")
    waiting.stateful_set["metadata"]["annotations"][GANG_BACKOFF_ANNOTATION] = text
    (ended,) = plan_gang_backoffs([waiting], [], NOW).values()
    assert not ended.is_active(NOW)


@pytest.mark.parametrize("nodes", [(None, None), ("one", "two"), ("one",)])
def test_fully_or_not_placed_group_has_no_backoff(nodes: tuple[str | None, ...]) -> None:
    assert plan_gang_backoffs([a_group("a", *nodes)], [], after(3600)) == {}


def test_single_pod_replica_never_backs_off() -> None:
    group = a_group("a", None)
    alone = Group(0, group.stateful_set, group.pods)
    assert plan_gang_backoffs([alone], [], after(3600)) == {}


def test_the_backoff_grows_is_bounded_and_differs_between_groups() -> None:
    groups = [a_group(f"g{number}", "one", None) for number in range(20)]
    assert len({backoff_seconds(group, 1) for group in groups}) > 15
    for group in groups:
        waits = [backoff_seconds(group, count) for count in range(1, 40)]
        assert waits == sorted(waits)
        assert 30 <= waits[0] < 60
        assert waits[-1] <= 1200


def test_backoff_count_is_kept_until_placed() -> None:
    backoff = GangBackoff(3, after(0), WHY)
    assert plan_gang_backoffs([a_group("a", None, None, backoff=backoff)], [], after(10)) == {0: backoff}
    assert plan_gang_backoffs([a_group("a", "one", "two", backoff=backoff)], [], after(10)) == {}
    (again,) = plan_gang_backoffs(
        [a_group("a", "one", None, backoff=backoff)], [], after(OLDEST_TIMEOUT_SECONDS + 1)
    ).values()
    assert again.count == 4


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100_000, '{"count": 1}', '{"count": 1, "retryAt": "soon", "reason": ""}']
)
def test_a_note_that_cannot_be_read_is_none(text: str) -> None:
    group = a_group("a", "one", None)
    group.stateful_set["metadata"]["annotations"][GANG_BACKOFF_ANNOTATION] = text
    assert gang_backoff_of(group) is None


@dataclass
class Contest:
    """Groups, single-GPU nodes, and a scheduler with a random order.

    With a quota, only as many pods are created as there are nodes.
    """

    sizes: dict[str, int]
    nodes: int
    order: int
    by_quota: bool = False
    placed: dict[str, int] = field(default_factory=dict)
    held: dict[str, GangBackoff] = field(default_factory=dict)
    stuck_since: dict[str, float] = field(default_factory=dict)

    def schedule(self, now: float) -> None:
        """Return one pod of each group in turn, like pods created at the same time."""
        names = list(self.sizes)
        plan_reconcile = self.order
        while sum(self.placed.values()) < self.nodes:
            waiting = [n for n in names if self._wants(n, now) > self.placed.get(n, 0)]
            if not waiting:
                break
            name = waiting[plan_reconcile % len(waiting)]
            plan_reconcile += 1
            self.placed[name] = self.placed.get(name, 0) + 1
        for name in names:
            if self._wants(name, now) > self.placed.get(name, 0):
                self.stuck_since.setdefault(name, now)
            else:
                self.stuck_since.pop(name, None)

    def _wants(self, name: str, now: float) -> int:
        backoff = self.held.get(name)
        return 0 if backoff is not None and backoff.is_active(after(now)) else self.sizes[name]

    def group(self, name: str, now: float) -> Group:
        wanted, placed = self._wants(name, now), self.placed.get(name, 0)
        pods: tuple[Manifest, ...] = tuple(
            a_pod(
                name,
                LEADER if i == 0 else WORKER,
                max(0, i - 1),
                node="n" if i < placed else None,
                since=self.stuck_since.get(name, now),
            )
            for i in range(wanted)
        )
        bare = a_group(name, *([None] * wanted), created=list(self.sizes).index(name), pods=self.sizes[name])
        backoff = self.held.get(name)
        if backoff is not None:
            bare.stateful_set["metadata"]["annotations"][GANG_BACKOFF_ANNOTATION] = backoff.to_json()
        group = Group(0, bare.stateful_set, pods, bare.worker_set)
        is_short = self.by_quota and placed < wanted
        return refused(group, since=self.stuck_since.get(name, now)) if is_short else group

    def tick(self, now: float) -> None:
        self.schedule(now)
        groups = {name: self.group(name, now) for name in self.sizes}
        partly_placed = [age_of(group) for group in groups.values() if is_partly_placed(group)]
        for name, group in groups.items():
            found = plan_gang_backoffs([group], partly_placed, after(now)).get(0)
            if found is None:
                self.held.pop(name, None)
            else:
                self.held[name] = found
                if found.is_active(after(now)):
                    self.placed.pop(name, None)
                    self.stuck_since.pop(name, None)


@pytest.mark.parametrize("by_quota", [False, True])
@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 2}])
def test_racing_groups_place_one_soon(sizes: dict[str, int], order: int, by_quota: bool) -> None:
    contest = Contest(sizes, nodes=max(sizes.values()), order=order, by_quota=by_quota)
    whole: list[str] = []
    for second in range(0, 1800, 5):
        contest.tick(second)
        now_whole = [name for name, size in sizes.items() if contest.placed.get(name) == size]
        assert set(whole) <= set(now_whole), "a placed group was disturbed"
        whole = now_whole
        if second == 300:
            assert whole, contest
    assert whole


@pytest.mark.parametrize("by_quota", [False, True])
def test_the_older_of_two_wins(by_quota: bool) -> None:
    contest = Contest({"old": 2, "young": 2}, nodes=2, order=0, by_quota=by_quota)
    for second in range(0, 120, 5):
        contest.tick(second)
    assert contest.placed.get("old") == 2


def test_ages_cover_partly_placed_groups_of_all_resources() -> None:
    old, young = a_group("old", "one", None, created=-10), a_group("young", "two", "three")
    sets = [manifest for g in (old, young) for manifest in (g.stateful_set, g.worker_set) if manifest is not None]
    assert ages_of_partly_placed(sets, [*old.pods, *young.pods]) == (age_of(old),)


def test_a_rival_that_a_quota_holds_back_counts_by_its_pods() -> None:
    old = refused(a_group("old", "one", None, created=-10))
    sets = [manifest for manifest in (old.stateful_set, old.worker_set) if manifest is not None]
    assert ages_of_partly_placed(sets, old.pods) == (age_of(old),)

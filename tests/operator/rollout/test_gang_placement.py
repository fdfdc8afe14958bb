"""Groups that race for the last GPUs: none waits for the other for ever, and the older goes first."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL, GROUP_LABEL, LEADER, ROLE_LABEL, WORKER
from trimtab_operator.builders.stateful_set import GAVE_BACK_ANNOTATION
from trimtab_operator.observed.groups import Group, Missing
from trimtab_operator.observed.hold import Hold, hold_of
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.time import timestamp
from trimtab_operator.rollout.gang_placement import (
    PATIENCE_BESIDE_AN_OLDER_SECONDS,
    PATIENCE_SECONDS,
    Age,
    age_of,
    ages_of_partly_placed,
    backoff_seconds,
    is_partly_placed,
)
from trimtab_operator.rollout.gang_placement import holds as holds_at

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


def a_group(name: str, *nodes: str | None, created: float = 0.0, hold: Hold | None = None, pods: int = 2) -> Group:
    labels = {DEPLOYMENT_LABEL: name, GROUP_LABEL: "0", ROLE_LABEL: LEADER}
    annotations = {} if hold is None else {GAVE_BACK_ANNOTATION: hold.to_json()}
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


def refused(group: Group, *, since: float = 0.0, words: str | None = QUOTA) -> Group:
    """Its pods that have no node are none at all: the API server does not create them."""
    pods = tuple(pod for pod in group.pods if pod["spec"])
    return replace(group, pods=pods, missing=Missing(after(since).timestamp(), len(pods), words))


def holds(groups: list[Group], rivals: Iterable[Age], now: datetime, *, asked: str | None = "r1") -> dict[int, Hold]:
    return holds_at(groups, rivals, now, asked=asked)


def after(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def test_a_partly_placed_group_gives_its_pods_back_after_a_while_and_says_why() -> None:
    group = a_group("a", "one", None)
    assert holds([group], [age_of(group)], after(PATIENCE_SECONDS - 1)) == {}
    (hold,) = holds([group], [age_of(group)], after(PATIENCE_SECONDS)).values()
    assert hold.count == 1
    assert hold.is_on(after(PATIENCE_SECONDS + 1))
    assert WHY in hold.sentence
    assert hold_of(a_group("a", hold=hold)) == hold


def test_beside_an_older_one_the_younger_gives_way_soon() -> None:
    old, young = a_group("old", "one", None, created=-10), a_group("young", None, "two")
    ages, soon = [age_of(old), age_of(young)], after(PATIENCE_BESIDE_AN_OLDER_SECONDS)
    assert holds([old], ages, soon) == {}
    assert holds([young], ages, soon)


def test_patience_counts_from_when_it_holds_one_node_and_lacks_another() -> None:
    """However long no pod at all found a node before."""
    placed = a_pod("a", LEADER, 0, node="one", since=1000)
    group = a_group("a", "one", None)
    late = Group(0, group.stateful_set, (placed, *group.pods[1:]), group.worker_set)
    assert holds([late], [], after(1000 + PATIENCE_SECONDS - 1)) == {}
    assert holds([late], [], after(1000 + PATIENCE_SECONDS))


def test_a_group_that_a_quota_lets_have_only_some_pods_gives_them_back_and_says_which_quota() -> None:
    group = refused(a_group("a", "one", None))
    assert holds([group], [age_of(group)], after(PATIENCE_SECONDS - 1)) == {}
    (hold,) = holds([group], [age_of(group)], after(PATIENCE_SECONDS)).values()
    assert QUOTA in hold.sentence


def test_beside_an_older_one_under_the_same_quota_the_younger_gives_way_soon() -> None:
    old, young = refused(a_group("old", "one", None, created=-10)), refused(a_group("young", "two", None))
    ages, soon = [age_of(g) for g in (old, young) if is_partly_placed(g)], after(PATIENCE_BESIDE_AN_OLDER_SECONDS)
    assert len(ages) == 2
    assert holds([old], ages, soon) == {}
    assert holds([young], ages, soon)


def test_what_a_quota_lets_be_created_holds_a_part_of_it_with_or_without_a_node() -> None:
    group = a_group("a", None, None)
    half = replace(group, pods=group.pods[:1], missing=Missing(NOW.timestamp(), 1, None))
    (hold,) = holds([half], [], after(PATIENCE_SECONDS)).values()
    assert WHY in hold.sentence


def test_a_group_that_gets_no_pod_at_all_holds_nothing_and_waits() -> None:
    group = refused(a_group("a", None, None))
    assert group.pods == ()
    assert holds([group], [], after(3600)) == {}


def test_an_edit_ends_the_wait_and_how_often_it_gave_back_is_not_forgotten() -> None:
    """An autoscaler edits, too: a back-off that it could end for good would be none."""
    hold = Hold(3, after(600), WHY, asked="r1")
    waiting = a_group("a", hold=hold)
    assert holds([waiting], [], after(10), asked="r1") == {0: hold}
    (ended,) = holds([waiting], [], after(10), asked="r2").values()
    assert not ended.is_on(after(10))
    assert (ended.count, ended.asked) == (3, "r2")
    assert holds([a_group("a", hold=ended)], [], after(11), asked="r2") == {0: ended}
    (again,) = holds([a_group("a", "one", None, hold=ended)], [], after(PATIENCE_SECONDS), asked="r2").values()
    assert again.count == 4
    assert again.is_on(after(PATIENCE_SECONDS + 1))


def test_while_nobody_can_say_what_is_asked_for_a_group_waits_on() -> None:
    """The spec is refused, for instance: nothing is rendered from it."""
    hold = Hold(3, after(600), WHY, asked="r1")
    assert holds([a_group("a", hold=hold)], [], after(10), asked=None) == {0: hold}


def test_a_hold_longer_than_any_back_off_is_none() -> None:
    assert not Hold(1, after(1e9), WHY).is_on(NOW)


def test_a_hold_that_an_older_operator_wrote_is_over() -> None:
    text = json.dumps({"count": 2, "retryAt": timestamp(after(600)), "why": WHY})
    waiting = a_group("a")
    waiting.stateful_set["metadata"]["annotations"][GAVE_BACK_ANNOTATION] = text
    (ended,) = holds([waiting], [], NOW).values()
    assert not ended.is_on(NOW)


@pytest.mark.parametrize("nodes", [(None, None), ("one", "two"), ("one",)])
def test_a_group_that_is_placed_as_a_whole_or_not_at_all_keeps_what_it_has(nodes: tuple[str | None, ...]) -> None:
    assert holds([a_group("a", *nodes)], [], after(3600)) == {}


def test_a_replica_of_one_pod_never_gives_back() -> None:
    group = a_group("a", None)
    alone = Group(0, group.stateful_set, group.pods)
    assert holds([alone], [], after(3600)) == {}


def test_the_backoff_grows_is_bounded_and_differs_between_groups() -> None:
    groups = [a_group(f"g{number}", "one", None) for number in range(20)]
    assert len({backoff_seconds(group, 1) for group in groups}) > 15
    for group in groups:
        waits = [backoff_seconds(group, count) for count in range(1, 40)]
        assert waits == sorted(waits)
        assert 30 <= waits[0] < 60
        assert waits[-1] <= 1200


def test_how_often_it_gave_back_is_remembered_until_it_is_placed() -> None:
    hold = Hold(3, after(0), WHY)
    assert holds([a_group("a", None, None, hold=hold)], [], after(10)) == {0: hold}
    assert holds([a_group("a", "one", "two", hold=hold)], [], after(10)) == {}
    (again,) = holds([a_group("a", "one", None, hold=hold)], [], after(PATIENCE_SECONDS + 1)).values()
    assert again.count == 4


@pytest.mark.parametrize(
    "text", ["{", "[]", "[" * 100_000, '{"count": 1}', '{"count": 1, "retryAt": "soon", "why": ""}']
)
def test_a_note_that_cannot_be_read_is_none(text: str) -> None:
    group = a_group("a", "one", None)
    group.stateful_set["metadata"]["annotations"][GAVE_BACK_ANNOTATION] = text
    assert hold_of(group) is None


@dataclass
class Contest:
    """Groups, nodes of one GPU each, and a scheduler that places pods in an order of its own. By quota: as many pods
    are created as there are nodes, and no more."""

    sizes: dict[str, int]
    nodes: int
    order: int
    by_quota: bool = False
    placed: dict[str, int] = field(default_factory=dict)
    held: dict[str, Hold] = field(default_factory=dict)
    stuck_since: dict[str, float] = field(default_factory=dict)

    def schedule(self, now: float) -> None:
        """One pod of each group in turn, as pods created at once come."""
        names = list(self.sizes)
        turn = self.order
        while sum(self.placed.values()) < self.nodes:
            waiting = [n for n in names if self._wants(n, now) > self.placed.get(n, 0)]
            if not waiting:
                break
            name = waiting[turn % len(waiting)]
            turn += 1
            self.placed[name] = self.placed.get(name, 0) + 1
        for name in names:
            if self._wants(name, now) > self.placed.get(name, 0):
                self.stuck_since.setdefault(name, now)
            else:
                self.stuck_since.pop(name, None)

    def _wants(self, name: str, now: float) -> int:
        hold = self.held.get(name)
        return 0 if hold is not None and hold.is_on(after(now)) else self.sizes[name]

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
        hold = self.held.get(name)
        if hold is not None:
            bare.stateful_set["metadata"]["annotations"][GAVE_BACK_ANNOTATION] = hold.to_json()
        group = Group(0, bare.stateful_set, pods, bare.worker_set)
        is_short = self.by_quota and placed < wanted
        return refused(group, since=self.stuck_since.get(name, now)) if is_short else group

    def tick(self, now: float) -> None:
        self.schedule(now)
        groups = {name: self.group(name, now) for name in self.sizes}
        rivals = [age_of(group) for group in groups.values() if is_partly_placed(group)]
        for name, group in groups.items():
            found = holds([group], rivals, after(now)).get(0)
            if found is None:
                self.held.pop(name, None)
            else:
                self.held[name] = found
                if found.is_on(after(now)):
                    self.placed.pop(name, None)
                    self.stuck_since.pop(name, None)


@pytest.mark.parametrize("by_quota", [False, True])
@pytest.mark.parametrize("order", range(4))
@pytest.mark.parametrize("sizes", [{"a": 2, "b": 2}, {"a": 2, "b": 2, "c": 2}, {"a": 3, "b": 2}])
def test_of_groups_that_race_one_is_soon_placed_and_stays(sizes: dict[str, int], order: int, by_quota: bool) -> None:
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


def test_the_ages_of_all_resources_groups_are_told_from_their_pods() -> None:
    old, young = a_group("old", "one", None, created=-10), a_group("young", "two", "three")
    sets = [manifest for g in (old, young) for manifest in (g.stateful_set, g.worker_set) if manifest is not None]
    assert ages_of_partly_placed(sets, [*old.pods, *young.pods]) == (age_of(old),)


def test_a_rival_that_a_quota_holds_back_counts_by_its_pods() -> None:
    old = refused(a_group("old", "one", None, created=-10))
    sets = [manifest for manifest in (old.stateful_set, old.worker_set) if manifest is not None]
    assert ages_of_partly_placed(sets, old.pods) == (age_of(old),)

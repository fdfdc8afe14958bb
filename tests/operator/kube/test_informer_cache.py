"""What watches tell is what looks see; what this process wrote is waited for; what is silent is not believed."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import virtual_time
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL
from trimtab_operator.kube.informer_cache import SILENT_SECONDS, Cache, Heard, Store
from trimtab_operator.resource.spec import KIND

OWNER = ("n", "m")


def a_pod(name: str = "m-g0-0", version: int = 1, owner: str = "m", **metadata: Any) -> dict[str, Any]:
    labels = {DEPLOYMENT_LABEL: owner}
    known = {"name": name, "namespace": "n", "uid": f"u-{name}", "resourceVersion": str(version), "labels": labels}
    return {"kind": "Pod", "metadata": {**known, **metadata}}


def the_resource(version: int = 1) -> dict[str, Any]:
    return {"kind": KIND, "metadata": {"name": "m", "namespace": "n", "uid": "u-m", "resourceVersion": str(version)}}


class Rung:
    """A cache of pods and resources that was listed at version 10, and who was rung since."""

    def __init__(self, *pods: dict[str, Any], namespace: str | None = None) -> None:
        self.now = 0.0
        self.rung: list[tuple[str, str]] = []
        self.pods, self.resources = Store("Pod", namespace), Store(KIND, namespace)
        rings = lambda *owner: self.rung.append(owner)  # noqa: E731
        self.cache = Cache((self.pods, self.resources), rings, clock=lambda: self.now)
        self.cache.listed(self.pods, pods, 10)
        self.cache.listed(self.resources, [the_resource()], 10)
        self.rung.clear()

    @property
    def names(self) -> list[str]:
        return [made["metadata"]["name"] for made in self.cache.of("Pod", OWNER)]


def test_what_is_told_is_seen_by_whom_it_belongs_to_and_rings_there() -> None:
    known = Rung(a_pod("m-g0-0"), a_pod("other-g0-0", owner="other"))
    assert known.names == ["m-g0-0"]
    known.cache.changed(known.pods, "ADDED", a_pod("m-g1-0", 11))
    assert known.names == ["m-g0-0", "m-g1-0"]
    known.cache.changed(known.pods, "DELETED", a_pod("m-g0-0", 12))
    assert known.names == ["m-g1-0"]
    assert known.rung == [OWNER, OWNER]


def test_an_object_whose_label_moves_leaves_the_one_it_belonged_to() -> None:
    known = Rung(a_pod())
    known.cache.changed(known.pods, "MODIFIED", a_pod(version=11, owner="other"))
    assert known.names == []
    assert known.cache.of("Pod", ("n", "other"))


def test_a_new_list_rings_only_where_something_changed() -> None:
    known = Rung(a_pod("m-g0-0"), a_pod("other-g0-0", owner="other"), a_pod("third-g0-0", owner="third"))
    known.cache.listed(known.pods, [a_pod("m-g0-0"), a_pod("other-g0-0", 15, owner="other")], 20)
    assert sorted(known.rung) == [("n", "other"), ("n", "third")]


def test_managed_fields_are_not_kept() -> None:
    known = Rung(a_pod(managedFields=[{"manager": "somebody"}]))
    assert "managedFields" not in known.cache.of("Pod", OWNER)[0]["metadata"]


def test_our_own_status_rings_nobody_and_another_one_does() -> None:
    known = Rung()
    known.cache.wrote(KIND, OWNER, the_resource(11))
    known.cache.changed(known.resources, "MODIFIED", the_resource(11))
    assert known.rung == []
    known.cache.changed(known.resources, "MODIFIED", the_resource(12))
    assert known.rung == [OWNER]


@pytest.mark.parametrize(("kind", "rings"), [("StatefulSet", []), ("NetworkPolicy", []), ("Service", [OWNER])])
def test_what_was_written_here_rings_nobody_unless_the_api_server_adds_to_it(
    kind: str, rings: list[tuple[str, str]]
) -> None:
    rung: list[tuple[str, str]] = []
    store = Store(kind)
    cache = Cache([store], lambda *owner: rung.append(owner))
    cache.listed(store, [], 10)
    cache.wrote(kind, OWNER, a_pod("m-g0", 11))
    cache.changed(store, "ADDED", a_pod("m-g0", 11))
    assert rung == rings
    assert cache.of(kind, OWNER)
    for event, version in (("MODIFIED", 12), ("DELETED", 13)):  # by anybody
        rung.clear()
        cache.changed(store, event, a_pod("m-g0", version, annotations={"somebody": "was here"}))
        assert rung == [OWNER]


def a_set(version: int, *, generation: int = 2, **status: Any) -> dict[str, Any]:
    return {**a_pod("m-g0", version, generation=generation), "spec": {"replicas": 1}, "status": status}


@pytest.mark.parametrize("kind", ["StatefulSet", "PodDisruptionBudget"])
def test_what_controllers_count_rings_nobody_and_is_seen(kind: str) -> None:
    """They write it several times for each change, and no turn reads it."""
    rung: list[tuple[str, str]] = []
    store = Store(kind)
    cache = Cache([store], lambda *owner: rung.append(owner))
    cache.listed(store, [a_set(10, readyReplicas=0, currentHealthy=0)], 10)
    rung.clear()
    cache.changed(store, "MODIFIED", a_set(11, readyReplicas=1, currentHealthy=1))
    assert rung == []
    (seen,) = cache.of(kind, OWNER)
    assert (seen["metadata"]["resourceVersion"], seen["status"]["readyReplicas"]) == ("11", 1)
    cache.changed(store, "MODIFIED", {**a_set(12, readyReplicas=1), "spec": {"replicas": 2}})
    assert rung == [OWNER]


@pytest.mark.parametrize(("generation", "rings"), [(1, []), (2, [OWNER])])
def test_which_template_a_controller_has_seen_rings_where_pods_may_be_replaced_by_it(
    generation: int, rings: list[tuple[str, str]]
) -> None:
    rung: list[tuple[str, str]] = []
    store = Store("StatefulSet")
    cache = Cache([store], lambda *owner: rung.append(owner))
    cache.listed(store, [a_set(10, generation=generation)], 10)
    rung.clear()
    cache.changed(store, "MODIFIED", a_set(11, generation=generation, observedGeneration=generation))
    assert rung == rings


def test_a_pod_rings_whatever_is_written_of_it() -> None:
    known = Rung(a_pod())
    known.cache.changed(known.pods, "MODIFIED", a_pod(version=11))
    assert known.rung == [OWNER]


async def test_an_echo_is_one_until_a_look_has_heard_it() -> None:
    """A watch that begins anew tells of the same again."""
    known = Rung()
    known.cache.wrote("Pod", OWNER, a_pod(version=11))
    for _ in range(2):
        known.cache.changed(known.pods, "ADDED", a_pod(version=11))
    assert known.rung == []
    assert await known.cache.settled(OWNER)
    known.cache.changed(known.pods, "ADDED", a_pod(version=11))
    assert known.rung == [OWNER]


def test_what_a_loop_remembers_wakes_nobody_unless_it_is_gone() -> None:
    rung: list[tuple[str, str]] = []
    notes = Store("ConfigMap")
    cache = Cache([notes], lambda *owner: rung.append(owner))
    for event in ("ADDED", "MODIFIED"):
        cache.changed(notes, event, a_pod("m-tuning"))
    assert rung == []
    cache.changed(notes, "DELETED", a_pod("m-tuning"))
    assert rung == [OWNER]


def test_a_look_waits_until_what_was_written_is_heard() -> None:
    async def look() -> tuple[bool, float]:
        loop, known = asyncio.get_running_loop(), Rung()
        known.cache.wrote("Pod", OWNER, a_pod(version=11))
        loop.call_later(2.0, known.cache.changed, known.pods, "ADDED", a_pod(version=11))
        return await known.cache.settled(OWNER), loop.time()

    assert virtual_time.run(look()) == (True, 2.0)


def test_a_look_waits_until_what_was_deleted_is_heard_to_go() -> None:
    async def look(event: str, **metadata: Any) -> tuple[bool, float]:
        loop, known = asyncio.get_running_loop(), Rung(a_pod())
        known.cache.deleted("Pod", "n", "m-g0-0", "u-m-g0-0")
        loop.call_later(1.0, known.cache.changed, known.pods, "MODIFIED", a_pod(version=11))  # something else
        loop.call_later(2.0, known.cache.changed, known.pods, event, a_pod(version=12, **metadata))
        return await known.cache.settled(OWNER), loop.time()

    assert virtual_time.run(look("DELETED")) == (True, 2.0)
    assert virtual_time.run(look("MODIFIED", deletionTimestamp="2026-01-01T12:00:00Z")) == (True, 2.0)


def test_what_is_not_heard_in_time_is_not_waited_for_any_longer() -> None:
    async def look() -> tuple[bool, bool]:
        known = Rung()
        known.cache.wrote("Pod", OWNER, a_pod(version=11))
        in_time = await known.cache.settled(OWNER)
        known.cache.listed(known.pods, [a_pod(version=11)], 30)
        return in_time, await known.cache.settled(OWNER)

    assert virtual_time.run(look()) == (False, True)


async def test_another_resource_is_waited_for_by_nobody() -> None:
    known = Rung()
    known.cache.wrote("Pod", OWNER, a_pod(version=11))
    assert await known.cache.settled(("n", "other"))


@pytest.mark.parametrize(("seconds", "is_heard"), [(SILENT_SECONDS - 1, True), (SILENT_SECONDS + 1, False)])
def test_a_kind_that_nobody_tells_of_is_not_believed(seconds: float, is_heard: bool) -> None:
    known = Rung(a_pod())
    known.now += seconds
    assert known.cache.is_heard("Pod", "n") is is_heard
    known.cache.alive(known.pods)
    assert known.cache.is_heard("Pod", "n")


def test_a_cache_of_one_namespace_knows_no_other() -> None:
    known = Rung(namespace="n")
    assert known.cache.is_heard("Pod", "n")
    assert not known.cache.is_heard("Pod", "elsewhere")


def test_a_kind_that_cannot_be_watched_is_neither_heard_nor_waited_for() -> None:
    known = Rung()
    known.cache.not_served(known.pods)
    assert known.pods.heard is Heard.NOT_SERVED
    assert not known.cache.is_heard("Pod", "n")
    assert known.cache.is_not_served("Pod", "n")


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize("levels", [1, 5000])
def test_words_are_one_in_memory_for_all_objects_however_deep_an_object_is(levels: int) -> None:
    store = Store("Pod")
    for name in ("one", "other"):
        word = "".join(["Clu", "sterIP"])  # no two of these are one object
        metadata = {"namespace": "n", "name": name, "labels": {DEPLOYMENT_LABEL: "m"}}
        store.put({"metadata": metadata, "spec": {"type": word, "deep": nested(levels)}})
    one, other = store.of(("n", "m"))
    assert one["spec"]["type"] == other["spec"]["type"] == "ClusterIP"
    assert (one["spec"]["type"] is other["spec"]["type"]) is (levels == 1)

"""Informer cache: watch events, own writes and stale kinds."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import virtual_time
from trimtab_operator.builders.labels import DEPLOYMENT_LABEL
from trimtab_operator.kube.informer_cache import STALE_SECONDS, Cache, Store, SyncState
from trimtab_operator.resource.spec import KIND

OWNER = ("n", "m")


def a_pod(name: str = "m-g0-0", version: int = 1, owner: str = "m", **metadata: Any) -> dict[str, Any]:
    labels = {DEPLOYMENT_LABEL: owner}
    known = {"name": name, "namespace": "n", "uid": f"u-{name}", "resourceVersion": str(version), "labels": labels}
    return {"kind": "Pod", "metadata": {**known, **metadata}}


def the_resource(version: int = 1) -> dict[str, Any]:
    return {"kind": KIND, "metadata": {"name": "m", "namespace": "n", "uid": "u-m", "resourceVersion": str(version)}}


class Rung:
    """Cache of pods and resources, listed at version 10, that records the enqueued owners."""

    def __init__(self, *pods: dict[str, Any], namespace: str | None = None) -> None:
        self.now = 0.0
        self.rung: list[tuple[str, str]] = []
        self.pods, self.resources = Store("Pod", namespace), Store(KIND, namespace)
        rings = lambda *owner: self.rung.append(owner)  # noqa: E731
        self.cache = Cache((self.pods, self.resources), rings, clock=lambda: self.now)
        self.cache.replace_all(self.pods, pods, 10)
        self.cache.replace_all(self.resources, [the_resource()], 10)
        self.rung.clear()

    @property
    def names(self) -> list[str]:
        return [made["metadata"]["name"] for made in self.cache.of("Pod", OWNER)]


def test_watch_event_updates_owner_and_enqueues_it() -> None:
    known = Rung(a_pod("m-g0-0"), a_pod("other-g0-0", owner="other"))
    assert known.names == ["m-g0-0"]
    known.cache.apply_event(known.pods, "ADDED", a_pod("m-g1-0", 11))
    assert known.names == ["m-g0-0", "m-g1-0"]
    known.cache.apply_event(known.pods, "DELETED", a_pod("m-g0-0", 12))
    assert known.names == ["m-g1-0"]
    assert known.rung == [OWNER, OWNER]


def test_relabelled_object_moves_to_new_owner() -> None:
    known = Rung(a_pod())
    known.cache.apply_event(known.pods, "MODIFIED", a_pod(version=11, owner="other"))
    assert known.names == []
    assert known.cache.of("Pod", ("n", "other"))


def test_relist_enqueues_changed_owners_only() -> None:
    known = Rung(a_pod("m-g0-0"), a_pod("other-g0-0", owner="other"), a_pod("third-g0-0", owner="third"))
    known.cache.replace_all(known.pods, [a_pod("m-g0-0"), a_pod("other-g0-0", 15, owner="other")], 20)
    assert sorted(known.rung) == [("n", "other"), ("n", "third")]


def test_managed_fields_are_dropped() -> None:
    known = Rung(a_pod(managedFields=[{"manager": "somebody"}]))
    assert "managedFields" not in known.cache.of("Pod", OWNER)[0]["metadata"]


def test_own_status_write_enqueues_nothing() -> None:
    known = Rung()
    known.cache.record_write(KIND, OWNER, the_resource(11))
    known.cache.apply_event(known.resources, "MODIFIED", the_resource(11))
    assert known.rung == []
    known.cache.apply_event(known.resources, "MODIFIED", the_resource(12))
    assert known.rung == [OWNER]


@pytest.mark.parametrize(("kind", "rings"), [("StatefulSet", []), ("NetworkPolicy", []), ("Service", [OWNER])])
def test_own_write_enqueues_only_completed_kinds(kind: str, rings: list[tuple[str, str]]) -> None:
    rung: list[tuple[str, str]] = []
    store = Store(kind)
    cache = Cache([store], lambda *owner: rung.append(owner))
    cache.replace_all(store, [], 10)
    cache.record_write(kind, OWNER, a_pod("m-g0", 11))
    cache.apply_event(store, "ADDED", a_pod("m-g0", 11))
    assert rung == rings
    assert cache.of(kind, OWNER)
    for event, version in (("MODIFIED", 12), ("DELETED", 13)):  # an external change
        rung.clear()
        cache.apply_event(store, event, a_pod("m-g0", version, annotations={"somebody": "was here"}))
        assert rung == [OWNER]


def a_set(version: int, *, generation: int = 2, **status: Any) -> dict[str, Any]:
    return {**a_pod("m-g0", version, generation=generation), "spec": {"replicas": 1}, "status": status}


@pytest.mark.parametrize("kind", ["StatefulSet", "PodDisruptionBudget"])
def test_controller_status_counts_enqueue_nothing(kind: str) -> None:
    """Controllers update these fields several times per change, and no plan reads them."""
    rung: list[tuple[str, str]] = []
    store = Store(kind)
    cache = Cache([store], lambda *owner: rung.append(owner))
    cache.replace_all(store, [a_set(10, readyReplicas=0, currentHealthy=0)], 10)
    rung.clear()
    cache.apply_event(store, "MODIFIED", a_set(11, readyReplicas=1, currentHealthy=1))
    assert rung == []
    (seen,) = cache.of(kind, OWNER)
    assert (seen["metadata"]["resourceVersion"], seen["status"]["readyReplicas"]) == ("11", 1)
    cache.apply_event(store, "MODIFIED", {**a_set(12, readyReplicas=1), "spec": {"replicas": 2}})
    assert rung == [OWNER]


@pytest.mark.parametrize(("generation", "rings"), [(1, []), (2, [OWNER])])
def test_observed_generation_enqueues_after_template_change(generation: int, rings: list[tuple[str, str]]) -> None:
    rung: list[tuple[str, str]] = []
    store = Store("StatefulSet")
    cache = Cache([store], lambda *owner: rung.append(owner))
    cache.replace_all(store, [a_set(10, generation=generation)], 10)
    rung.clear()
    cache.apply_event(store, "MODIFIED", a_set(11, generation=generation, observedGeneration=generation))
    assert rung == rings


def test_any_pod_change_enqueues() -> None:
    known = Rung(a_pod())
    known.cache.apply_event(known.pods, "MODIFIED", a_pod(version=11))
    assert known.rung == [OWNER]


async def test_echo_is_ignored_until_settled() -> None:
    """A restarted watch reports the same object again."""
    known = Rung()
    known.cache.record_write("Pod", OWNER, a_pod(version=11))
    for _ in range(2):
        known.cache.apply_event(known.pods, "ADDED", a_pod(version=11))
    assert known.rung == []
    assert await known.cache.wait_until_settled(OWNER)
    known.cache.apply_event(known.pods, "ADDED", a_pod(version=11))
    assert known.rung == [OWNER]


def test_state_config_map_enqueues_on_deletion_only() -> None:
    rung: list[tuple[str, str]] = []
    notes = Store("ConfigMap")
    cache = Cache([notes], lambda *owner: rung.append(owner))
    for event in ("ADDED", "MODIFIED"):
        cache.apply_event(notes, event, a_pod("m-tuning"))
    assert rung == []
    cache.apply_event(notes, "DELETED", a_pod("m-tuning"))
    assert rung == [OWNER]


def test_settle_waits_for_written_object() -> None:
    async def look() -> tuple[bool, float]:
        loop, known = asyncio.get_running_loop(), Rung()
        known.cache.record_write("Pod", OWNER, a_pod(version=11))
        loop.call_later(2.0, known.cache.apply_event, known.pods, "ADDED", a_pod(version=11))
        return await known.cache.wait_until_settled(OWNER), loop.time()

    assert virtual_time.run(look()) == (True, 2.0)


def test_settle_waits_for_deleted_object() -> None:
    async def look(event: str, **metadata: Any) -> tuple[bool, float]:
        loop, known = asyncio.get_running_loop(), Rung(a_pod())
        known.cache.record_delete("Pod", "n", "m-g0-0", "u-m-g0-0")
        loop.call_later(1.0, known.cache.apply_event, known.pods, "MODIFIED", a_pod(version=11))  # something else
        loop.call_later(2.0, known.cache.apply_event, known.pods, event, a_pod(version=12, **metadata))
        return await known.cache.wait_until_settled(OWNER), loop.time()

    assert virtual_time.run(look("DELETED")) == (True, 2.0)
    assert virtual_time.run(look("MODIFIED", deletionTimestamp="2026-01-01T12:00:00Z")) == (True, 2.0)


def test_settle_times_out() -> None:
    async def look() -> tuple[bool, bool]:
        known = Rung()
        known.cache.record_write("Pod", OWNER, a_pod(version=11))
        in_time = await known.cache.wait_until_settled(OWNER)
        known.cache.replace_all(known.pods, [a_pod(version=11)], 30)
        return in_time, await known.cache.wait_until_settled(OWNER)

    assert virtual_time.run(look()) == (False, True)


async def test_settle_ignores_other_resources() -> None:
    known = Rung()
    known.cache.record_write("Pod", OWNER, a_pod(version=11))
    assert await known.cache.wait_until_settled(("n", "other"))


@pytest.mark.parametrize(("seconds", "is_synced"), [(STALE_SECONDS - 1, True), (STALE_SECONDS + 1, False)])
def test_stale_kind_is_not_synced(seconds: float, is_synced: bool) -> None:
    known = Rung(a_pod())
    known.now += seconds
    assert known.cache.is_synced("Pod", "n") is is_synced
    known.cache.mark_alive(known.pods)
    assert known.cache.is_synced("Pod", "n")


def test_namespaced_cache_has_no_other_namespace() -> None:
    known = Rung(namespace="n")
    assert known.cache.is_synced("Pod", "n")
    assert not known.cache.is_synced("Pod", "elsewhere")


def test_unserved_kind_is_not_synced_nor_awaited() -> None:
    known = Rung()
    known.cache.mark_not_served(known.pods)
    assert known.pods.sync_state is SyncState.NOT_SERVED
    assert not known.cache.is_synced("Pod", "n")
    assert known.cache.is_not_served("Pod", "n")


def nested(levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize("levels", [1, 5000])
def test_strings_are_interned_at_any_depth(levels: int) -> None:
    store = Store("Pod")
    for name in ("one", "other"):
        word = "".join(["Clu", "sterIP"])  # no two of these are one object
        metadata = {"namespace": "n", "name": name, "labels": {DEPLOYMENT_LABEL: "m"}}
        store.put({"metadata": metadata, "spec": {"type": word, "deep": nested(levels)}})
    one, other = store.of(("n", "m"))
    assert one["spec"]["type"] == other["spec"]["type"] == "ClusterIP"
    assert (one["spec"]["type"] is other["spec"]["type"]) is (levels == 1)

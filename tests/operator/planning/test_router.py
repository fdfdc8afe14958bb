"""Router: its children, the switch of the client Service, and replica counts from and to zero."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
from operator_cluster import TOKEN, FakeCluster
from pod_security import violations
from trimtab_operator.builders.admin_token import state_token, token_hash
from trimtab_operator.builders.labels import ADMIN_PORT, HTTP_PORT, ROUTER_ADMIN_PORT
from trimtab_operator.observed.router import RouterReport
from trimtab_operator.resource.installation import (
    Installation,
    NetworkAccess,
    PodMonitoring,
    RouterDefaults,
    RouterRole,
)
from trimtab_router.flags import parse_arguments

OPERATOR = {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "operator"}}}
ROUTER = RouterDefaults(image="router:1", role=RouterRole(kind="ClusterRole", name="trimtab-router"))
INSTALLATION = Installation(NetworkAccess(operator=OPERATOR), PodMonitoring(), router=ROUTER)
KINDS = ("Deployment", "RoleBinding", "PodDisruptionBudget", "NetworkPolicy", "PodMonitor")
TO_ENGINES = {"trimtab.dev/deployment": "m", "trimtab.dev/role": "leader"}
TO_ROUTER = {"trimtab.dev/deployment": "m", "app.kubernetes.io/component": "router"}
TO_ZERO = {"minReplicas": 0, "maxReplicas": 4, "idleTimeout": "1m"}


def make_cluster(
    *, settled: bool = True, installation: Installation = INSTALLATION, serves: tuple[str, ...] = KINDS, **spec: Any
) -> FakeCluster:
    cluster = FakeCluster(**{"router": {}, **spec})
    cluster.installation, cluster.serves = installation, set(serves)
    if settled:
        cluster.settle()
    return cluster


def make_idle_cluster(**spec: Any) -> FakeCluster:
    """Return a cluster with one replica that may scale to zero."""
    return make_cluster(**{"scaling": TO_ZERO, "tuning": {"mode": "Auto"}, **spec})


def router_children(cluster: FakeCluster) -> set[tuple[str, str]]:
    return {
        key
        for key, child in cluster.objects.items()
        if child["metadata"]["labels"].get("app.kubernetes.io/component") == "router"
    }


def router_pods(cluster: FakeCluster) -> list[str]:
    return [name for name in sorted(cluster.pods) if name.startswith("m-router-")]


def selector(cluster: FakeCluster) -> dict[str, str]:
    found: dict[str, str] = cluster.objects["Service", "m"]["spec"]["selector"]
    return found


def ticks(cluster: FakeCluster, seconds: float) -> None:
    end = cluster.now + seconds
    while cluster.now < end:
        cluster.tick()


def hold(cluster: FakeCluster, count: int, *, pod: int = 0) -> None:
    cluster.demand[router_pods(cluster)[pod]] = RouterReport(
        0.0, held=count, in_flight=0, arrived=count, last_arrival_seconds_ago=0.0, oldest_held_seconds=1.5
    )


# --- children ---------------------------------------------------------------------------------------------------------


def test_router_has_all_its_children() -> None:
    assert router_children(make_cluster()) == {
        ("Deployment", "m-router"),
        ("ServiceAccount", "m-router"),
        ("RoleBinding", "m-router"),
        ("Service", "m-engines"),
        ("PodDisruptionBudget", "m-router"),
        ("NetworkPolicy", "m-router"),
        ("PodMonitor", "m-router"),
    }


def test_no_router_has_no_children() -> None:
    assert router_children(make_cluster(router=None)) == set()
    assert router_children(make_cluster(router={"enabled": False})) == set()


def test_resting_router_is_not_written() -> None:
    cluster = make_cluster()
    cluster.writes = 0
    ticks(cluster, 30)
    assert cluster.writes == 0


@pytest.mark.parametrize(
    ("kind", "name"), [("Deployment", "m-router"), ("Service", "m-engines"), ("NetworkPolicy", "m-router")]
)
def test_edited_router_children_are_restored(kind: str, name: str) -> None:
    cluster = make_cluster()
    whole = dict(cluster.objects[kind, name]["spec"])
    cluster.objects[kind, name]["spec"] = {"clusterIP": "None"} if kind == "Service" else {}
    ticks(cluster, 10)
    assert cluster.objects[kind, name]["spec"] == whole
    del cluster.objects[kind, name]
    cluster.settle()
    assert cluster.objects[kind, name]["spec"] == whole


def test_router_change_keeps_engine_pods() -> None:
    cluster = make_cluster(router=None)
    before = cluster.revisions, [pod["metadata"]["uid"] for pod in cluster.pods.values()]
    cluster.edit(router={"maxHold": "5m"})
    cluster.settle()
    engines = [pod["metadata"]["uid"] for name, pod in cluster.pods.items() if "router" not in name]
    assert (cluster.revisions, engines) == before


def test_disabled_router_is_removed_after_service_switched() -> None:
    cluster = make_cluster()
    cluster.edit(router={"enabled": False})
    cluster.tick()
    assert selector(cluster) == TO_ENGINES
    assert ("Deployment", "m-router") in cluster.objects
    cluster.settle()
    assert router_children(cluster) == set()


def test_removed_router_is_removed_with_unknown_model() -> None:
    cluster = make_cluster()
    cluster.edit(router=None, model={"uri": "file:///models/other"})
    cluster.model_words = (1, "no such folder")
    ticks(cluster, 20)
    assert selector(cluster) == TO_ENGINES
    assert ("Deployment", "m-router") not in cluster.objects


def test_missing_permission_creates_no_router() -> None:
    cluster = make_cluster(serves=("PodDisruptionBudget",))
    assert router_children(cluster) == set()
    assert selector(cluster) == TO_ENGINES
    assert "Deployment" in cluster.status["router"]["message"]


def test_installation_without_router_rejects_the_spec() -> None:
    cluster = make_cluster(settled=False, installation=Installation())
    cluster.tick()
    assert "spec.router: this operator has no --router" in cluster.condition("Ready")["message"]


def test_router_deployment_follows_the_spec() -> None:
    router = {
        "replicas": 3,
        "image": "mine:2",
        "maxHold": "2m",
        "maxHeldRequests": 50,
        "sessionHeader": "x-chat",
        "trustHeaders": True,
        "priorities": [
            {"name": "interactive", "value": 10},
            {"name": "batch", "value": -5, "apiKeySHA256s": ["a" * 64]},
        ],
        "resources": {"limits": {"memory": "1Gi"}},
    }
    objectives = {"itl": {"target": "50ms"}}
    cluster = make_cluster(router=router, objectives=objectives, rollout={"drainTimeout": "40s"})
    made = cluster.objects["Deployment", "m-router"]["spec"]
    (container,) = made["template"]["spec"]["containers"]
    assert (made["replicas"], container["image"]) == (3, "mine:2")
    assert container["resources"] == {"limits": {"memory": "1Gi"}}
    assert made["template"]["spec"]["terminationGracePeriodSeconds"] == 120 + 40 + 15
    assert set(container["args"]) >= {
        "--service=n/m-engines",
        "--served-model=m",
        "--max-hold=120",
        "--max-held-requests=50",
        "--session-header=x-chat",
        "--trust-headers",
        "--itl-target=0.05",
        "--drain-timeout=160",
        "--priority=interactive=10",
        "--priority=batch=-5",
        f"--key-priority={'a' * 64}=batch",
    }


def test_router_pods_meet_the_restricted_standard() -> None:
    template = make_cluster().objects["Deployment", "m-router"]["spec"]["template"]
    assert violations(template) == []
    (container,) = template["spec"]["containers"]
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_router_flags_are_known_to_the_router() -> None:
    router = {
        "maxHeldRequests": 9,
        "sessionHeader": "x-a",
        "tenantHeader": "x-b",
        "priorityHeader": "x-c",
        "trustHeaders": True,
        "priorities": [{"name": "high", "value": 5, "apiKeySHA256s": ["b" * 64]}],
    }
    cluster = make_cluster(router=router, objectives={"itl": {"target": "50ms"}})
    (container,) = cluster.objects["Deployment", "m-router"]["spec"]["template"]["spec"]["containers"]
    parsed = parse_arguments(container["args"])
    assert (parsed.service, parsed.served_models, parsed.admin_port) == ("n/m-engines", ("m",), ROUTER_ADMIN_PORT)
    assert (parsed.max_hold_seconds, parsed.drain_timeout_seconds) == (600.0, 630.0)
    assert (parsed.priorities, parsed.key_priorities) == ({"high": 5}, {"b" * 64: "high"})
    assert (parsed.session_header, parsed.tenant_header, parsed.priority_header) == ("x-a", "x-b", "x-c")
    assert (parsed.trust_headers, parsed.max_held_requests, parsed.itl_target_seconds) == (True, 9, 0.05)


def test_router_token_differs_from_engine_token() -> None:
    cluster = make_cluster()

    def hashes(kind: str, name: str) -> list[str]:
        (container,) = cluster.objects[kind, name]["spec"]["template"]["spec"]["containers"]
        return [flag for flag in container["args"] if flag.startswith("--admin-token-sha256=")]

    engine, router = hashes("StatefulSet", "m-g0"), hashes("Deployment", "m-router")
    assert len(engine) == len(router) == 1
    assert engine != router


def test_engines_know_the_hash_of_the_routers_state_token() -> None:
    (container,) = make_cluster().objects["StatefulSet", "m-g0"]["spec"]["template"]["spec"]["containers"]
    assert f"--state-token-sha256={token_hash(state_token(TOKEN))}" in container["args"]


def test_engine_ports_open_to_router() -> None:
    cluster = make_cluster()
    rules = cluster.objects["NetworkPolicy", "m"]["spec"]["ingress"]
    admin = next(rule["from"] for rule in rules if rule["ports"][0]["port"] == ADMIN_PORT)
    assert {"podSelector": {"matchLabels": TO_ROUTER}} in admin
    front = {"podSelector": {"matchLabels": {"app": "front"}}}
    cluster.installation = replace(INSTALLATION, network=NetworkAccess(operator=OPERATOR, clients=(front,)))
    cluster.settle()
    ports = {
        name: {
            rule["ports"][0]["port"]: rule["from"] for rule in cluster.objects["NetworkPolicy", name]["spec"]["ingress"]
        }
        for name in ("m", "m-router")
    }
    assert {"podSelector": {"matchLabels": TO_ROUTER}} in ports["m"][HTTP_PORT]
    assert ports["m-router"] == {HTTP_PORT: [front, OPERATOR], ROUTER_ADMIN_PORT: [OPERATOR]}


def test_router_pods_are_not_selected_as_engines() -> None:
    cluster = make_cluster(replicas=2)
    assert len(cluster.groups) == 2
    assert len(router_pods(cluster)) == 2
    assert cluster.status["readyReplicas"] == 2


# --- client Service ---------------------------------------------------------------------------------------------------


def test_service_selects_ready_router() -> None:
    cluster = make_cluster()
    assert selector(cluster) == TO_ROUTER
    assert cluster.status["router"] == {"replicas": 2, "readyReplicas": 2, "selected": True}


def test_service_selects_engines_without_ready_router() -> None:
    cluster = make_cluster()
    cluster.set_ready(router_pods(cluster)[0], ready=False)
    ticks(cluster, 5)
    assert selector(cluster) == TO_ROUTER
    cluster.set_ready(router_pods(cluster)[1], ready=False)
    ticks(cluster, 5)
    assert selector(cluster) == TO_ENGINES
    assert "no router pod is Ready" in cluster.condition("Serving")["message"]
    cluster.set_ready(router_pods(cluster)[1])
    ticks(cluster, 5)
    assert selector(cluster) == TO_ROUTER


def test_service_keeps_router_while_no_replica_serves() -> None:
    cluster = make_cluster()
    for name in cluster.pods:
        cluster.set_ready(name, ready=False)
    ticks(cluster, 5)
    assert selector(cluster) == TO_ROUTER


def test_enabled_router_is_selected_after_it_is_ready() -> None:
    cluster = make_cluster(router=None)
    cluster.unready |= {"m-router-5d9-0", "m-router-5d9-1"}
    cluster.edit(router={})
    ticks(cluster, 10)
    assert len(router_pods(cluster)) == 2
    assert selector(cluster) == TO_ENGINES
    cluster.set_ready("m-router-5d9-1")
    ticks(cluster, 5)
    assert selector(cluster) == TO_ROUTER


# --- zero replicas ----------------------------------------------------------------------------------------------------


def test_idle_deployment_scales_to_zero() -> None:
    cluster = make_idle_cluster()
    ticks(cluster, 30)
    assert len(cluster.groups) == 1
    ticks(cluster, 60)
    assert len(cluster.groups) == 0
    assert selector(cluster) == TO_ROUTER
    assert "NoRequests" in cluster.events
    assert cluster.condition("Ready")["reason"] == "ScaledToZero"
    assert (cluster.condition("Serving")["status"], cluster.condition("Serving")["reason"]) == ("True", "ScaledToZero")
    history = cluster.status["tuning"]["history"][0]
    assert (history["reason"], history["from"], history["to"]) == ("NoRequests", "1", "0")


def test_history_at_zero_has_the_decision() -> None:
    """The iteration that removes the replica leaves its status to the next one, in which no replica runs."""
    cluster = make_idle_cluster()
    ticks(cluster, 90)
    assert len(cluster.groups) == 0
    cluster.status["tuning"]["history"] = []
    cluster.tick()
    assert [entry["reason"] for entry in cluster.status["tuning"]["history"]] == ["NoRequests"]


def test_request_restarts_the_idle_timeout() -> None:
    cluster = make_idle_cluster()
    ticks(cluster, 40)
    cluster.demand[router_pods(cluster)[1]] = RouterReport(0.0, 0, 0, arrived=1, last_arrival_seconds_ago=5.0)
    ticks(cluster, 40)
    assert len(cluster.groups) == 1


@pytest.mark.parametrize("busy", ["held", "in_flight"])
def test_open_request_keeps_the_replica(busy: str) -> None:
    cluster = make_idle_cluster()
    cluster.demand[router_pods(cluster)[0]] = dataclasses.replace(RouterReport(0.0, 0, 0, 1), **{busy: 1})
    ticks(cluster, 200)
    assert len(cluster.groups) == 1


def test_request_to_engine_keeps_the_replica() -> None:
    """A client that connects to an engine directly is not known to the router."""
    cluster = make_idle_cluster()
    cluster.engine(0).running = 1.0
    ticks(cluster, 200)
    assert len(cluster.groups) == 1


def test_silent_router_keeps_the_replica() -> None:
    cluster = make_idle_cluster()
    cluster.silent.add(router_pods(cluster)[1])
    ticks(cluster, 300)
    assert len(cluster.groups) == 1


def test_silent_engine_keeps_the_replica() -> None:
    cluster = make_idle_cluster()
    cluster.silent.add("m-g0-0")
    ticks(cluster, 300)
    assert len(cluster.groups) == 1


def test_no_router_pod_keeps_the_replica() -> None:
    cluster = make_idle_cluster()
    for name in router_pods(cluster):
        cluster.set_ready(name, ready=False)
    for name in router_pods(cluster):
        cluster.pods[name]["status"]["containerStatuses"] = []
    for _ in range(30):
        cluster.plan_reconcile()
        cluster.now += 10
    assert len(cluster.groups) == 1


@pytest.mark.parametrize("mode", ["Off", "Recommend"])
def test_zero_needs_tuning_mode_auto(mode: str) -> None:
    cluster = make_idle_cluster(tuning={"mode": mode})
    ticks(cluster, 300)
    assert len(cluster.groups) == 1


def test_disabled_scale_down_keeps_the_replica() -> None:
    cluster = make_idle_cluster(scaling={**TO_ZERO, "behavior": {"scaleDown": {"selectPolicy": "Disabled"}}})
    ticks(cluster, 300)
    assert len(cluster.groups) == 1


@pytest.mark.parametrize("mode", ["Off", "Recommend", "Auto"])
def test_held_request_starts_a_replica(mode: str) -> None:
    cluster = make_idle_cluster(tuning={"mode": mode}, replicas=0)
    assert len(cluster.groups) == 0
    cluster.start_seconds = 30.0
    hold(cluster, 1)
    cluster.tick()
    assert len(cluster.groups) == 1
    assert "RequestsHeld" in cluster.events
    assert selector(cluster) == TO_ROUTER
    cluster.tick()
    assert (cluster.condition("Serving")["status"], cluster.condition("Serving")["reason"]) == ("True", "RequestsHeld")
    assert cluster.condition("Ready")["status"] == "False"


def test_many_held_requests_start_several_replicas() -> None:
    cluster = make_idle_cluster(replicas=0, engine={"maxNumSeqs": 32})
    hold(cluster, 70)
    cluster.tick()
    assert len(cluster.groups) == 3


def test_held_requests_start_at_most_max_replicas() -> None:
    cluster = make_idle_cluster(replicas=0, engine={"maxNumSeqs": 1})
    hold(cluster, 1000)
    ticks(cluster, 10)
    assert len(cluster.groups) == 4


def test_requests_held_by_a_restart_add_no_replicas() -> None:
    cluster = make_idle_cluster(scaling={"minReplicas": 1, "maxReplicas": 4}, engine={"maxNumSeqs": 1})
    cluster.set_ready("m-g0-0", ready=False)
    hold(cluster, 100)
    ticks(cluster, 20)
    assert len(cluster.groups) == 1


def test_more_held_requests_during_the_start_add_replicas() -> None:
    cluster = make_idle_cluster(replicas=0, engine={"maxNumSeqs": 32})
    cluster.start_seconds = 60.0
    hold(cluster, 1)
    cluster.tick()
    assert len(cluster.groups) == 1
    hold(cluster, 90)
    ticks(cluster, 10)
    assert len(cluster.groups) == 3


def test_held_request_does_not_change_spec_replicas() -> None:
    cluster = make_cluster(replicas=0)
    hold(cluster, 5)
    ticks(cluster, 30)
    assert len(cluster.groups) == 0
    assert cluster.condition("Serving")["status"] == "False"


def test_zero_survives_an_operator_restart() -> None:
    cluster = make_idle_cluster(replicas=0)
    cluster.restart_operator()
    ticks(cluster, 60)
    assert len(cluster.groups) == 0
    hold(cluster, 1)
    cluster.restart_operator()
    cluster.tick()
    assert len(cluster.groups) == 1


def test_change_at_zero_is_not_rolled_back() -> None:
    cluster = make_idle_cluster(replicas=0, rollout={"startTimeout": "30s"})
    cluster.edit(runtime={"device": "cpu", "image": "engine:1", "args": ["--seed=2"]})
    ticks(cluster, 300)
    hold(cluster, 1)
    ticks(cluster, 20)
    assert len(cluster.groups) == 1
    assert cluster.condition("Degraded")["status"] == "False"


def test_zero_without_ready_router_does_not_serve() -> None:
    cluster = make_idle_cluster(replicas=0)
    for name in router_pods(cluster):
        cluster.set_ready(name, ready=False)
    ticks(cluster, 5)
    condition = cluster.condition("Serving")
    assert (condition["status"], condition["reason"]) == ("False", "RouterNotReady")

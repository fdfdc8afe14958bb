"""Whether two clusters ended in the same place: a loop is driven to rest, and all that could be seen is compared."""

from __future__ import annotations

import json
import re
from typing import Any

from operator_cluster import TICK_SECONDS, TOKEN, FakeCluster
from trimtab_operator.reconcile.reconciler import ReconcileLoop, Reconciler
from trimtab_operator.rollout.rollback import from_text

OF_HISTORY = ("conditions", "tuning", "groups", "lastScaleTime")


async def come_to_rest(
    cluster: FakeCluster, reconciler: Reconciler, loop: ReconcileLoop, *, still_ticks: int = 1
) -> None:
    """Tick until nothing is written and nothing moves, for so many ticks in a row."""
    still = 0
    for _ in range(120):
        before = cluster.writes
        await reconciler.tick(loop)
        is_moving = cluster.condition("Progressing")["status"] == "True" or ("Job", "m-facts") in cluster.objects
        still = still + 1 if cluster.writes == before else 0
        if still >= still_ticks and not is_moving:
            return
        cluster.now += TICK_SECONDS * (1 + still)  # nothing to do: wait for longer
        cluster.controllers()
    raise AssertionError("the operator does not come to rest")


def end_state(cluster: FakeCluster) -> dict[str, Any]:
    """Everything that somebody could see, but for numbers and moments that history leaves behind: which ordinals the
    replicas of a roll have depends on which were free.
    """
    found: dict[str, Any] = json.loads(_numbered_from_0(cluster, json.dumps(_seen(cluster), default=str)))
    return found


def _numbered_from_0(cluster: FakeCluster, text: str) -> str:
    new = {str(group.ordinal): str(number) for number, group in enumerate(cluster.groups)}
    services = ((name, m["spec"].get("clusterIP")) for (kind, name), m in cluster.objects.items() if kind == "Service")
    for name, address in services:
        text = re.sub(rf"--master-addr={re.escape(str(address))}(?!\d)", f"--master-addr={name}", text)
    # A message may name a replica that was removed since.
    text = re.sub(r"\bm-g(\d+)", lambda name: f"m-g{new.get(name[1], '-removed')}", text)
    return re.sub(r'("trimtab.dev/group": ")(\d+)', lambda label: label[1] + new.get(label[2], label[2]), text)


def _seen(cluster: FakeCluster) -> dict[str, Any]:
    specs = {f"{kind}/{name}": dict(m["spec"]) for (kind, name), m in cluster.objects.items() if "spec" in m}
    for spec in specs.values():
        spec.pop("clusterIP", None)
    labels = {f"{kind}/{name}": m["metadata"]["labels"] for (kind, name), m in cluster.objects.items()}
    conditions = {c["type"]: (c["status"], c["reason"], c["message"]) for c in cluster.status["conditions"]}
    kept = cluster.objects.get(("ConfigMap", "m-rollout"), {}).get("data", {}).get("rollout.json")
    rollout = from_text(kept, key=TOKEN)
    return {
        "specs": specs,
        "labels": labels,
        "rollout": (rollout.known_good, rollout.attempt and rollout.attempt.change, rollout.rolled_back),
        "no room": rollout.surge_obstacle and rollout.surge_obstacle.change,
        "pods": {name: pod["metadata"]["labels"] for name, pod in cluster.pods.items()},
        "values": {name: cluster.engines[pod["metadata"]["uid"]].values for name, pod in cluster.pods.items()},
        "status": {key: value for key, value in cluster.status.items() if key not in OF_HISTORY},
        "conditions": conditions,
    }

"""`trimtab-operator validate`, the webhook and the reconciler agree on specs with one mistake."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
from operator_builders import a_resource
from operator_cluster import FakeCluster
from trimtab_operator.planning.admission import review, validation_messages
from trimtab_operator.resource.installation import Installation, RouterDefaults, RouterRole

SPECS, BATCHES = 500, 5
ROUTER = RouterDefaults(image="router:1", role=RouterRole(kind="ClusterRole", name="router"))
IMAGE = "engine:1"
SPEC: dict[str, Any] = {
    "model": {"uri": "hf://org/name", "revision": "main", "servedName": "m", "tokenSecretRef": {"name": "s"}},
    "runtime": {"device": "cpu", "image": IMAGE, "args": ["--seed=1"]},
    "parallelism": {"tensor": 2, "pipeline": 1, "gpusPerNode": 2},
    "engine": {"maxNumSeqs": 16, "maxNumBatchedTokens": 512, "gpuMemoryUtilization": "0.8", "swapSpace": "1Gi"},
    "replicas": 2,
    "objectives": {"ttft": {"target": "500ms"}, "itl": {"target": "50ms"}},
    "tuning": {"mode": "Auto", "bounds": {"maxNumSeqs": {"min": 1, "max": 32}}},
    "router": {"enabled": True},
    "rollout": {"maxSurge": 1, "maxUnavailable": "50%", "drainTimeout": "30s", "bakeTime": "10s"},
    "template": {
        "metadata": {"labels": {"team": "a"}},
        "spec": {
            "nodeSelector": {"disk": "fast"},
            "tolerations": [{"key": "k", "operator": "Exists"}],
            "volumes": [{"name": "v", "emptyDir": {}}],
            "containers": [
                {
                    "name": "main",
                    "resources": {"requests": {"cpu": "1"}, "limits": {"memory": "4Gi"}},
                    "env": [{"name": "A", "value": "b"}],
                    "volumeMounts": [{"name": "v", "mountPath": "/data"}],
                }
            ],
        },
    },
}
MISTAKES: tuple[Any, ...] = (None, True, -1, 10**9, 0.5, "", "x y", "2Gi", "7h", "--port=1", [], {}, ["a"], {"a": 1})


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, child in children:
        yield from places(child, (*path, key))


def mistaken_spec(chance: random.Random) -> dict[str, Any]:
    """Return the spec with one value replaced, or one unknown field added."""
    spec = copy.deepcopy(SPEC)
    *parents, last = chance.choice(list(places(SPEC)))
    node: Any = spec
    for key in parents:
        node = node[key]
    if isinstance(node, dict) and chance.random() < 0.2:
        node[f"{last}s"] = chance.choice(MISTAKES)
    else:
        node[last] = chance.choice(MISTAKES)
    return spec


@pytest.mark.parametrize("batch", range(BATCHES))
def test_validate_webhook_and_reconciler_agree(batch: int) -> None:
    num_invalid = 0
    for seed in range(batch, SPECS, BATCHES):
        body = {**a_resource(), "kind": "InferenceDeployment", "spec": mistaken_spec(random.Random(seed))}
        has_router = seed % 10 != 0
        messages = validation_messages(body, default_image=IMAGE, has_router=has_router)
        num_invalid += bool(messages)
        request = {"uid": "r", "operation": "CREATE", "object": copy.deepcopy(body)}
        verdict = review({"request": request}, default_image=IMAGE, has_router=has_router)["response"]
        assert verdict["allowed"] is not bool(messages), f"seed {seed}: {messages}"
        cluster = FakeCluster(knows_the_model=False)
        cluster.installation = Installation(router=ROUTER if has_router else None)
        cluster.body = copy.deepcopy(body)
        cluster.tick()
        ready = cluster.condition("Ready")
        assert (ready["reason"] == "InvalidSpec") is bool(messages), f"seed {seed}: {messages} {ready}"
        for message in messages:
            assert message in verdict["status"]["message"], f"seed {seed}"
        for message in messages[:1]:  # the reconciler reports no rules of values that it could not parse
            assert message.removeprefix("spec: ") in ready["message"], f"seed {seed}"
    assert num_invalid > 0.5 * SPECS / BATCHES

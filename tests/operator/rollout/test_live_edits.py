"""Edits of start values within the caps are PATCHed to running engines and restart no pod."""

from __future__ import annotations

import random
from typing import Any

import pytest
from operator_builders import a_deployment
from operator_cluster import FakeCluster, FakeEngine
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.stateful_set import pod_template, revision_of
from trimtab_operator.tuner.parameters import Parameter, typed

RESOURCES, BATCHES = 100, 5
UTILIZATION, SEQS, TOKENS = (
    Parameter.GPU_MEMORY_UTILIZATION,
    Parameter.MAX_NUM_SEQS,
    Parameter.MAX_NUM_BATCHED_TOKENS,
)
FIELDS = {UTILIZATION: "gpuMemoryUtilization", SEQS: "maxNumSeqs", TOKENS: "maxNumBatchedTokens"}
DEFAULTS: dict[str, Any] = {"gpuMemoryUtilization": "0.9", "maxNumSeqs": 128, "maxNumBatchedTokens": 2048}
START = {"gpuMemoryUtilization": "0.8", "maxNumSeqs": 32, "maxNumBatchedTokens": 512}


def make_cluster(**spec: Any) -> FakeCluster:
    cluster = FakeCluster(**{"replicas": 2, "engine": START, "rollout": {"maxSurge": 0}, **spec})
    cluster.settle()
    return cluster


def pod_uids(cluster: FakeCluster) -> dict[str, str]:
    return {name: pod["metadata"]["uid"] for name, pod in sorted(cluster.pods.items())}


def values_of(cluster: FakeCluster, parameter: Parameter = SEQS) -> list[Any]:
    """Return the value of each present replica's engine, by ordinal."""
    return [cluster.engine(group.ordinal).values[parameter] for group in cluster.groups]


def restarts_by(cluster: FakeCluster, **spec: Any) -> int:
    """Edit the spec, and return the number of pods that were replaced."""
    before = pod_uids(cluster)
    cluster.edit(**spec)
    cluster.settle()
    return sum(pod_uids(cluster)[name] != uid for name, uid in before.items())


# --- within the caps --------------------------------------------------------------------------------------------------


def random_engine(chance: random.Random, caps: dict[str, float]) -> dict[str, Any]:
    """Return random start values up to the caps; each may be omitted if its default is below the cap."""
    tokens = chance.randint(1, int(caps["maxNumBatchedTokens"]))
    seqs = chance.randint(1, min(tokens, int(caps["maxNumSeqs"])))
    share = chance.randint(20, int(100 * caps["gpuMemoryUtilization"])) / 100
    drawn: dict[str, Any] = {"gpuMemoryUtilization": f"{share:.2f}", "maxNumSeqs": seqs, "maxNumBatchedTokens": tokens}
    omitted = {name for name, value in DEFAULTS.items() if float(value) <= caps[name] and chance.random() < 0.2}
    kept = {name: value for name, value in drawn.items() if name not in omitted}
    budget, limit = kept.get("maxNumBatchedTokens", 2048), kept.get("maxNumSeqs", 128)
    return kept if limit <= budget else drawn


@pytest.mark.parametrize("batch", range(BATCHES))
def test_live_edits_within_caps_restart_no_pod(batch: int) -> None:
    for seed in range(batch, RESOURCES, BATCHES):
        chance = random.Random(seed)
        mode = chance.choice(["Off", "Recommend", "Auto"])
        start = random_engine(chance, {"gpuMemoryUtilization": 0.95, "maxNumSeqs": 256, "maxNumBatchedTokens": 4096})
        parallelism = {"pipeline": 2, "gpusPerNode": 1} if chance.random() < 0.2 else {}
        cluster = FakeCluster(
            replicas=chance.randint(1, 3),
            engine=start,
            tuning={"mode": mode},
            parallelism=parallelism,
            rollout={"bakeTime": chance.choice(["0s", "20s"]), "maxSurge": chance.choice([0, 1])},
        )
        cluster.settle()
        first = {name: float({**DEFAULTS, **start}[name]) for name in DEFAULTS}
        factor = 1 if mode == "Off" else 2
        caps = {name: factor * value for name, value in first.items()}
        share = first["gpuMemoryUtilization"]
        caps["gpuMemoryUtilization"] = share if mode == "Off" else max(share, 0.95)
        for _ in range(3):
            engine = random_engine(chance, caps)
            assert restarts_by(cluster, engine=engine) == 0, f"seed {seed}: {start} to {engine} in mode {mode}"
            wanted = {p: typed(p, float({**DEFAULTS, **engine}[name])) for p, name in FIELDS.items()}
            for group in cluster.groups:
                values = cluster.engine(group.ordinal).values
                assert {p: values[p] for p in FIELDS} == wanted, f"seed {seed}: {engine}"
            assert cluster.condition("Ready")["status"] == "True"


def test_replica_added_after_live_edit_starts_with_its_value() -> None:
    cluster = make_cluster()
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 48}) == 0
    cluster.is_answering = False  # no engine can be patched
    cluster.edit(replicas=3)
    for _ in range(5):
        cluster.tick()
    assert values_of(cluster) == [48, 48, 48]
    assert "--max-num-seqs-cap=64" in cluster.pods["m-g2-0"]["spec"]["containers"][0]["args"]


def test_engine_restarted_in_its_pod_gets_the_present_value() -> None:
    cluster = make_cluster()
    cluster.edit(engine={**START, "maxNumSeqs": 48})
    cluster.settle()
    engine = cluster.engine(0)
    engine.values[SEQS] = 32  # the flag of the pod
    cluster.settle()
    assert values_of(cluster) == [48, 48]


def test_pod_replaced_after_live_edit_agrees_with_its_group() -> None:
    """Pods of one engine must start with the same flags."""
    cluster = make_cluster(parallelism={"pipeline": 2, "gpusPerNode": 1})
    cluster.edit(engine={**START, "maxNumSeqs": 48})
    cluster.settle()
    del cluster.pods["m-g0-w-0"]
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert values_of(cluster) == [48, 48]
    cluster.edit(replicas=3)
    cluster.settle()
    flags = {name: pod["spec"]["containers"][0]["args"] for name, pod in cluster.pods.items()}
    assert {name for name, args in flags.items() if "--max-num-seqs=48" in args} == {"m-g2-0", "m-g2-w-0"}


def test_omitted_value_returns_to_the_default() -> None:
    cluster = make_cluster(engine={"maxNumSeqs": 100})
    assert restarts_by(cluster, engine={}) == 0
    assert values_of(cluster) == [128, 128]


def test_live_edit_discards_the_tuned_value() -> None:
    cluster = make_cluster(tuning={"mode": "Auto"})
    assert cluster.state.tuner is not None
    cluster.state = cluster.state.__class__(tuner=cluster.state.tuner.with_value(SEQS, 60, cluster.now))
    cluster.settle()
    assert values_of(cluster) == [60, 60]
    edited_at = cluster.now
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 40}) == 0
    assert values_of(cluster) == [40, 40]
    assert cluster.state.tuner is not None
    assert cluster.state.tuner.last_live_move == edited_at, "earlier measurements do not count"


def test_live_edit_reaches_engines_with_tuned_values() -> None:
    cluster = make_cluster(tuning={"mode": "Auto"})
    assert cluster.state.tuner is not None
    cluster.state = cluster.state.__class__(tuner=cluster.state.tuner.with_value(SEQS, 60, cluster.now))
    cluster.settle()
    assert restarts_by(cluster, engine={**START, "maxNumBatchedTokens": 600}) == 0
    assert (values_of(cluster), values_of(cluster, TOKENS)) == ([60, 60], [600, 600])


def test_rejected_start_value_does_not_stop_the_scheduling_policy() -> None:
    cluster = make_cluster()
    for engine in cluster.engines.values():
        engine.refuses = frozenset({"max_num_seqs"})
    cluster.edit(engine={**START, "maxNumSeqs": 40, "schedulingPolicy": "priority"})
    for _ in range(5):
        cluster.tick()
    assert [cluster.engine(ordinal).policy for ordinal in (0, 1)] == ["priority", "priority"]
    assert values_of(cluster) == [32, 32]


# --- engines that do not start ----------------------------------------------------------------------------------------


def can_start(engine: FakeEngine) -> bool:
    return engine.values[SEQS] <= 40


@pytest.mark.parametrize("parallelism", [{}, {"pipeline": 2, "gpusPerNode": 1}], ids=["one pod", "two pods"])
def test_lower_value_replaces_pods_that_crash_at_start(parallelism: dict[str, Any]) -> None:
    """Their flags cannot change, and no engine answers that could be patched."""
    cluster = FakeCluster(replicas=2, engine={**START, "maxNumSeqs": 48}, parallelism=parallelism)
    cluster.can_start = can_start
    for _ in range(5):
        cluster.tick()
    assert cluster.condition("Ready")["status"] == "False"
    cluster.edit(engine=START)
    cluster.settle()
    assert cluster.condition("Ready")["status"] == "True"
    assert values_of(cluster) == [32, 32]


def test_lower_value_retries_a_change_that_was_rolled_back() -> None:
    bounds = {"maxNumSeqs": {"max": 64}}  # the cap does not depend on the start value
    rollout = {"startTimeout": "30s", "drainTimeout": "1s", "maxSurge": 0}
    cluster = make_cluster(rollout=rollout, tuning={"bounds": bounds})
    cluster.can_start = can_start
    changed = {"device": "cpu", "image": "engine:2"}
    cluster.edit(runtime=changed, engine={**START, "maxNumSeqs": 48})
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "RolledBack"
    cluster.edit(engine=START)
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    assert {pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()} == {"engine:2"}


def test_lower_value_rescues_a_change_that_is_being_tried() -> None:
    cluster = make_cluster(rollout={"startTimeout": "10m", "drainTimeout": "1s", "maxSurge": 0})
    cluster.can_start = lambda engine: engine.values[SEQS] <= 40 or engine.caps[SEQS] == 64
    cluster.edit(engine={**START, "maxNumSeqs": 100})
    cluster.tick()
    cluster.edit(engine={**START, "maxNumSeqs": 36})
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"
    assert values_of(cluster) == [36, 36]


def test_edit_does_not_replace_pods_that_load() -> None:
    cluster = FakeCluster(replicas=2, engine=START, start_seconds=60.0)
    for _ in range(4):
        cluster.tick()
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 40}) == 0
    assert values_of(cluster) == [40, 40]


# --- beyond the caps --------------------------------------------------------------------------------------------------


def test_start_value_above_cap_replaces_pods() -> None:
    cluster = make_cluster()
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 65}) == 2
    assert values_of(cluster) == [65, 65]
    assert "--max-num-seqs-cap=130" in cluster.pods["m-g0-0"]["spec"]["containers"][0]["args"]
    assert restarts_by(cluster, engine=START) == 0, "a lower start value keeps the caps"
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 130}) == 0


@pytest.mark.parametrize("tuning", [{"mode": "Off"}, {"bounds": {"maxNumSeqs": {"max": 100}}}], ids=str)
def test_edit_of_mode_or_bound_still_replaces_pods(tuning: dict[str, Any]) -> None:
    cluster = make_cluster(tuning={"mode": "Auto"})
    assert restarts_by(cluster, tuning=tuning) == 2


def test_fixed_cache_size_makes_the_utilization_rolling() -> None:
    runtime = {"device": "cpu", "image": "engine:1", "args": ["--num-gpu-blocks-override=100"]}
    cluster = make_cluster(runtime=runtime)
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 40}) == 0
    assert restarts_by(cluster, engine={**START, "gpuMemoryUtilization": "0.7"}) == 2


def test_start_value_on_gpus_is_live_once_set() -> None:
    """Without a value the engine chooses by the GPU, and reserves no more."""

    def revision(**engine: Any) -> str:
        deployment = a_deployment(runtime={"device": "cuda", "image": "engine:1"}, engine=engine)
        return revision_of(pod_template(deployment, token_hashes=TokenHashes("h", "h")), deployment.spec)

    assert revision() != revision(maxNumSeqs=32)
    assert revision(gpuMemoryUtilization="0.8") == revision()


# --- with other changes -----------------------------------------------------------------------------------------------


def test_rollback_restores_known_good_values() -> None:
    """A failed change of another field takes its start values with it; the other groups keep their values."""
    cluster = make_cluster(replicas=3, rollout={"startTimeout": "30s", "drainTimeout": "1s", "maxSurge": 0})
    broken = {"device": "cpu", "image": "engine:1", "args": ["--broken"]}
    cluster.edit(engine={**START, "maxNumSeqs": 50}, runtime=broken)
    for _ in range(3):
        cluster.tick()
    assert values_of(cluster)[1:] == [32, 32]
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "RolledBack"
    assert values_of(cluster) == [32, 32, 32]


def test_rollback_of_a_larger_cap_restores_the_former_cap() -> None:
    cluster = make_cluster(rollout={"startTimeout": "30s", "drainTimeout": "1s", "maxSurge": 0})
    before = cluster.revisions
    cluster.start_seconds = 1e6
    cluster.edit(engine={**START, "maxNumSeqs": 100})
    for _ in range(3):
        cluster.tick()
    assert len(set(cluster.revisions)) == 2
    for _ in range(30):
        cluster.tick()
    cluster.start_seconds = 0.0
    cluster.settle()
    assert cluster.revisions == before
    assert values_of(cluster) == [32, 32]
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 64}) == 0, "an edit within the former caps is live again"
    assert cluster.condition("Degraded")["status"] == "False"


def test_undone_edit_returns_to_the_former_caps() -> None:
    cluster = make_cluster(replicas=3, rollout={"bakeTime": "1m", "maxSurge": 0})
    before, uids = cluster.revisions, pod_uids(cluster)
    cluster.edit(engine={**START, "maxNumSeqs": 100})
    for _ in range(3):
        cluster.tick()
    assert len(set(cluster.revisions)) == 2
    cluster.edit(engine=START)
    cluster.settle()
    assert cluster.revisions == before
    assert sum(pod_uids(cluster)[name] != uid for name, uid in uids.items()) == 1


def test_live_edit_after_operator_upgrade_restarts_no_pod() -> None:
    """A newer operator renders other pods and another default image; a live edit keeps the recorded ones."""
    cluster = make_cluster(runtime={"device": "cpu"})
    cluster.default_image = "engine:2"
    cluster.restart_operator()
    assert restarts_by(cluster, engine={**START, "maxNumSeqs": 40}) == 0
    assert {pod["spec"]["containers"][0]["image"] for pod in cluster.pods.values()} == {"engine:1"}
    assert values_of(cluster) == [40, 40]
    cluster.edit(replicas=3)
    cluster.settle()
    assert cluster.pods["m-g2-0"]["spec"]["containers"][0]["image"] == "engine:1"


def test_live_edit_becomes_known_good() -> None:
    cluster = make_cluster(rollout={"startTimeout": "30s", "drainTimeout": "1s", "maxSurge": 0})
    cluster.edit(engine={**START, "maxNumSeqs": 40})
    cluster.settle()
    cluster.restart_operator()
    broken = {"device": "cpu", "image": "engine:1", "args": ["--broken"]}
    cluster.edit(runtime=broken)
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "RolledBack"
    assert values_of(cluster) == [40, 40]

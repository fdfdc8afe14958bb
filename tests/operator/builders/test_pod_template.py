"""Manifests: deterministic, without tuned values, without privileges over the node."""

from __future__ import annotations

from typing import Any

import pytest
from operator_builders import a_deployment
from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.pod import worker_pod_spec
from trimtab_operator.builders.service import client_service, rendezvous_service
from trimtab_operator.builders.stateful_set import (
    leader_stateful_set,
    pod_template,
    rendered,
    revision_of,
    worker_stateful_set,
)

HASHES = TokenHashes("b" * 64, "f" * 64)


def a_template(**spec: Any) -> dict[str, Any]:
    return pod_template(a_deployment(**spec), token_hashes=HASHES)


def args(**spec: Any) -> list[str]:
    (main,) = a_template(**spec)["spec"]["containers"]
    found: list[str] = main["args"]
    return found


def revision(**spec: Any) -> str:
    return revision_of(a_template(**spec), a_deployment(**spec).spec)


def test_equal_specs_give_equal_manifests() -> None:
    assert a_template() == a_template()
    assert revision() == revision()


def test_tuned_values_never_enter_the_template() -> None:
    tuned = a_deployment(status={"tuning": {"applied": {"max_num_seqs": "7"}}})
    assert pod_template(tuned, token_hashes=HASHES) == a_template()


def test_a_number_of_replicas_rolls_nothing() -> None:
    assert revision(replicas=1) == revision(replicas=5)


def test_respelling_a_value_rolls_nothing() -> None:
    assert args(engine={"gpuMemoryUtilization": "0.5"}) == args(engine={"gpuMemoryUtilization": "0.50"})


@pytest.mark.parametrize(
    ("tuning", "cap"),
    [
        ({"mode": "Off"}, "0.5"),
        ({"mode": "Auto"}, "0.95"),
        ({"mode": "Off", "bounds": {"gpuMemoryUtilization": {"max": "0.80"}}}, "0.8"),
    ],
)
def test_the_cap_is_the_bound_else_the_start_when_off_else_95_percent(tuning: dict[str, Any], cap: str) -> None:
    assert f"--gpu-memory-utilization-cap={cap}" in args(engine={"gpuMemoryUtilization": "0.50"}, tuning=tuning)


def test_counts_are_capped_at_twice_their_start() -> None:
    found = args(engine={"maxNumSeqs": 64})
    assert {"--max-num-seqs=64", "--max-num-seqs-cap=128", "--max-num-batched-tokens-cap=4096"} <= set(found)
    assert not any(argument.startswith("--max-num-batched-tokens=") for argument in found)


def test_on_cuda_a_count_that_is_left_out_gets_no_cap_and_gpus_are_asked_for() -> None:
    template = a_template(runtime={"device": "cuda", "image": "engine:1"})
    (main,) = template["spec"]["containers"]
    assert not any(argument.startswith("--max-num-seqs") for argument in main["args"])
    assert main["resources"]["limits"] == {"nvidia.com/gpu": "1"}


def test_engine_fields_become_vllms_flags_and_absent_ones_none() -> None:
    found = args(
        engine={
            "preemptionMode": "auto",
            "swapSpace": "512Mi",
            "kvOffloadSize": "2Gi",
            "enablePrefixCaching": False,
            "speculative": {"method": "draft_model", "model": "file:///models/draft", "numSpeculativeTokens": 4},
            "apiServerCount": 2,
            "mmProcessorCache": "512Mi",
            "limitMmPerPrompt": {"video": 0, "image": 2},
            "enforceEager": True,
            "cudagraphCaptureSizes": [1, 2, 4],
            "kvCacheDtype": "fp8",
            "quantization": "fp8",
        }
    )
    assert {
        "--preemption-mode=auto",
        "--swap-space=512Mi",
        "--kv-offload-size=2Gi",
        "--no-enable-prefix-caching",
        '--speculative-config={"method": "draft_model", "model": "/models/draft", "num_speculative_tokens": 4}',
        "--api-server-count=2",
        "--mm-processor-cache-gb=0.5",
        '--limit-mm-per-prompt={"image": 2, "video": 0}',
        "--enforce-eager",
        "--cudagraph-capture-sizes=1,2,4",
        "--kv-cache-dtype=fp8",
        "--quantization=fp8",
    } <= set(found)
    assert "--enable-prefix-caching" in args(engine={"enablePrefixCaching": True})
    assert not [flag for flag in args() if "prefix-caching" in flag or "swap" in flag or "specul" in flag]
    assert not [flag for flag in args(engine={"enforceEager": False}) if "eager" in flag or "cudagraph" in flag]


def test_further_args_are_passed_on_last() -> None:
    runtime = {"device": "cpu", "image": "engine:1", "args": ["--device-memory-bytes=1500Mi"]}
    assert args(runtime=runtime)[-1] == "--device-memory-bytes=1500Mi"


def test_a_claim_is_mounted_read_only() -> None:
    template = a_template(model={"uri": "pvc://claim/a/b"})
    claim = {"claimName": "claim", "readOnly": True}
    assert {"name": "model", "persistentVolumeClaim": claim} in template["spec"]["volumes"]
    assert args(model={"uri": "pvc://claim/a/b"})[1].endswith("/a/b")


def test_the_pod_is_restricted() -> None:
    pod = a_template()["spec"]
    (main,) = pod["containers"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert main["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert main["securityContext"]["allowPrivilegeEscalation"] is False


def test_an_engine_that_is_to_stop_serves_on_until_nobody_is_sent_to_it() -> None:
    (main,) = a_template()["spec"]["containers"]
    assert main["lifecycle"] == {"preStop": {"exec": {"command": ["sleep", "5"]}}}


def test_a_worker_hears_of_its_end_no_sooner_than_the_leader() -> None:
    """SIGTERM to any pod ends the replica, while endpoints still route to its leader."""
    leader = a_template()["spec"]
    (main,) = worker_pod_spec(leader)["containers"]
    assert main["lifecycle"] == leader["containers"][0]["lifecycle"]
    assert not {"ports", "startupProbe", "readinessProbe", "livenessProbe"} & main.keys()


def test_no_controller_replaces_pods_by_itself() -> None:
    """Which may go is the operator's to say; and some versions of Kubernetes never replace a broken one."""
    made = leader_stateful_set(rendered(a_deployment(), token_hashes=TokenHashes("0" * 64, "0" * 64)), 0)
    assert made["spec"]["updateStrategy"] == {"type": "OnDelete"}


def test_the_grace_period_outlasts_the_drain() -> None:
    assert a_template(rollout={"drainTimeout": "1m30s"})["spec"]["terminationGracePeriodSeconds"] == 5 + 90 + 15
    assert "--shutdown-timeout=90" in args(rollout={"drainTimeout": "1m30s"})


def test_the_overlay_is_laid_over_and_leaves_our_labels_alone() -> None:
    template = a_template(
        template={
            "metadata": {"labels": {"team": "a"}, "annotations": {"note": "b"}},
            "spec": {
                "nodeSelector": {"disk": "ssd"},
                "containers": [{"name": "main", "resources": {"limits": {"memory": "2Gi"}}, "env": [{"name": "A"}]}],
            },
        }
    )
    (main,) = template["spec"]["containers"]
    assert template["metadata"]["labels"]["team"] == "a"
    assert template["metadata"]["labels"]["trimtab.dev/deployment"] == "m"
    assert template["spec"]["nodeSelector"] == {"disk": "ssd"}
    assert main["resources"] == {"limits": {"memory": "2Gi"}}
    assert [variable["name"] for variable in main["env"]] == ["HOME", "A"]


def test_services_select_leaders_only() -> None:
    deployment = a_deployment()
    selector = client_service(deployment)["spec"]["selector"]
    wanted = rendered(deployment, token_hashes=HASHES)
    labels = leader_stateful_set(wanted, 0)["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    assert selector["trimtab.dev/role"] == "leader"
    rendezvous = rendezvous_service(deployment, 0)
    assert rendezvous["spec"]["publishNotReadyAddresses"] is True
    assert rendezvous["spec"]["selector"].items() <= labels.items()


# --- replicas of several ranks and pods -------------------------------------------------------------------------------


def test_single_rank_has_no_layout_flags() -> None:
    assert not any(argument.startswith(("--tensor", "--nnodes", "--master", "--node-rank")) for argument in args())


def test_single_pod_ranks_have_layout_but_no_rendezvous() -> None:
    found = args(parallelism={"tensor": 2, "data": 2, "expert": True, "gpusPerNode": 4})
    wanted = {"--tensor-parallel-size=2", "--pipeline-parallel-size=1", "--data-parallel-size=2"}
    assert wanted | {"--enable-expert-parallel"} <= set(found)
    assert not any(argument.startswith(("--nnodes", "--master", "--node-rank")) for argument in found)


@pytest.mark.parametrize(
    ("parallelism", "size"), [({}, "1Gi"), ({"tensor": 2}, "2Gi"), ({"tensor": 4, "gpusPerNode": 2}, "2Gi")]
)
def test_shared_memory_grows_with_the_ranks_of_a_pod(parallelism: dict[str, int], size: str) -> None:
    volumes = a_template(parallelism=parallelism)["spec"]["volumes"]
    assert next(v for v in volumes if v["name"] == "shm")["emptyDir"]["sizeLimit"] == size


def both_sets(**spec: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    wanted = rendered(a_deployment(**spec), token_hashes=HASHES)
    return (
        leader_stateful_set(wanted, 0, address="10.0.0.1"),
        worker_stateful_set(wanted, 0, address="10.0.0.1"),
    )


def test_worker_pods_differ_from_the_leaders_only_in_who_they_are() -> None:
    overlay = {"spec": {"nodeSelector": {"a": "b"}, "containers": [{"name": "main", "env": [{"name": "E"}]}]}}
    leader, workers = both_sets(parallelism={"pipeline": 2, "gpusPerNode": 1}, template=overlay)
    ours, theirs = (m["spec"]["template"]["spec"] for m in (leader, workers))
    (main,), (worker,) = ours.pop("containers"), theirs.pop("containers")
    assert ours == theirs
    assert theirs["nodeSelector"] == {"a": "b"}
    for field in ("ports", "startupProbe", "readinessProbe", "livenessProbe"):
        assert field in main
        assert field not in worker, "nobody asks a worker anything"
    assert main["args"][:-1] == worker["args"][:-1]
    assert (main["args"][-1], worker["args"][-1]) == ("--node-rank=0", "--node-rank=auto")
    assert worker["env"] == main["env"]


def test_the_pods_of_a_group_are_kept_out_of_clients_sight_but_for_the_leader() -> None:
    deployment = a_deployment(parallelism={"pipeline": 2, "gpusPerNode": 1})
    _, workers = both_sets(parallelism={"pipeline": 2, "gpusPerNode": 1})
    labels = workers["spec"]["template"]["metadata"]["labels"]
    for service in (client_service(deployment), rendezvous_service(deployment, 0)):
        assert not service["spec"]["selector"].items() <= labels.items()
    assert workers["spec"]["selector"]["matchLabels"].items() <= labels.items()


def test_ranks_meet_only_those_of_their_own_revision() -> None:
    first, _ = both_sets(parallelism={"pipeline": 2, "gpusPerNode": 1})
    second, _ = both_sets(parallelism={"pipeline": 2, "gpusPerNode": 1}, engine={"maxNumSeqs": 32})
    ids = [
        next(a for a in m["spec"]["template"]["spec"]["containers"][0]["args"] if a.startswith("--rendezvous-id="))
        for m in (first, second)
    ]
    assert ids[0] != ids[1]


def test_group_pods_prefer_different_nodes_unless_overlaid() -> None:
    parallelism = {"pipeline": 2, "gpusPerNode": 1}
    affinity = both_sets(parallelism=parallelism)[0]["spec"]["template"]["spec"]["affinity"]
    (term,) = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert term["podAffinityTerm"]["topologyKey"] == "kubernetes.io/hostname"
    own: dict[str, Any] = {"nodeAffinity": {}}
    leader, workers = both_sets(parallelism=parallelism, template={"spec": {"affinity": own}})
    assert leader["spec"]["template"]["spec"]["affinity"] == own == workers["spec"]["template"]["spec"]["affinity"]


def test_each_pod_of_a_group_asks_for_its_own_gpus() -> None:
    runtime = {"device": "cuda", "image": "engine:1"}
    for stateful_set in both_sets(parallelism={"tensor": 4, "gpusPerNode": 2}, runtime=runtime):
        (main,) = stateful_set["spec"]["template"]["spec"]["containers"]
        assert main["resources"]["limits"] == {"nvidia.com/gpu": "2"}

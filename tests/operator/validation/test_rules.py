"""Validation rules: each case changes a valid resource and names the expected error."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import yaml
from crd_rules import cel_refusals
from operator_builders import a_deployment
from trimtab_operator.planning.admission import review, validation_messages
from trimtab_operator.validation.rules import RULES, validation_errors

BASE: dict[str, Any] = yaml.safe_load("""
apiVersion: trimtab.dev/v1alpha1
kind: InferenceDeployment
metadata: {name: smollm2, namespace: models, uid: u-1, generation: 1}
spec:
  model: {uri: "file:///models/smollm2", servedName: smollm2}
  runtime: {image: "engine:1", device: cpu, args: ["--device-memory-bytes=1500Mi"]}
  engine: {gpuMemoryUtilization: "0.50", maxNumSeqs: 64, maxNumBatchedTokens: 512, blockSize: 16}
  replicas: 2
  tuning: {mode: Auto, bounds: {gpuMemoryUtilization: {min: "0.40", max: "0.90"}}}
  rollout: {maxUnavailable: 1, drainTimeout: 30s}
""")


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return BASE with one field set, creating missing parents."""
    body = copy.deepcopy(BASE)
    node = body
    *parents, last = path.split(".")
    for part in parents:
        node = node.setdefault(part, {})
    node[last] = value
    return body


MAIN = "spec.template.spec.containers"

IMAGE = "oci://r.io/m@sha256:" + "d" * 64
REFUSED: list[tuple[str, Any, str, str]] = [
    ("metadata.name", "x" * 41, "metadata.name", "at most 40"),
    ("metadata.name", "1st", "metadata.name", "begin with a lower-case letter"),
    ("metadata.name", "a.b", "metadata.name", "dots"),
    ("metadata.namespace", "Models_1", "metadata.namespace", "lower-case letters"),
    ("spec.scaling", {"minReplicas": 4, "maxReplicas": 3}, "spec.scaling.minReplicas", "is 4, above maxReplicas 3"),
    ("spec.scaling", {"minReplicas": 0, "maxReplicas": 3}, "spec.scaling.minReplicas", "set spec.router.enabled"),
    ("spec.scaling", {"maxReplicas": 3, "idleTimeout": "5m"}, "spec.scaling.idleTimeout", "only applies with"),
    ("spec.router", {"maxHold": "61m"}, "spec.router.maxHold", "at most 1h"),
    ("spec.router", {"replicas": 0}, "spec.router.replicas", "1"),
    ("spec.router", {"sessionHeader": "a b"}, "spec.router.sessionHeader", "such as x-session-id"),
    (
        "spec.router",
        {"sessionHeader": "X-Id", "tenantHeader": "x-id"},
        "spec.router.tenantHeader",
        "the same as sessionHeader",
    ),
    (
        "spec.router",
        {"priorities": [{"name": "a", "value": 1}, {"name": "a", "value": 2}]},
        "spec.router.priorities",
        "a is listed more than once",
    ),
    ("spec.router", {"priorities": [{"name": "a", "value": 5000}]}, "spec.router.priorities[0].value", "1000"),
    ("spec.router", {"image": "a b"}, "spec.router.image", "white space"),
    ("spec.router", {"resources": {"requests": {"cpu": "much"}}}, "spec.router.resources.requests.cpu", "much"),
    (
        "spec.router",
        {"resources": {"requests": {"cpu": "2"}, "limits": {"cpu": "1"}}},
        "spec.router.resources.requests.cpu",
        "above the limit 1",
    ),
    ("spec.scaling", {"minReplicas": 1}, "spec.scaling.maxReplicas", "required"),
    (
        "spec.scaling",
        {"maxReplicas": 3, "behavior": {"scaleUp": {"policies": []}}},
        "spec.scaling.behavior.scaleUp.policies",
        "write at least 1",
    ),
    (
        "spec.engine.schedulingPolicy",
        "deadline",
        "spec.engine.schedulingPolicy",
        "set spec.objectives.ttft.target, or use fcfs",
    ),
    ("spec.engine.schedulingPolicy", "lifo", "spec.engine.schedulingPolicy", "fcfs, priority or deadline"),
    ("spec.objectives", {}, "spec.objectives", "set at least one of ttft and itl"),
    ("spec.objectives", {"ttft": {"target": "0s"}}, "spec.objectives.ttft.target", "above zero"),
    ("spec.objectives", {"itl": {"target": "00ms"}}, "spec.objectives.itl.target", "above zero"),
    ("spec.objectives", {"itl": {"target": "9ms", "kind": "p99"}}, "spec.objectives.itl.kind", "Mean or Tokens"),
    (
        "spec.objectives",
        {"ttft": {"target": "1s", "percentile": 99}, "itl": {"target": "50ms"}},
        "spec.objectives.itl.percentile",
        "is 95, but that of ttft is 99",
    ),
    (
        "spec.objectives",
        {"ttft": {"target": "1s", "perPromptToken": "1s"}},
        "spec.objectives.ttft.perPromptToken",
        "write a duration such as 125us",
    ),
    ("spec.tuning.bounds.watermark", {"min": "0.1"}, "spec.tuning.bounds.watermark.min", "unknown field"),
    ("spec.model.uri", "hf://model", "spec.model.uri", "is not a model repository; use hf://ORG/NAME"),
    (
        "spec.model.uri",
        "hf://org/name/name-q4.gguf",
        "spec.model.uri",
        "GGUF files that are downloaded are not supported yet",
    ),
    ("spec.model.uri", "hf://org/name@a b", "spec.model.revision", "is not a supported branch, tag or commit"),
    ("spec.model.uri", "hf://org/name@", "spec.model.uri", "has no revision after the @; use hf://org/name@main"),
    ("spec.model", {"uri": "hf://o/n@", "revision": "v1"}, "spec.model.uri", "has no revision after the @"),
    ("spec.model.uri", "hf://org/@main", "spec.model.uri", "is not a model repository; use hf://ORG/NAME"),
    ("spec.model.uri", "hf:///name", "spec.model.uri", "is not a model repository; use hf://ORG/NAME"),
    ("spec.model.uri", "hf://", "spec.model.uri", "write a model's URI: hf://ORG/NAME"),
    ("spec.model.uri", "pvc:///models", "spec.model.uri", "pvc:///models has no claim; use pvc://CLAIM/path"),
    ("spec.model.uri", "file:///", "spec.model.uri", "no absolute path; use file:///path"),
    ("spec.model", {"uri": "hf://o/n@v1", "revision": "v2"}, "spec.model.revision", "is v2, but the uri has v1"),
    ("spec.model", {"uri": "hf://o/n", "cache": {"size": "0"}}, "spec.model.cache.size", "too small for any model"),
    (
        "spec.model.uri",
        "s3://bucket/m/q4.gguf",
        "spec.model.uri",
        "GGUF files that are downloaded are not supported yet",
    ),
    ("spec.model.uri", "s3:///llms", "spec.model.uri", "has no bucket and prefix; use s3://BUCKET/PREFIX"),
    ("spec.model.uri", "s3://bucket//llms", "spec.model.uri", "has no bucket and prefix; use s3://BUCKET/PREFIX"),
    ("spec.model.uri", "oci://registry/model", "spec.model.uri", "is not a repository; use oci://"),
    ("spec.model.uri", "oci://example.com/Model", "spec.model.uri", "the repository in lower case"),
    ("spec.model.uri", "oci://example.com/model:", "spec.model.uri", "has no tag or digest; use oci://"),
    ("spec.model.uri", "oci://example.com/model@md5:1", "spec.model.uri", "has no tag or digest; use oci://"),
    (
        "spec.model",
        {"uri": "s3://bucket/m", "revision": "v1"},
        "spec.model.revision",
        "is only supported for an hf:// model",
    ),
    (
        "spec.model",
        {"uri": "s3://bucket/m", "tokenSecretRef": {"name": "t"}},
        "spec.model.tokenSecretRef",
        "others use s3.credentialsSecret or oci.pullSecret",
    ),
    ("spec.model", {"uri": "hf://o/n", "s3": {}}, "spec.model.s3", "is only supported for an s3:// model; remove it"),
    (
        "spec.model",
        {"uri": "hf://o/n", "oci": {}},
        "spec.model.oci",
        "is only supported for an oci:// model; remove it",
    ),
    (
        "spec.model",
        {"uri": "oci://r.io/m", "oci": {"folder": "m"}},
        "spec.model.oci.folder",
        "is only supported with imageVolume",
    ),
    (
        "spec.model",
        {"uri": "oci://r.io/m:v1", "oci": {"imageVolume": True}},
        "spec.model.uri",
        "is not pinned",
    ),
    (
        "spec.model",
        {"uri": IMAGE, "oci": {"imageVolume": True, "folder": "a/../b"}},
        "spec.model.oci.folder",
        "must not contain '..'",
    ),
    (
        "spec.model",
        {"uri": IMAGE, "oci": {"imageVolume": True, "folder": "../b"}},
        "spec.model.oci.folder",
        "write a folder such as /models/qwen3-8b",
    ),
    (
        "spec.model",
        {"uri": IMAGE, "oci": {"imageVolume": True, "pullSecret": "p"}},
        "spec.model.oci.pullSecret",
        "use template.spec.imagePullSecrets",
    ),
    (
        "spec.model",
        {"uri": IMAGE, "oci": {"imageVolume": True, "plainHttp": True}},
        "spec.model.oci.plainHttp",
        "configure the nodes' container runtime",
    ),
    (
        "spec.model",
        {"uri": IMAGE, "oci": {"imageVolume": True}, "cache": {"size": "1Gi"}},
        "spec.model.cache",
        "the node caches the image",
    ),
    (
        "spec.model",
        {"uri": "s3://bucket/m", "s3": {"endpoint": "minio:9000"}},
        "spec.model.s3.endpoint",
        "write an address such as https://minio.example.com:9000",
    ),
    ("spec.model", {"uri": "s3://b/m", "s3": {"region": "EU"}}, "spec.model.s3.region", "write a region such as eu"),
    ("spec.runtime.args", ["--registry-plain-http"], "spec.runtime.args[0]", "conflicts with spec.model.oci.plainHttp"),
    ("spec.model.uri", "file://models/x", "spec.model.uri", "no absolute path"),
    ("spec.model.uri", "file:///models/../etc", "spec.model.uri", "must not contain '..'"),
    ("spec.model.uri", "pvc://Claim_1/x", "spec.model.uri", "not a valid PersistentVolumeClaim name"),
    ("spec.model.uri", "ftp://x", "spec.model.uri", "write a model's URI: hf://ORG/NAME"),
    ("spec.model.uri", "Qwen/Qwen3-8B", "spec.model.uri", "did you mean hf://Qwen/Qwen3-8B?"),
    ("spec.model.uri", "https://huggingface.co/Qwen/Qwen3-8B", "spec.model.uri", "did you mean hf://Qwen/Qwen3-8B?"),
    ("spec.model.revision", "main", "spec.model.revision", "is only supported for an hf:// model"),
    ("spec.model.tokenSecretRef", {"name": "t"}, "spec.model.tokenSecretRef", "is only supported for an hf:// model"),
    ("spec.model.cache", {"size": "1Gi"}, "spec.model.cache", "is only supported for downloaded models"),
    ("spec.runtime.args", ["--download-dir=/tmp"], "spec.runtime.args[0]", "conflicts with spec.model.cache"),
    ("spec.runtime.kind", "vllm", "spec.runtime.kind", "vllm is not supported yet"),
    ("spec.runtime.image", "a b", "spec.runtime.image", "white space"),
    ("spec.runtime.args", ["--max-num-seqs=4"], "spec.runtime.args[0]", "conflicts with spec.engine.maxNumSeqs"),
    ("spec.runtime.args", ["--max_num_seqs", "4"], "spec.runtime.args[0]", "conflicts with spec.engine.maxNumSeqs"),
    ("spec.runtime.args", ["--seed=1", "--port=1"], "spec.runtime.args[1]", "set by the operator"),
    ("spec.runtime.args", ["--nnodes=1"], "spec.runtime.args[0]", "set by the operator"),
    ("spec.runtime.args", ["--seed=1", "-dpl", "1"], "spec.runtime.args[1]", "set by the operator"),
    ("spec.runtime.args", ["-ep"], "spec.runtime.args[0]", "conflicts with spec.parallelism.expert"),
    ("spec.parallelism.expert", True, "spec.parallelism.expert", "tensor × data is 1"),
    ("spec.parallelism.gpusPerNode", 8, "spec.parallelism.gpusPerNode", "has 1 rank"),
    ("spec.engine.kvCacheDtype", "fp4", "spec.engine.kvCacheDtype", "auto, bfloat16"),
    ("spec.engine.quantization", "awq", "spec.engine.quantization", "remove it if the checkpoint is quantized"),
    ("spec.engine.preemptionMode", "swap", "spec.engine.swapSpace", "is missing, but preemptionMode swap"),
    ("spec.engine.speculative", {"method": "eagle"}, "spec.engine.speculative.model", "a head is read from the image"),
    ("spec.engine.speculative", {"method": "mtp", "model": "file:///d"}, "spec.engine.speculative.model", "own layer"),
    ("spec.engine.speculative", {"method": "draft_model"}, "spec.engine.speculative.model", "is missing"),
    ("spec.engine.speculative", {"model": "file:///d"}, "spec.engine.speculative.model", "ngram drafts"),
    ("spec.runtime.args", ["--spec-tokens=3"], "spec.runtime.args[0]", "conflicts with spec.engine.speculative"),
    ("spec.engine.limitMmPerPrompt", {"audio": 1}, "spec.engine.limitMmPerPrompt", "unsupported key audio; use image"),
    ("spec.engine.gpuMemoryUtilization", "0.0", "spec.engine.gpuMemoryUtilization", "is 0"),
    ("spec.engine.gpuMemoryUtilization", "1.5", "spec.engine.gpuMemoryUtilization", "write a share from 0 to 1"),
    ("spec.engine.gpuMemoryUtilization", "0.95", "spec.engine.gpuMemoryUtilization", "outside"),
    ("spec.engine.maxNumSeqs", 1024, "spec.engine.maxNumBatchedTokens", "at least maxNumSeqs (1024)"),
    ("spec.engine.maxNumSeqs", 0, "spec.engine.maxNumSeqs", "write an integer from 1"),
    ("spec.engine.maxNumSeqs", "64", "spec.engine.maxNumSeqs", "write 64 without quotes"),
    ("spec.engine.blockSize", 7, "spec.engine.blockSize", "8, 16, 32, 64, 128 or 256"),
    ("spec.tuning.bounds.maxNumSeqs", {"min": 9, "max": 4}, "spec.tuning.bounds.maxNumSeqs", "min 9 exceeds max 4"),
    ("spec.tuning.bounds.maxNumSeqs", {"max": 8}, "spec.engine.maxNumSeqs", "starts at 64"),
    ("spec.tuning.restartClass", "Canary", "spec.tuning.restartClass", "not supported yet"),
    ("spec.metrics.prometheus", {"address": "http://p"}, "spec.metrics.prometheus", ""),
    ("spec.metrics.labels", {"po-d": "x"}, "spec.metrics.labels", "'po-d' is not a valid Prometheus label name"),
    (
        "spec.metrics.labels",
        {"__name__": "up"},
        "spec.metrics.labels",
        "'__name__' is not a valid Prometheus label name",
    ),
    ("spec.metrics.labels", {"engine": "1"}, "spec.metrics.labels", "engine is a label of the engines' metrics"),
    (
        "spec.metrics",
        {"source": "Pods", "labels": {"job": "x"}},
        "spec.metrics.labels",
        "only supported with Prometheus",
    ),
    ("spec.rollout.maxUnavailable", 0, "spec.rollout.maxUnavailable", "set 1 to 1000"),
    ("spec.rollout.maxUnavailable", "0%", "spec.rollout.maxUnavailable", "percentage"),
    ("spec.rollout.maxSurge", 1001, "spec.rollout.maxSurge", "to 1000"),
    ("spec.rollout.maxSurge", "101%", "spec.rollout.maxSurge", "percentage"),
    ("spec.rollout.drainTimeout", "2h", "spec.rollout.drainTimeout", "at most 3600"),
    ("spec.rollout.drainTimeout", "soon", "spec.rollout.drainTimeout", "write a duration such as 90s"),
    ("spec.rollout.maxSurge", -1, "spec.rollout.maxSurge", "set 0"),
    ("spec.rollout.maxSurge", "101%", "spec.rollout.maxSurge", "percentage from 0%"),
    ("spec.rollout.bakeTime", "2h", "spec.rollout.bakeTime", "at most 3600"),
    ("spec.rollout.startTimeout", "3h", "spec.rollout.startTimeout", "at most 7200"),
    ("spec.rollout.startTimeout", "0s", "spec.rollout.startTimeout", "more than 0"),
    (
        "spec.template.spec.terminationGracePeriodSeconds",
        30,
        "spec.template.spec.terminationGracePeriodSeconds",
        "a stop may take 35 s (5 s until traffic stops, and 30 s to drain, spec.rollout.drainTimeout)",
    ),
    ("spec.template.spec.hostNetwork", True, "spec.template.spec.hostNetwork", "node's network"),
    ("spec.template.spec.hostPID", True, "spec.template.spec.hostPID", "node's processes"),
    (
        "spec.template.spec.serviceAccountName",
        "admin",
        "spec.template.spec.serviceAccountName",
        "podOverlay.allowedPrivileges",
    ),
    ("spec.template.spec.initContainers", [{}], "spec.template.spec.initContainers", "not supported"),
    ("spec.template.spec.nonsense", 1, "spec.template.spec.nonsense", "cannot be overridden"),
    (MAIN, [{"name": "sidecar"}], f"{MAIN}[0].name", "only the container main"),
    (MAIN, [{"name": "main", "image": "x"}], f"{MAIN}[0].image", "spec.runtime.image"),
    (MAIN, [{"name": "main", "securityContext": {"privileged": True}}], f"{MAIN}[0].securityContext", "not privileged"),
    (MAIN, [{"name": "main", "resources": {"limits": {"cpu": "x"}}}], f"{MAIN}[0].resources.limits.cpu", "quantity"),
    (
        MAIN,
        [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 1}}}],
        f"{MAIN}[0].resources.limits.nvidia.com/gpu",
        "is derived from the layout",
    ),
    (MAIN, [{"name": "main", "volumeMounts": [{"mountPath": "/dev/shm/x"}]}], f"{MAIN}[0].volumeMounts[0]", "operator"),
    (
        "spec.template.spec.volumes",
        [{"name": "v", "hostPath": {}}],
        "spec.template.spec.volumes[0].hostPath",
        "node's files",
    ),
    ("spec.template.spec.volumes", [{"name": "shm", "emptyDir": {}}], "spec.template.spec.volumes[0].name", "another"),
    ("spec.template.spec.securityContext", {"runAsUser": 0}, "spec.template.spec.securityContext.runAsUser", "root"),
    ("spec.template.metadata.labels", {"trimtab.dev/role": "x"}, "spec.template.metadata.labels", "another name"),
    ("spec.nonsense", 1, "spec.nonsense", "unknown field"),
    ("spec.engine.max_num_seqs", 4, "spec.engine.max_num_seqs", "unknown field"),
    ("metadata.name", "Upper", "metadata.name", "letter"),
    ("metadata.name", "a_b", "metadata.name", "lower-case"),
    ("spec.model.uri", "file:///", "spec.model.uri", "no absolute path"),
    ("spec.model.uri", "file:///m?revision=1", "spec.model.uri", "?"),
    ("spec.model.uri", "pvc://claim/$(HOME)", "spec.model.uri", "$"),
    ("spec.model", {"uri": "file:///models/modèle"}, "spec.model.servedName", "is missing"),
    ("spec.runtime.args", ["$(FLAGS)"], "spec.runtime.args[0]", "is not a flag"),
    ("spec.runtime.args", ["/another/model"], "spec.runtime.args[0]", "is not a flag"),
    ("spec.runtime.args", ["--dtype=auto", " --max-num-seqs=4"], "spec.runtime.args[1]", "white space"),
    ("spec.runtime.args", ["--max-num-seqs 4"], "spec.runtime.args[0]", "white space"),
    ("spec.runtime.args", ["--config=/models/serve.yaml"], "spec.runtime.args[0]", "use the flags themselves"),
    ("spec.runtime.args", ["--seed=1", "--config", "/f.yaml"], "spec.runtime.args[1]", "use the flags themselves"),
    ("spec.runtime.args", ["-tp", "2"], "spec.runtime.args[0]", "spec.parallelism.tensor"),
    ("spec.template.spec.volumes", [{"emptyDir": {}}], "spec.template.spec.volumes[0]", "needs a name"),
    ("spec.template.spec.volumes", [{"name": ["v"], "emptyDir": {}}], "spec.template.spec.volumes[0]", "needs a name"),
    ("spec.template.spec.volumes", [{"name": "v", "emptyDir": {}}] * 2, "spec.template.spec.volumes[1]", "twice"),
    ("spec.template.spec.securityContext", {"runAsUser": "0"}, "spec.template.spec.securityContext.runAsUser", "root"),
    ("spec.template.spec.securityContext", {"fsGroup": "x"}, "spec.template.spec.securityContext.fsGroup", "a number"),
    ("spec.template.spec.nodeSelector", {"a b": "c"}, "spec.template.spec.nodeSelector[a b]", "is not a valid label"),
    ("spec.template.metadata.labels", {"a": "x y"}, "spec.template.metadata.labels[a]", "is not a valid label"),
    ("spec.template.metadata.labels", {"a": "x" * 64}, "spec.template.metadata.labels[a]", "is not a valid label"),
    (
        "spec.template.metadata.annotations",
        {"container.apparmor.security.beta.kubernetes.io/main": "unconfined"},
        "spec.template.metadata.annotations",
        "confinement",
    ),
    *(
        (MAIN, [{"name": "main", "volumeMounts": [mount]}], f"{MAIN}[0].volumeMounts[0].{field}", words)
        for mount, field, words in (
            ({"name": "v"}, "mountPath", "absolute"),
            ({"name": "v", "mountPath": ["/a"]}, "mountPath", "absolute"),
            ({"name": "v", "mountPath": "tmp"}, "mountPath", "absolute"),
            ({"name": "v", "mountPath": "//tmp"}, "mountPath", "reserved for the operator"),
            ({"name": "v", "mountPath": "/"}, "mountPath", "reserved for the operator"),
            ({"name": "absent", "mountPath": "/data"}, "name", "not in spec.template.spec.volumes"),
        )
    ),
    (MAIN, [{"name": "main", "env": [{"name": ["A"]}]}], f"{MAIN}[0].env[0]", "needs a name"),
    (MAIN, [{"name": "main", "env": [{"name": "A", "value": 1}]}], f"{MAIN}[0].env[0].value", "quotes"),
    (
        MAIN,
        [{"name": "main", "resources": {"requests": {"memory": "2Gi"}, "limits": {"memory": "1500Mi"}}}],
        f"{MAIN}[0].resources.requests.memory",
        "above the limit 1500Mi",
    ),
    *(
        (MAIN, [{"name": "main", "resources": {"limits": {"memory": amount}}}], f"{MAIN}[0].resources.limits", words)
        for amount, words in (("-1", "at least 0"), ("1e999999999", "quantity"), ("1Gi\n", "quantity"))
    ),
]


@pytest.mark.parametrize(("path", "value", "field", "words"), REFUSED)
def test_invalid_field_is_rejected_by_name(path: str, value: Any, field: str, words: str) -> None:
    said = validation_messages(changed(path, value), default_image=None)
    assert any(line.startswith(field) and words in line for line in said), said


ACCEPTED: list[tuple[str, Any]] = [
    ("spec.replicas", 0),
    ("spec.model.uri", "pvc://claim/models/x"),
    ("spec.model.uri", "pvc://claim"),
    ("spec.runtime.args", ["--device-memory-bytes=1500Mi", "--cpu-threads", "2"]),
    ("spec.engine.kvCacheDtype", "auto"),
    ("spec.engine.schedulingPolicy", "priority"),
    ("spec.runtime.args", ["--scheduling-policy=priority"]),
    ("spec.runtime.args", ["--enable-lora", "--lora-modules", "sql=/adapters/sql", "law=/adapters/law"]),
    ("spec.runtime.args", ["--enable-lora", '--lora-modules={"name": "sql", "path": "/adapters/sql"}']),
    ("spec.engine.preemptionMode", "recompute"),
    ("spec.engine.swapSpace", "4Gi"),
    ("spec.engine", {"preemptionMode": "auto", "swapSpace": "512Mi"}),
    ("spec.engine.enablePrefixCaching", True),
    ("spec.engine.enablePrefixCaching", False),
    ("spec.engine.speculative", {"method": "ngram", "numSpeculativeTokens": 4}),
    ("spec.engine.speculative", {"method": "draft_model", "model": "file:///models/draft"}),
    ("spec.engine.speculative", {"method": "eagle", "model": "file:///models/head"}),
    ("spec.engine.speculative", {"method": "mtp", "numSpeculativeTokens": 1}),
    ("spec.engine.apiServerCount", 2),
    ("spec.engine.mmProcessorCache", "4Gi"),
    ("spec.engine.mmProcessorCache", "0"),
    ("spec.engine.limitMmPerPrompt", {"image": 2, "video": 0}),
    ("spec.tuning.bounds.maxNumSeqs", {"min": 64, "max": 64}),
    ("spec.tuning.bounds.watermark", {"max": "0.0"}),
    ("spec.objectives", {"ttft": {"target": "2s", "perPromptToken": "125us"}}),
    ("spec.objectives", {"ttft": {"target": "2s"}, "itl": {"target": "80ms", "kind": "Tokens"}}),
    ("spec.metrics.source", "Pods"),
    ("spec.rollout.maxUnavailable", "50%"),
    ("spec.rollout.maxSurge", 0),
    ("spec.rollout.maxSurge", "25%"),
    ("spec.rollout.bakeTime", "0s"),
    ("spec.template.spec.terminationGracePeriodSeconds", 60),
    ("spec.template.spec.affinity", {"nodeAffinity": {}}),
    ("spec.template.spec.tolerations", [{"key": "gpu", "operator": "Exists"}]),
    (MAIN, [{"name": "main", "resources": {"limits": {"memory": "2Gi", "cpu": 2}}, "env": [{"name": "A"}]}]),
    ("spec.template.spec.volumes", [{"name": "v", "configMap": {"name": "c"}}]),
    ("spec.template.spec.nodeSelector", {"kubernetes.io/arch": "amd64", "gpu": ""}),
    ("spec.template.metadata.annotations", {"example.com/a": "b"}),
    ("spec.runtime.args", ["--api-key=$(API_KEY)"]),
    ("spec.engine.enforceEager", True),
    ("spec.engine.cudagraphCaptureSizes", [1, 2, 4]),
    (
        "spec.template.spec",
        {
            "volumes": [{"name": "v", "emptyDir": {}}],
            "containers": [{"name": "main", "volumeMounts": [{"name": "v", "mountPath": "/data"}]}],
        },
    ),
]


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_supported_field_is_accepted(path: str, value: Any) -> None:
    assert validation_messages(changed(path, value), default_image=None) == []


def test_every_refusal_is_listed_at_once() -> None:
    body = changed("spec.model.uri", "oci://a/b")
    body["spec"]["runtime"]["kind"] = "vllm"
    said = validation_messages(body, default_image=None)
    assert [line.split(":")[0] for line in said] == ["spec.model.uri", "spec.runtime.kind"]


def test_every_rule_has_a_case() -> None:
    """A rule without a failing case is untested."""
    from trimtab_operator.errors import InvalidSpec
    from trimtab_operator.resource.spec import InferenceDeployment

    bodies = [changed(path, value) for path, value, _, _ in REFUSED]
    no_image = changed("spec.runtime.image", None)
    tripped = set()
    for body in [*bodies, no_image]:
        try:
            deployment = InferenceDeployment.parse(body)
        except InvalidSpec:
            continue
        tripped |= {rule for rule in RULES if list(rule(deployment))}
    assert {rule.__name__ for rule in RULES} == {rule.__name__ for rule in tripped}


def test_image_is_required() -> None:
    body = changed("spec.runtime.image", None)
    assert any("spec.runtime.image" in line for line in validation_messages(body, default_image=None))
    assert validation_messages(body, default_image="engine:2") == []


def test_on_cuda_a_bounded_count_needs_a_start() -> None:
    body = changed("spec.runtime.device", "cuda")
    body["spec"]["engine"] = {}
    body["spec"]["tuning"]["bounds"] = {"maxNumSeqs": {"max": 512}}
    assert any("depends on the GPU" in line for line in validation_messages(body, default_image=None))


# --- CEL rules --------------------------------------------------------------------------------------------------------


def cel_verdict(body: dict[str, Any], before: dict[str, Any] | None = None) -> bool:
    return not cel_refusals(body, before)


SCALING = {"minReplicas": 1, "maxReplicas": 3}


CHANGES_OF_REPLICAS = pytest.mark.parametrize(
    ("before", "after", "is_allowed"),
    [
        ({"replicas": 2}, {"replicas": 3}, True),
        ({"replicas": 2, "scaling": SCALING}, {"replicas": 3, "scaling": SCALING}, False),
        ({"replicas": 2, "scaling": SCALING}, {"replicas": 2, "scaling": {"maxReplicas": 9}}, True),
        ({"replicas": 5}, {"replicas": 1, "scaling": SCALING}, True),  # left out at the same time: the default
        ({"replicas": 1, "scaling": SCALING}, {"replicas": 5}, True),
        ({"scaling": SCALING}, {"replicas": 1, "scaling": SCALING}, True),  # stored before there was a default
    ],
)


@CHANGES_OF_REPLICAS
def test_replicas_are_immutable_while_scaling_is_set(
    before: dict[str, Any], after: dict[str, Any], is_allowed: bool
) -> None:
    old, new = with_counts(before), with_counts(after)
    assert cel_verdict(new, old) is is_allowed


@CHANGES_OF_REPLICAS
def test_webhook_and_rules_have_equal_messages(before: dict[str, Any], after: dict[str, Any], is_allowed: bool) -> None:
    old, new = with_counts(before), with_counts(after)
    verdict = a_review(new, old)
    assert verdict["allowed"] is is_allowed
    assert is_allowed or [verdict["status"]["message"]] == cel_refusals(new, old)


def with_counts(spec: dict[str, Any]) -> dict[str, Any]:
    body = copy.deepcopy(BASE)
    body["spec"].pop("replicas", None)
    body["spec"] |= spec
    return body


CEL_REFUSED: list[tuple[str, Any]] = [
    ("metadata.name", "x" * 41),
    ("spec.scaling", {"minReplicas": 4, "maxReplicas": 3}),
    ("spec.scaling", {"minReplicas": 0, "maxReplicas": 3}),
    ("spec.scaling", {"minReplicas": 1, "maxReplicas": 3, "idleTimeout": "5m"}),
    ("spec.tuning.bounds.maxNumSeqs", {"min": 9, "max": 4}),
    ("spec.tuning.bounds.gpuMemoryUtilization", {"min": "0.9", "max": "0.5"}),
    ("spec.objectives", {}),
    ("spec.objectives", {"ttft": {"target": "0h0m0s"}}),
    ("spec.objectives", {"ttft": {"target": "1s", "percentile": 99}, "itl": {"target": "50ms", "percentile": 95}}),
    ("spec.engine.maxNumSeqs", 1024),
    ("spec.engine.schedulingPolicy", "deadline"),
    ("spec.parallelism", {"expert": True}),
]


@pytest.mark.parametrize(("path", "value"), CEL_REFUSED)
def test_cel_and_the_table_refuse_alike(path: str, value: Any) -> None:
    body = changed(path, value)
    assert not cel_verdict(body)
    assert validation_messages(body, default_image=None)


@pytest.mark.parametrize(("path", "value"), [*CEL_REFUSED, ("metadata.name", "x" * 50)])
def test_cel_and_rules_have_equal_messages(path: str, value: Any) -> None:
    """Current API servers reject this before calling the webhook."""
    body = changed(path, value)
    assert set(cel_refusals(body)) <= set(validation_messages(body, default_image=None))


@pytest.mark.parametrize(("path", "value"), ACCEPTED)
def test_cel_accepts_valid_specs(path: str, value: Any) -> None:
    assert cel_verdict(changed(path, value))


# --- webhook ----------------------------------------------------------------------------------------------------------


def a_review(new: dict[str, Any], old: dict[str, Any] | None = None) -> dict[str, Any]:
    request = {"uid": "r-1", "operation": "UPDATE" if old else "CREATE", "object": new, "oldObject": old}
    response: dict[str, Any] = review({"request": request}, default_image=None)["response"]
    return response


def test_webhook_rejects_with_all_messages() -> None:
    verdict = a_review(changed("spec.model.uri", "oci://a/b"))
    assert not verdict["allowed"]
    assert "is not a repository" in verdict["status"]["message"]


def test_webhook_allows_label_edits_of_invalid_resource() -> None:
    old = changed("spec.model.uri", "oci://a/b")
    new = copy.deepcopy(old)
    new["metadata"]["labels"] = {"a": "b"}
    assert a_review(new, old)["allowed"]


def test_webhook_allows_updates_during_deletion() -> None:
    new = changed("spec.model.uri", "oci://a/b")
    new["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert a_review(new, BASE)["allowed"]


def test_a_write_to_scale_is_allowed() -> None:
    """kubectl scale and autoscalers send a Scale, which has no model."""
    scale = {"apiVersion": "autoscaling/v1", "kind": "Scale", "metadata": {"name": "m"}, "spec": {"replicas": 3}}
    request = {"uid": "r", "operation": "UPDATE", "subResource": "scale", "object": scale, "oldObject": {}}
    assert review({"request": request}, default_image=None)["response"]["allowed"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({"csi": {"driver": "secrets-store.csi.k8s.io", "readOnly": True}}, None),
        ({"projected": {"sources": [{"secret": {"name": "s"}}, {"configMap": {"name": "c"}}]}}, None),
        ({"projected": {"sources": [{"serviceAccountToken": {"path": "t", "audience": "vault"}}]}}, None),
        ({"projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}, "for the API server; set it"),
        ({"nfs": {"server": "s", "path": "/"}}, "is not allowed; use one of"),
    ],
)
def test_volumes_are_those_of_the_restricted_profile(source: dict[str, Any], message: str | None) -> None:
    template = {"spec": {"volumes": [{"name": "v", **source}]}}
    errors = [str(error) for error in validation_errors(a_deployment(template=template))]
    assert (errors == []) if message is None else any(message in error for error in errors)


@pytest.mark.parametrize(
    "name", ["nvidia.com/mig-3g.40gb", "amd.com/gpu", "gpu.intel.com/i915", "nvidia.com/gpu.shared"]
)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_other_gpu_resources_are_rejected_by_name(name: str, device: str) -> None:
    containers = [{"name": "main", "resources": {"limits": {name: "1"}}}]
    runtime = {"device": device, "image": "engine:1"}
    errors = validation_errors(a_deployment(runtime=runtime, template={"spec": {"containers": containers}}))
    assert [error.field for error in errors] == [f"spec.template.spec.containers[0].resources.limits.{name}"]
    assert "is not supported" in str(errors[0])

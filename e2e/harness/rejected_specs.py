"""Invalid specs and the messages with which the webhook, the CRD's rules or the reconciler reject them."""

from __future__ import annotations

from typing import Any

# Changes to the sample's spec, and parts of the error message: the field, and what to do.
REJECTED: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    (
        "bucket",
        {"model": {"uri": "s3:///model"}},
        ("spec.model.uri", "has no bucket and prefix", "s3://BUCKET/PREFIX"),
    ),
    ("hub", {"model": {"uri": "hf://model"}}, ("spec.model.uri", "use hf://ORG/NAME")),
    ("relative-path", {"model": {"uri": "file://models/x"}}, ("spec.model.uri", "use file:///path")),
    ("dots", {"model": {"uri": "file:///models/../etc"}}, ("spec.model.uri", "'..'")),
    ("claim", {"model": {"uri": "pvc://Not_A_Claim/x"}}, ("spec.model.uri", "not a valid PersistentVolumeClaim name")),
    ("revision", {"model": {"revision": "main"}}, ("spec.model.revision", "only supported for an hf:// model")),
    ("vllm", {"runtime": {"kind": "vllm"}}, ("spec.runtime.kind", "vllm is not supported yet")),
    ("args", {"runtime": {"args": ["--max-num-seqs=4"]}}, ("spec.runtime.args[0]", "spec.engine.maxNumSeqs")),
    ("admin-port", {"runtime": {"args": ["--admin-port=9"]}}, ("spec.runtime.args[0]", "set by the operator")),
    ("layout", {"parallelism": {"gpusPerNode": 3}}, ("spec.parallelism.gpusPerNode", "is 3", "has 1 rank")),
    ("expert", {"parallelism": {"expert": True}}, ("spec.parallelism.expert", "set it to false")),
    ("swap", {"engine": {"preemptionMode": "swap"}}, ("spec.engine.swapSpace", "preemptionMode swap")),
    ("quantization", {"engine": {"quantization": "awq"}}, ("spec.engine.quantization", "only fp8 is built")),
    ("head", {"engine": {"speculative": {"method": "eagle"}}}, ("spec.engine.speculative.model", "is missing")),
    ("step", {"engine": {"maxNumBatchedTokens": 8, "maxNumSeqs": 16}}, ("must be at least maxNumSeqs (16)",)),
    ("start", {"engine": {"gpuMemoryUtilization": "0.99"}}, ("spec.engine.gpuMemoryUtilization", "outside")),
    (
        "bounds",
        {"tuning": {"bounds": {"maxNumSeqs": {"min": 40, "max": 20}}}},
        ("spec.tuning.bounds.maxNumSeqs", "min 40 exceeds max 20"),
    ),
    ("canary", {"tuning": {"restartClass": "Canary"}}, ("spec.tuning.restartClass", "set Never")),
    ("scaling", {"scaling": {"minReplicas": 4, "maxReplicas": 3}}, ("spec.scaling.minReplicas", "above maxReplicas 3")),
    (
        "zero",
        {"scaling": {"minReplicas": 0, "maxReplicas": 3}},
        ("spec.scaling.minReplicas", "set spec.router.enabled"),
    ),
    ("objectives", {"objectives": {"ttft": {"target": "0s"}}}, ("spec.objectives.ttft", "above zero")),
    ("deadline", {"engine": {"schedulingPolicy": "deadline"}}, ("schedulingPolicy", "set spec.objectives.ttft.target")),
    ("labels", {"metrics": {"labels": {"engine": "0"}}}, ("spec.metrics.labels", "a label of the engines' metrics")),
    ("container", {"template": {"spec": {"containers": [{"name": "other"}]}}}, ("spec.template", "main")),
]
WITHOUT_WEBHOOK = ("bucket", "layout", "start", "args")  # none that the CRD's CEL rules reject on a current Kubernetes

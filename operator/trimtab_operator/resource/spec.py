"""The typed view of an InferenceDeployment's `spec`: the single source of the CRD (see `crd.py`).

Field names are the CRD's field names in snake case. The API server enforces the bounds, and `kubectl explain` prints
the descriptions. The `validation` package checks combinations of fields.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from trimtab_operator.errors import InvalidSpec
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.limits import size_error
from trimtab_operator.resource.patterns import (
    DNS_LABEL,
    DURATION,
    FINE_DURATION,
    FOLDER,
    FRACTION,
    HEADER_NAME,
    HTTP_URL,
    MODEL_URI,
    QUANTITY,
    REGION,
    SERVED_NAME,
    SHA256,
)
from trimtab_operator.resource.quantity import canonical_duration, canonical_fraction, canonical_quantity
from trimtab_operator.resource.schema_errors import schema_errors

GROUP = "trimtab.dev"
VERSION = "v1alpha1"
PAUSED = "trimtab.dev/paused"  # annotation of a resource: any value except "false" pauses reconciliation
RESTARTED_AT = "trimtab.dev/restarted-at"  # annotation of a resource; a changed value replaces the pods
KIND = "InferenceDeployment"
PLURAL = "inferencedeployments"
MAX_REPLICAS = 1000
MAX_PRIORITY = 1_000_000_000  # as of a PriorityClass
MODALITIES = ("image", "video")  # inputs that a prompt may contain in addition to text
MAX_KEPT_SPECS, MAX_KEPT_TEXT = 1024, 16384  # parsed specs in the cache, and characters of one spec
MAX_NAME_LENGTH = 40  # child names and the pods' generated labels get suffixes and must stay below 63


# Canonical spellings: an equal amount or duration is no change, as for a Deployment.
Fraction = Annotated[str, Field(pattern=FRACTION, max_length=6), AfterValidator(canonical_fraction)]
Quantity = Annotated[str, Field(pattern=QUANTITY, max_length=24), AfterValidator(canonical_quantity)]
Duration = Annotated[str, Field(pattern=DURATION, min_length=2, max_length=24), AfterValidator(canonical_duration)]
FineDuration = Annotated[str, Field(pattern=FINE_DURATION, max_length=10), AfterValidator(canonical_duration)]
IntOrString = int | str
Caps = tuple[str | None, str | None, str | None]
"""Caps of gpu_memory_utilization, max_num_seqs and max_num_batched_tokens; None for the engine's default."""


def schema(**extra: Any) -> dict[str, Any]:
    """Schema keywords that pydantic does not know, such as `x-kubernetes-validations`."""
    return dict(extra)


def cel(rule: str, message: str, words: str | None = None, *values: str) -> dict[str, str]:
    """Return one CEL rule. Kubernetes before 1.25 drops it; the `validation` package has the same rule.

    `words` is the message of that rule, with %s for each of `values`, which are CEL expressions. Before Kubernetes
    1.29, `message` is used instead. The message uses `format` instead of `+`: the API server estimates the cost of the
    longest text, knows no bound for the result of `string` and rejects the CRD; `format` costs the pattern's length.
    """
    if words is None:
        return {"rule": rule, "message": message}
    texts = ", ".join(f"string({value})" for value in values)
    return {"rule": rule, "message": message, "messageExpression": f"'{words}'.format([{texts}])"}


class Model(BaseModel):
    """Base class of all models: camelCase JSON, unknown fields are rejected, instances are immutable."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class SecretKeyRef(Model):
    """One key of a Secret in the namespace of the resource."""

    name: str = Field(
        pattern=DNS_LABEL, max_length=63, description="Name of the Secret, in the namespace of the resource."
    )
    key: str = Field(default="token", min_length=1, max_length=253, description="Key within the Secret.")


class ModelCache(Model):
    """Cache of downloaded weights."""

    claim_name: str | None = Field(
        default=None,
        pattern=DNS_LABEL,
        max_length=63,
        description="PersistentVolumeClaim that replicas and other resources may share: a model is downloaded once. "
        "Default: a volume that is deleted with the pod.",
    )
    size: Quantity | None = Field(
        default=None,
        description="Maximum size of the cache, for example 100Gi. On a claim, the least recently used models are "
        "deleted before a download. Default: 200Gi for a pod's volume, no limit on a claim.",
    )


class Scheme(StrEnum):
    """Location of a model: the hub, a bucket, a registry, a PersistentVolumeClaim or the engine's image."""

    HUB = "hf"
    S3 = "s3"
    OCI = "oci"
    CLAIM = "pvc"
    FILE = "file"


PIN = re.compile(r"[0-9a-f]{40}|(?:sha256:)?[0-9a-f]{64}")
"""Pinned revision of a model: a commit, the digest of a bucket's objects or of a registry's manifest."""
DOWNLOADED = (Scheme.HUB, Scheme.S3, Scheme.OCI)
PINNED_OBJECTS = re.compile(r"(?P<place>.*?)(?:@(?P<revision>[0-9a-f]{64}))?")
TAGGED_IMAGE = re.compile(r"(?P<place>[^@]*?)(?::(?P<tag>[^/:@]*))?(?:@(?P<revision>.*))?")


class BucketAccess(Model):
    """Access to the bucket of an s3:// model. Without a credentials Secret, the engine uses the credentials of the
    pod's service account. Without these, requests are anonymous.
    """

    endpoint: str | None = Field(
        default=None, pattern=HTTP_URL, max_length=512, description="URL of the object store. Default: Amazon S3."
    )
    region: str | None = Field(default=None, pattern=REGION, max_length=63, description="Region of the bucket.")
    addressing: Literal["path", "virtual"] | None = Field(
        default=None,
        description="Position of the bucket's name: in the URL's path (path) or host name (virtual). Default: virtual "
        "for Amazon S3, path for other endpoints.",
    )
    credentials_secret: str | None = Field(
        default=None,
        pattern=DNS_LABEL,
        max_length=63,
        description="Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, optionally, AWS_SESSION_TOKEN. "
        "The engine's pods and the Job that reads the model can read it.",
    )


class RegistryAccess(Model):
    """Access to the registry of an oci:// model."""

    pull_secret: str | None = Field(
        default=None,
        pattern=DNS_LABEL,
        max_length=63,
        description="Secret of type kubernetes.io/dockerconfigjson. The engine's pods and the Job that reads the "
        "model can read it.",
    )
    plain_http: bool = Field(default=False, description="Connect to the registry without TLS.")
    image_volume: bool = Field(
        default=False,
        description="The node, instead of the engine, pulls the image and mounts it. The uri must contain a digest, "
        "and the cluster must support image volumes (Kubernetes 1.35, or 1.33 with the feature gate ImageVolume).",
    )
    folder: str | None = Field(
        default=None,
        pattern=FOLDER,
        max_length=512,
        description="Folder of the image that contains the model, with imageVolume. Default: the root.",
    )


class ModelSource(Model):
    """Model to serve."""

    uri: str = Field(
        pattern=MODEL_URI,
        max_length=1024,
        description="Location of the weights: hf://ORG/NAME[@REVISION] on the Hugging Face hub, s3://BUCKET/PREFIX, "
        "oci://REGISTRY/REPOSITORY:TAG, file:///path in the image, or pvc://CLAIM/path on a PersistentVolumeClaim.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Branch, tag or commit of an hf:// model. Default: main. The resolved commit is in "
        "status.modelRevision.",
    )
    served_name: str | None = Field(
        default=None,
        pattern=SERVED_NAME,
        max_length=128,
        description="Name that clients send as `model`. Default: the last part of the uri.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret with the access token of the hub. The engine's pods and the Job that reads the model "
        "can read it.",
    )
    cache: ModelCache | None = Field(default=None, description="Cache of downloaded weights.")
    s3: BucketAccess | None = Field(default=None, description="Access to the bucket of an s3:// model.")
    oci: RegistryAccess | None = Field(default=None, description="Access to the registry of an oci:// model.")

    @property
    def scheme(self) -> Scheme:
        """Location of the model."""
        return Scheme(self.uri.partition("://")[0])

    @property
    def is_downloaded(self) -> bool:
        """True if the engine downloads the model."""
        return self.scheme in DOWNLOADED and not self.is_in_image_volume

    @property
    def is_in_image_volume(self) -> bool:
        """True if the node pulls the model as an image."""
        return self.scheme is Scheme.OCI and self.oci is not None and self.oci.image_volume

    @property
    def parts(self) -> tuple[str, str | None]:
        """Location and revision of a downloaded model: ORG/NAME and a branch, BUCKET/PREFIX and the digest of its
        objects, REGISTRY/REPOSITORY and a tag or digest.
        """
        rest = self.uri.partition("://")[2]
        if self.scheme is Scheme.HUB:
            place, _, written = rest.partition("@")
            return place, written or self.revision
        pattern = {Scheme.S3: PINNED_OBJECTS, Scheme.OCI: TAGGED_IMAGE}.get(self.scheme)
        found = None if pattern is None else pattern.fullmatch(rest)
        if found is None:
            return rest, None
        return found["place"].rstrip("/"), found["revision"] or found.groupdict().get("tag") or None

    @property
    def name_for_clients(self) -> str:
        """ServedName if it is set, else the last part of the uri."""
        return self.served_name or self.parts[0].rstrip("/").rsplit("/", 1)[-1]


class Runtime(Model):
    """Engine, its image and its device."""

    kind: Literal["trimtab", "vllm"] = Field(default="trimtab", description="The engine: trimtab or vllm.")
    image: str | None = Field(
        default=None, min_length=1, max_length=512, description="Engine image. Default: the operator's --default-image."
    )
    device: Literal["cuda", "cpu"] = Field(
        default="cuda",
        description="Device of the engine. cpu requests no GPU; cuda requests the GPUs that the layout needs.",
    )
    args: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(
        default=(),
        max_length=64,
        description="Additional engine flags, passed unchanged. A flag that duplicates a field is rejected.",
    )


class Parallelism(Model):
    """Parallel layout of one replica."""

    tensor: int = Field(
        default=1,
        ge=1,
        le=1024,
        description="Tensor parallel degree: number of devices that every layer is split over.",
    )
    pipeline: int = Field(
        default=1,
        ge=1,
        le=128,
        description="Pipeline parallel degree: number of stages that the layers are distributed over.",
    )
    data: int = Field(default=1, ge=1, le=1024, description="Data parallel ranks within one replica.")
    expert: bool = Field(
        default=False, description="Distribute the experts of a mixture-of-experts model over the ranks."
    )
    gpus_per_node: int | None = Field(
        default=None, ge=1, le=64, description="Devices of one pod. Default: tensor × pipeline."
    )


class Speculative(Model):
    """Speculative decoding."""

    method: Literal["ngram", "draft_model", "eagle", "mtp"] = Field(
        default="ngram",
        description="Source of the draft tokens: ngram, the text of the request; draft_model, a smaller model; eagle, "
        "a head trained for this model; mtp, the multi-token prediction layer of the model.",
    )
    num_speculative_tokens: int = Field(default=3, ge=1, le=32, description="Maximum draft tokens per step.")
    model: str | None = Field(
        default=None, min_length=1, max_length=1024, description="file:/// uri of the draft model or the EAGLE head."
    )


LIVE_UP_TO_CAP = "Live up to the cap in status.engine.configured; a higher value replaces replicas."
ROLLING_ON_GPUS = "On GPUs, setting or removing it replaces replicas."


class Engine(Model):
    """Start values of engine parameters. An omitted parameter starts at the engine's default."""

    gpu_memory_utilization: Fraction | None = Field(
        default=None,
        description='Fraction of the device memory that the engine may use, as a decimal string such as "0.90". '
        + LIVE_UP_TO_CAP,
    )
    max_num_seqs: int | None = Field(
        default=None,
        ge=1,
        le=65536,
        description=f"Maximum number of running requests. {LIVE_UP_TO_CAP} {ROLLING_ON_GPUS}",
    )
    max_num_batched_tokens: int | None = Field(
        default=None,
        ge=1,
        le=1048576,
        description=f"Token budget of one step. {LIVE_UP_TO_CAP} {ROLLING_ON_GPUS}",
    )
    max_model_len: int | None = Field(
        default=None,
        ge=1,
        le=16777216,
        description="Maximum length of prompt plus output, in tokens. Default: the model's.",
    )
    block_size: Literal[8, 16, 32, 64, 128, 256] | None = Field(
        default=None,
        description="Tokens in one KV block. Default: 16, or more for short contexts.",
    )
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = Field(
        default=None, description="Data type of the KV cache. auto: the data type of the model."
    )
    quantization: str | None = Field(
        default=None, min_length=1, max_length=64, description="Quantization scheme of the weights."
    )
    scheduling_policy: Literal["fcfs", "priority", "deadline"] | None = Field(
        default=None,
        description="Order of the waiting requests: fcfs, by arrival; priority, by the priority of the request; "
        "deadline, requests first that can still meet objectives.ttft. Live: applied without a restart. Default: "
        "deadline if objectives.ttft is set and tuning.mode is Auto, else the engine's default.",
    )
    preemption_mode: Literal["recompute", "swap", "auto"] | None = Field(
        default=None,
        description="Handling of the KV blocks of a preempted request: recompute, swap to host memory, or auto.",
    )
    swap_space: Quantity | None = Field(default=None, description="Host memory for swapped KV blocks, for example 4Gi.")
    kv_offload_size: Quantity | None = Field(
        default=None, description="Host memory for cached prefixes that the KV cache evicts, for example 4Gi."
    )
    enable_prefix_caching: bool | None = Field(default=None, description="Reuse the KV blocks of equal prefixes.")
    speculative: Speculative | None = Field(default=None, description="Speculative decoding.")
    api_server_count: int | None = Field(default=None, ge=1, le=64, description="API server processes per replica.")
    mm_processor_cache: Quantity | None = Field(
        default=None,
        description="Host memory for processed images and videos, for each API server and each engine core.",
    )
    limit_mm_per_prompt: dict[str, int] | None = Field(
        default=None, description="Maximum images and videos in one prompt, for example {image: 2, video: 0}."
    )
    enforce_eager: bool | None = Field(default=None, description="Run without CUDA graphs.")
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] | None = Field(
        default=None, max_length=128, description="Batch sizes for which CUDA graphs are captured."
    )


DEADLINE_WITHOUT_TARGET = (
    "deadline needs spec.objectives.ttft, which is not set; set spec.objectives.ttft.target, or use fcfs"
)


class ScalingPolicy(Model):
    """One rate limit of a scaling direction, as in autoscaling/v2."""

    type: Literal["Pods", "Percent"] = Field(description="Unit of `value`.")
    value: int = Field(
        ge=1, le=1000, description="Maximum change of the replica count in a period, in replicas or percent."
    )
    period_seconds: int = Field(ge=1, le=1800, description="Length of the period in seconds.")


class ScalingRules(Model):
    """Behaviour of one scaling direction, as in autoscaling/v2."""

    stabilization_window_seconds: int | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="Window in seconds whose lowest (up) or highest (down) recommendation is used. Default: up 0; down "
        "as learned from the load.",
    )
    select_policy: Literal["Max", "Min", "Disabled"] | None = Field(
        default=None,
        description="Policy that is used if several apply: Max, the largest change (the default); Min, the smallest; "
        "Disabled: no scaling in this direction.",
    )
    policies: tuple[ScalingPolicy, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Rate limits. Default: up, 4 replicas or 100 percent in 15 s; down, none.",
    )


class ScalingBehavior(Model):
    """Behaviour of both scaling directions, as in autoscaling/v2."""

    scale_up: ScalingRules | None = Field(default=None, description="Behaviour of scaling up.")
    scale_down: ScalingRules | None = Field(default=None, description="Behaviour of scaling down.")


class ScalingForecast(Model):
    """Forecast of request arrivals from previous days."""

    seasonality: Literal["Daily", "Weekly"] = Field(default="Daily", description="Period of the load: a day or a week.")


class Scaling(Model):
    """Automatic replica count."""

    min_replicas: int = Field(
        default=1, ge=0, le=1000, description="Minimum replicas. 0 needs spec.router, which holds requests meanwhile."
    )
    max_replicas: int = Field(ge=1, le=1000, description="Maximum replicas.")
    idle_timeout: Duration | None = Field(
        default=None,
        description="With minReplicas 0: time without any request after which the last replicas are removed. "
        "Default: 10m.",
    )
    behavior: ScalingBehavior | None = Field(default=None, description="Scaling behaviour, as in autoscaling/v2.")
    forecast: ScalingForecast | None = Field(
        default=None,
        description="Learn how arrivals change with the time of day or week. The forecast is used for scaling after it "
        "has proved better than the current load. Default: no forecast.",
    )


DEFAULT_IDLE_TIMEOUT = "10m"
ZERO_WITHOUT_ROUTER = "0 needs a router, which holds requests meanwhile; set spec.router.enabled, or use 1 or more"
IDLE_TIMEOUT_UNUSED = "only applies with minReplicas 0; set minReplicas to 0, or remove it"
SCALING_RULES = [
    cel(
        "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas must not exceed maxReplicas",
        "spec.scaling.minReplicas: is %s, above maxReplicas %s; lower it or raise maxReplicas",
        "self.minReplicas",
        "self.maxReplicas",
    ),
    cel(
        "!has(self.idleTimeout) || (has(self.minReplicas) && self.minReplicas == 0)",
        f"spec.scaling.idleTimeout: {IDLE_TIMEOUT_UNUSED}",
    ),
]
CLASS_IMMUTABLE = "cannot be changed, because the new operator would not know the engines; create another resource"
REPLICAS_IGNORED = "is ignored while spec.scaling is set; change scaling.minReplicas or maxReplicas, or remove scaling"


def _target_above_zero(objective: str) -> dict[str, Any]:
    """Return the schema's rule that the target of an objective is positive."""
    words = f"spec.objectives.{objective}.target: is %s; set a time above zero"
    rule = cel("self.target.matches('[1-9]')", "target must be above zero", words, "self.target")
    return schema(**{"x-kubernetes-validations": [rule]})


class TtftObjective(Model):
    """Objective for the time to the first token (TTFT)."""

    percentile: int = Field(default=95, ge=1, le=99, description="Percentage of requests that must meet the target.")
    target: Duration = Field(description="Maximum TTFT, for example 500ms.")
    per_prompt_token: FineDuration | None = Field(
        default=None, description="Addition to the target per prompt token, for example 125us."
    )


class ItlObjective(Model):
    """Objective for the inter-token latency (ITL)."""

    percentile: int = Field(default=95, ge=1, le=99, description="Percentage of requests that must meet the target.")
    target: Duration = Field(description="Maximum ITL, for example 50ms.")
    kind: Literal["Mean", "Tokens"] = Field(
        default="Mean", description="Mean: the mean ITL of a request. Tokens: each interval between two tokens."
    )


class Objectives(Model):
    """Latency objectives. Tuning maximises the share of requests that meet them."""

    ttft: TtftObjective | None = Field(
        default=None,
        description="Objective for the time to the first token (TTFT).",
        json_schema_extra=_target_above_zero("ttft"),
    )
    itl: ItlObjective | None = Field(
        default=None,
        description="Objective for the inter-token latency (ITL).",
        json_schema_extra=_target_above_zero("itl"),
    )


TTFT_PERCENTILE = "(has(self.ttft.percentile) ? self.ttft.percentile : 95)"
ITL_PERCENTILE = "(has(self.itl.percentile) ? self.itl.percentile : 95)"
ONE_PERCENTILE = cel(
    f"!has(self.ttft) || !has(self.itl) || {TTFT_PERCENTILE} == {ITL_PERCENTILE}",
    "ttft and itl must have the same percentile",
    "spec.objectives.itl.percentile: is %s, but that of ttft is %s; set the same percentile for both",
    ITL_PERCENTILE,
    TTFT_PERCENTILE,
)


class WatermarkBounds(Model):
    """Upper bound of the watermark, the fraction of the KV cache that admission keeps free; engines start at 0."""

    max: Fraction = Field(description="Maximum value that tuning may set; 0.0 disables tuning of the watermark.")


class FractionBounds(Model):
    """Bounds of a live parameter that is a fraction."""

    min: Fraction | None = Field(default=None, description="Minimum value that tuning may set.")
    max: Fraction | None = Field(default=None, description="Maximum value that tuning may set; the engine's cap.")


class IntBounds(Model):
    """Bounds of a live parameter that is a count."""

    min: int | None = Field(default=None, ge=1, le=1048576, description="Minimum value that tuning may set.")
    max: int | None = Field(
        default=None, ge=1, le=1048576, description="Maximum value that tuning may set; the engine's cap."
    )


def _min_up_to_max(parameter: str, number: str) -> dict[str, Any]:
    """Return the schema's rule that min is at most max; `number` is the CEL function that converts the values."""
    rule = f"!has(self.min) || !has(self.max) || {number}(self.min) <= {number}(self.max)"
    words = f"spec.tuning.bounds.{parameter}: min %s exceeds max %s; lower min or raise max"
    rules = [cel(rule, "min must not exceed max", words, "self.min", "self.max")]
    return schema(**{"x-kubernetes-validations": rules})


class Bounds(Model):
    """Bounds within which tuning changes each live parameter. min = max pins a parameter."""

    gpu_memory_utilization: FractionBounds | None = Field(
        default=None,
        description="Bounds of gpuMemoryUtilization.",
        json_schema_extra=_min_up_to_max("gpuMemoryUtilization", "double"),
    )
    max_num_seqs: IntBounds | None = Field(
        default=None,
        description="Bounds of maxNumSeqs.",
        json_schema_extra=_min_up_to_max("maxNumSeqs", "int"),
    )
    max_num_batched_tokens: IntBounds | None = Field(
        default=None,
        description="Bounds of maxNumBatchedTokens.",
        json_schema_extra=_min_up_to_max("maxNumBatchedTokens", "int"),
    )
    watermark: WatermarkBounds | None = Field(
        default=None, description="Bound of the watermark, the fraction of the KV cache that admission keeps free."
    )


class Tuning(Model):
    """Mode and bounds of the tuning of live parameters."""

    mode: Literal["Off", "Recommend", "Auto"] = Field(
        default="Recommend",
        description="Off: no tuning. Recommend: report recommendations in status. Auto: change the running engines.",
    )
    bounds: Bounds = Field(default=Bounds(), description="Bounds of each live parameter.")
    restart_class: Literal["Never", "Canary"] = Field(
        default="Never",
        description="Canary: tune parameters that need a restart, starting with one replica. Never: do not.",
    )


class Metrics(Model):
    """Source of the engines' metrics."""

    source: Literal["Auto", "Prometheus", "Pods"] = Field(
        default="Auto",
        description="Auto: Prometheus if it is configured and its samples are plausible, else the pods. Prometheus: "
        "only Prometheus. Pods: scrape the engine pods.",
    )
    labels: dict[str, str] = Field(
        default={},
        description="Labels of this resource's series in Prometheus, in addition to the namespace and the pod.",
        max_length=8,
        json_schema_extra=schema(additionalProperties={"type": "string", "maxLength": 256}),
    )


class RouterPriority(Model):
    """One priority of requests."""

    name: str = Field(
        pattern=DNS_LABEL,
        max_length=63,
        description="Name that a request sends in the priority header. `default` applies to requests without one.",
    )
    value: int = Field(
        ge=-1000,
        le=1000,
        description="Waiting requests with a higher value are dispatched first. Without a priority `default`: 0.",
    )
    api_key_sha256s: tuple[Annotated[str, Field(pattern=SHA256, max_length=64)], ...] = Field(
        default=(),
        max_length=64,
        alias="apiKeySHA256s",
        description="SHA-256 of API keys, in hexadecimal digits: their requests have this priority.",
    )


HeaderName = Annotated[str, Field(pattern=HEADER_NAME, min_length=1, max_length=64)]


class Router(Model):
    """Router in front of the replicas: it sends each request to the replica that is predicted to answer first, and
    holds requests while there is none.
    """

    enabled: bool = Field(
        default=True, description="False removes the router: the client Service then selects the replicas directly."
    )
    replicas: int = Field(default=2, ge=1, le=100, description="Router pods; all of them serve.")
    image: str | None = Field(
        default=None,
        min_length=1,
        max_length=512,
        description="Router image. Default: that of the operator's --router.",
    )
    max_hold: Duration = Field(
        default="10m",
        description="Maximum time for which a request waits in the router for a replica, before it is rejected. Router "
        "pods that are stopped have this time too, in addition to rollout.drainTimeout. At most 1h.",
    )
    max_held_requests: int | None = Field(
        default=None,
        ge=1,
        le=1000000,
        description="Maximum number of waiting requests of one router pod; further requests are rejected with 429. "
        "Default: 10000.",
    )
    priorities: tuple[RouterPriority, ...] = Field(
        default=(),
        max_length=16,
        description="Priorities that requests may have. Waiting requests of a higher priority are always dispatched "
        "before those of a lower one.",
        json_schema_extra=schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    )
    priority_header: HeaderName | None = Field(
        default=None, description="Header with the name of a request's priority. Default: x-trimtab-priority."
    )
    session_header: HeaderName | None = Field(
        default=None,
        description="Header that identifies a session: of equally good replicas, requests of a session "
        "get the same one. Default: x-session-id.",
    )
    tenant_header: HeaderName | None = Field(
        default=None,
        description="Header that identifies the tenant; waiting tenants get equal shares. Default: x-trimtab-tenant. "
        "Without trustHeaders tenants are API keys.",
    )
    trust_headers: bool = Field(
        default=False,
        description="Use the priority and tenant headers of requests. Only set it if a gateway in front of the router "
        "sets or removes them, because clients could otherwise choose their own. False: the headers are removed.",
    )
    resources: dict[str, Any] | None = Field(
        default=None,
        description="Requests and limits of a router pod. Default: requests of 250m cpu and 256Mi memory.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class Rollout(Model):
    """Rollout of changes to the replicas."""

    max_unavailable: IntOrString = Field(
        default=1,
        description="Maximum unavailable replicas during a rollout in place: a number or a percentage (rounded down, "
        "at least 1).",
        json_schema_extra=schema(maximum=1000, minimum=1, maxLength=4, pattern="^[0-9]{1,3}%$"),
    )
    max_surge: IntOrString = Field(
        default=1,
        description="Maximum additional replicas during a rollout: each becomes Ready before an old one is drained. A "
        "number or a percentage (rounded up). 0, or if no node has room for an additional replica: in place.",
        json_schema_extra=schema(maximum=1000, minimum=0, maxLength=4, pattern="^[0-9]{1,3}%$"),
    )
    drain_timeout: Duration = Field(
        default="30s", description="Maximum time for running requests to finish when a replica is stopped."
    )
    start_timeout: Duration | None = Field(
        default=None,
        description="Maximum time for the first replica of a change to become Ready after the old one has drained. "
        "When it is exceeded, replicas are rolled back to the last known-good revision until the spec changes again. "
        "At most 2h. Default: 30m plus the time to read the model at 100 MB/s.",
    )
    bake_time: Duration = Field(
        default="30s",
        description="Time for which the first replica of a change is compared with the others before they are updated. "
        "The change is rolled back if its engine exits or performs clearly worse. At most 1h. 0s: no comparison.",
    )


class TemplateMetadata(Model):
    """Labels and annotations of the pods."""

    labels: dict[str, str] = Field(default={}, description="Labels added to the pods.")
    annotations: dict[str, str] = Field(default={}, description="Annotations added to the pods.")


def _free_form(**extra: Any) -> dict[str, Any]:
    """Return the schema of a part of the pod spec that the API server checks when the pod is created."""
    return {"x-kubernetes-preserve-unknown-fields": True, **extra}


def with_canonical_amounts(resources: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return requests and limits with canonical quantities. Other content is left to the validation rules."""
    return {kind: _canonical(amounts) for kind, amounts in resources.items()} if resources else resources


def _canonical(amounts: object) -> object:
    if not isinstance(amounts, Mapping):
        return amounts
    found = dict(amounts)
    for name, amount in amounts.items():
        if isinstance(amount, str | int | float) and not isinstance(amount, bool):
            with suppress(ValueError):
                found[name] = canonical_quantity(str(amount))
    return found


def with_canonical_size(volume: dict[str, Any]) -> dict[str, Any]:
    """Return a volume with a canonical `emptyDir.sizeLimit`."""
    empty = volume.get("emptyDir")
    if not isinstance(empty, Mapping):
        return volume
    return {**volume, "emptyDir": _canonical(empty)}


class ContainerOverlay(BaseModel):
    """Overlay of the container `main`."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)

    name: str = Field(max_length=63, description="Must be main, the name of the engine's container.")
    resources: Annotated[dict[str, Any] | None, AfterValidator(with_canonical_amounts)] = Field(
        default=None, description="Requests and limits.", json_schema_extra=_free_form()
    )
    env: tuple[dict[str, Any], ...] = Field(
        default=(), max_length=128, description="Environment variables.", json_schema_extra=_free_form()
    )
    env_from: tuple[dict[str, Any], ...] = Field(
        default=(), max_length=32, description="Sources of environment variables.", json_schema_extra=_free_form()
    )
    volume_mounts: tuple[dict[str, Any], ...] = Field(
        default=(), max_length=64, description="Mounts of the volumes below.", json_schema_extra=_free_form()
    )
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = Field(
        default=None, description="When the image is pulled. Default: IfNotPresent."
    )


class PodOverlay(BaseModel):
    """Overlay of the pod spec. Any other field is rejected, never ignored."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)

    containers: tuple[ContainerOverlay, ...] = Field(
        default=(), max_length=1, description="Overlay of the container `main`; no other is allowed."
    )
    node_selector: dict[str, str] = Field(default={}, description="Labels that a node must have.")
    tolerations: tuple[dict[str, Any], ...] = Field(
        default=(), max_length=64, description="Taints that the pods tolerate.", json_schema_extra=_free_form()
    )
    affinity: dict[str, Any] | None = Field(default=None, description="Affinity rules.", json_schema_extra=_free_form())
    topology_spread_constraints: tuple[dict[str, Any], ...] = Field(
        default=(),
        max_length=16,
        description="Topology spread constraints of the pods.",
        json_schema_extra=_free_form(),
    )
    image_pull_secrets: tuple[dict[str, Any], ...] = Field(
        default=(), max_length=16, description="Secrets for pulling the image.", json_schema_extra=_free_form()
    )
    volumes: tuple[Annotated[dict[str, Any], AfterValidator(with_canonical_size)], ...] = Field(
        default=(),
        max_length=64,
        description="Additional volumes; hostPath is rejected unless podOverlay.allowedPrivileges lists it.",
        json_schema_extra=_free_form(),
    )
    priority_class_name: str | None = Field(default=None, max_length=253, description="Priority class of the pods.")
    runtime_class_name: str | None = Field(default=None, max_length=253, description="Runtime class of the pods.")
    scheduler_name: str | None = Field(default=None, max_length=253, description="Scheduler of the pods.")
    security_context: dict[str, Any] | None = Field(
        default=None,
        description="runAsUser, runAsGroup, fsGroup, fsGroupChangePolicy and supplementalGroups of the pods.",
        json_schema_extra=_free_form(),
    )
    termination_grace_period_seconds: int | None = Field(
        default=None,
        ge=1,
        le=86400,
        description="Must exceed rollout.drainTimeout by more than 5 s. Default: the drain timeout plus 20 s.",
    )


class PodTemplate(Model):
    """Overlay of the pods that the operator renders."""

    metadata: TemplateMetadata = Field(default=TemplateMetadata(), description="Labels and annotations of the pods.")
    spec: PodOverlay = Field(
        default=PodOverlay(),
        description="Fields that are merged into the rendered pod spec.",
        json_schema_extra=_free_form(),
    )


def class_of(body: Mapping[str, Any]) -> str | None:
    """Return the operator class of a resource, whether or not its spec is valid."""
    spec = body.get("spec")
    found = spec.get("class") if isinstance(spec, Mapping) else None
    return found if isinstance(found, str) else None


class Spec(Model):
    """Desired state of an inference deployment."""

    model: ModelSource = Field(description="Model to serve.")
    runtime: Runtime = Field(default=Runtime(), description="Engine, its image and its device.")
    parallelism: Parallelism = Field(default=Parallelism(), description="Parallel layout of one replica.")
    engine: Engine = Field(default=Engine(), description="Start values of engine parameters.")
    operator_class: str | None = Field(
        default=None,
        alias="class",
        pattern=DNS_LABEL,
        max_length=63,
        description="Class of the operator that serves this resource, if several are installed: that with the same "
        "--class. Default: the operator without a class. Immutable.",
    )
    replicas: int = Field(
        default=1,
        ge=0,
        le=MAX_REPLICAS,
        description="Desired replicas; kubectl scale and autoscalers write it. If scaling is set, it is only the "
        "initial count and cannot be changed.",
    )
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Priority within a GPU budget; higher values are served first. Replicas of resources with a lower "
        "priority, above their scaling.minReplicas, are removed to free GPUs.",
    )
    scaling: Scaling | None = Field(
        default=None,
        description="Automatic replica count, derived from the objectives. With tuning.mode Recommend it is only "
        "reported.",
        json_schema_extra=schema(**{"x-kubernetes-validations": SCALING_RULES}),
    )
    objectives: Objectives | None = Field(
        default=None,
        description="Latency objectives. Default: three times the latency of an idle engine, for 95 percent of "
        "requests.",
        json_schema_extra=schema(
            **{
                "x-kubernetes-validations": [
                    cel(
                        "has(self.ttft) || has(self.itl)",
                        "spec.objectives: is empty; set at least one of ttft and itl, or remove it",
                    ),
                    ONE_PERCENTILE,
                ]
            }
        ),
    )
    tuning: Tuning = Field(default=Tuning(), description="Mode and bounds of the tuning of live parameters.")
    metrics: Metrics = Field(default=Metrics(), description="Source of the engines' metrics.")
    rollout: Rollout = Field(default=Rollout(), description="Rollout of changes to the replicas.")
    router: Router | None = Field(
        default=None, description="Router in front of the replicas. Default: clients reach the replicas directly."
    )
    template: PodTemplate = Field(default=PodTemplate(), description="Overlay of the pods.")

    @property
    def active_router(self) -> Router | None:
        """The router; None if there is none or it is disabled."""
        return self.router if self.router is not None and self.router.enabled else None


def _spec(text: str) -> Spec:
    """Parse a spec from JSON.

    Raises:
        ValidationError: The JSON does not match the schema.
    """
    return Spec.model_validate_json(text, strict=True, by_alias=True, by_name=False)


_spec_again = functools.lru_cache(maxsize=MAX_KEPT_SPECS)(_spec)
"""`_spec` with a cache: specs are immutable, and each status update delivers the same spec again."""


@dataclass(frozen=True, slots=True)
class InferenceDeployment:
    """A parsed resource. `image` is spec.runtime.image or the operator's default; None if neither is set.

    `restarted_at` is the value of the restart annotation: a changed value replaces the pods. `is_paused` is True if
    reconciliation is paused. `allowed_privileges` are the privileges that the installation allows for pods.
    """

    namespace: str
    name: str
    uid: str
    generation: int
    spec: Spec
    image: str | None
    status: Mapping[str, Any]
    restarted_at: str | None = None
    is_paused: bool = False
    commit: str | None = None
    """Resolved revision of a downloaded model: a commit, the digest of a bucket's objects or of a manifest. None if it
    is unknown or the model is not downloaded."""
    weights_bytes: int | None = None
    """Size of the model's weights in bytes; None if unknown."""
    allowed_privileges: frozenset[str] = NO_PRIVILEGES
    created_at: str = ""
    """Creation time in the API server's format."""
    caps: Caps | None = None
    """Caps that running pods have reserved (resource/live_parameters.py); None for those of a new revision."""

    @property
    def replicas(self) -> int:
        """Desired replicas, set by the user or by an autoscaler through /scale; ignored if `spec.scaling` is set."""
        return self.spec.replicas

    @classmethod
    def parse(
        cls,
        body: Mapping[str, Any],
        *,
        default_image: str | None = None,
        allowed_privileges: frozenset[str] = NO_PRIVILEGES,
    ) -> InferenceDeployment:
        """Parse a resource in the API server's format.

        Raises:
            InvalidSpec: The spec has errors; the exception lists each field.
        """
        metadata = body.get("metadata") or {}
        annotations = metadata.get("annotations") or {}
        too_large = size_error(body.get("spec"))
        if too_large is not None:
            raise InvalidSpec(f"spec: {too_large}")
        text = json.dumps(body.get("spec") or {})
        try:
            spec = _spec_again(text) if len(text) <= MAX_KEPT_TEXT else _spec(text)
        except ValidationError as error:
            raise InvalidSpec(*(f"{field}: {message}" for field, message in schema_errors(error, Spec))) from error
        return cls(
            namespace=str(metadata.get("namespace") or "default"),
            name=str(metadata.get("name") or ""),
            uid=str(metadata.get("uid") or ""),
            generation=int(metadata.get("generation") or 0),
            spec=spec,
            image=spec.runtime.image or default_image,
            status=body.get("status") or {},
            restarted_at=annotations.get(RESTARTED_AT),
            is_paused=annotations.get(PAUSED, "false") != "false",
            allowed_privileges=allowed_privileges,
            created_at=str(metadata.get("creationTimestamp") or ""),
        )

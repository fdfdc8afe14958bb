"""The typed view of an InferenceDeployment's `spec`: the single source of the CRD (see `crd.py`).

Field names are the CRD's, in snake case; bounds and descriptions written here are those that the API server enforces
and that `kubectl explain` prints. What a field may be in combination with others is the business of `validation.py`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from trimtab_operator.errors import InvalidSpec
from trimtab_operator.resource.allowed_privileges import NO_PRIVILEGES
from trimtab_operator.resource.forms import (
    DNS_LABEL,
    DURATION,
    FINE_DURATION,
    FOLDER,
    FRACTION,
    HTTP_URL,
    MODEL_URI,
    QUANTITY,
    REGION,
)
from trimtab_operator.resource.schema_errors import schema_errors

GROUP = "trimtab.dev"
VERSION = "v1alpha1"
PAUSED = "trimtab.dev/paused"  # annotation of a resource: whatever it says but false, nothing of it is changed
RESTARTED_AT = "trimtab.dev/restarted-at"  # annotation of a resource; another text asks for new pods
KIND = "InferenceDeployment"
PLURAL = "inferencedeployments"
MAX_REPLICAS = 1000
MAX_PRIORITY = 1_000_000_000  # as of a PriorityClass
MODALITIES = ("image", "video")  # what a prompt may have besides text
MAX_KEPT_SPECS, MAX_KEPT_TEXT = 1024, 16384  # read specs, and letters of one, that are kept in case they come again
MAX_NAME_LENGTH = 40  # child names and the pods' generated labels get suffixes and must stay below 63


SERVED_NAME = r"^[A-Za-z0-9][-A-Za-z0-9_./:]*$"

Fraction = Annotated[str, Field(pattern=FRACTION, max_length=6)]
Quantity = Annotated[str, Field(pattern=QUANTITY, max_length=24)]
Duration = Annotated[str, Field(pattern=DURATION, min_length=2, max_length=24)]
FineDuration = Annotated[str, Field(pattern=FINE_DURATION, max_length=10)]
IntOrString = int | str


def schema(**extra: Any) -> dict[str, Any]:
    """Schema keywords that pydantic does not know, such as `x-kubernetes-validations`."""
    return dict(extra)


def cel(rule: str, message: str, words: str | None = None, *values: str) -> dict[str, str]:
    """One CEL rule. Kubernetes before 1.25 drops it; `validation.py` holds the same rule.

    `words` are that one's, with %s in the place of each of `values`, which are CEL; before 1.29 `message` stands in
    their place. They are not put together with `+`: an API server foresees what the longest text would cost, knows no
    bound of what `string` makes, and refuses the CRD; `format` costs what its pattern is long.
    """
    if words is None:
        return {"rule": rule, "message": message}
    texts = ", ".join(f"string({value})" for value in values)
    return {"rule": rule, "message": message, "messageExpression": f"'{words}'.format([{texts}])"}


class Model(BaseModel):
    """Common settings: camelCase on the wire, unknown fields are refused, values never change."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True)


class SecretKeyRef(Model):
    """One key of a Secret in the namespace of the resource."""

    name: str = Field(
        pattern=DNS_LABEL, max_length=63, description="Name of the Secret, in the namespace of the resource."
    )
    key: str = Field(default="token", min_length=1, max_length=253, description="Key within the Secret.")


class ModelCache(Model):
    """Where downloaded weights are kept."""

    claim_name: str | None = Field(
        default=None,
        pattern=DNS_LABEL,
        max_length=63,
        description="PersistentVolumeClaim that replicas and other resources may share: a model is downloaded once. "
        "Default: a volume of the pod's own, which goes with it.",
    )
    size: Quantity | None = Field(
        default=None,
        description="How large the cache may grow, for example 100Gi. On a claim the longest unused models are deleted "
        "before a download. Default: 200Gi for a pod's own volume, no limit on a claim.",
    )


class Scheme(StrEnum):
    """Where a model is: on the hub, in a bucket, in a registry, on a claim, in the engine's image."""

    HUB = "hf"
    S3 = "s3"
    OCI = "oci"
    CLAIM = "pvc"
    FILE = "file"


PIN = re.compile(r"[0-9a-f]{40}|(?:sha256:)?[0-9a-f]{64}")
"""What a model is pinned to: a commit, the digest of a bucket's objects or of a registry's manifest."""
DOWNLOADED = (Scheme.HUB, Scheme.S3, Scheme.OCI)
PINNED_OBJECTS = re.compile(r"(?P<place>.*?)(?:@(?P<revision>[0-9a-f]{64}))?")
TAGGED_IMAGE = re.compile(r"(?P<place>[^@]*?)(?::(?P<tag>[^/:@]*))?(?:@(?P<revision>.*))?")


class BucketAccess(Model):
    """How the bucket of an s3:// model is reached. Without credentials those of the pod's service account are used,
    and without these the bucket is asked as everybody may ask it."""

    endpoint: str | None = Field(
        default=None, pattern=HTTP_URL, max_length=512, description="Address of the store. Default: Amazon's."
    )
    region: str | None = Field(default=None, pattern=REGION, max_length=63, description="Region of the bucket.")
    addressing: Literal["path", "virtual"] | None = Field(
        default=None,
        description="Where the bucket's name stands: in a URL's path or in its host. Default: in the host of Amazon's "
        "own, in the path of another endpoint.",
    )
    credentials_secret: str | None = Field(
        default=None,
        pattern=DNS_LABEL,
        max_length=63,
        description="Secret with AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, where there is one, AWS_SESSION_TOKEN. "
        "The engine's pods and the Job that reads the model get them.",
    )


class RegistryAccess(Model):
    """How the registry of an oci:// model is reached."""

    pull_secret: str | None = Field(
        default=None,
        pattern=DNS_LABEL,
        max_length=63,
        description="Secret of the type kubernetes.io/dockerconfigjson. The engine's pods and the Job that reads the "
        "model get it.",
    )
    plain_http: bool = Field(default=False, description="Ask the registry without TLS.")
    image_volume: bool = Field(
        default=False,
        description="Have the node pull the image and mount it, instead of the engine. The uri must name a digest, and "
        "the cluster must serve image volumes (Kubernetes 1.35, or 1.33 with its feature gate ImageVolume).",
    )
    folder: str | None = Field(
        default=None,
        pattern=FOLDER,
        max_length=512,
        description="Folder of the image that holds the model, with imageVolume. Default: its root.",
    )


class ModelSource(Model):
    """What is served."""

    uri: str = Field(
        pattern=MODEL_URI,
        max_length=1024,
        description="Where the weights are: hf://ORG/NAME[@REVISION] of the Hugging Face hub, s3://BUCKET/PREFIX, "
        "oci://REGISTRY/REPOSITORY:TAG, file:///path in the image, or pvc://CLAIM/path on a PersistentVolumeClaim.",
    )
    revision: str | None = Field(
        default=None,
        min_length=1,
        max_length=128,
        description="Branch, tag or commit of an hf:// model. Default: main. It is pinned to status.modelRevision.",
    )
    served_name: str | None = Field(
        default=None,
        pattern=SERVED_NAME,
        max_length=128,
        description="Name that clients send as `model`. Default: the last part of the uri.",
    )
    token_secret_ref: SecretKeyRef | None = Field(
        default=None,
        description="Secret with the token that the hub wants. The engine's pods and the Job that reads the model "
        "get it.",
    )
    cache: ModelCache | None = Field(default=None, description="Where downloaded weights are kept.")
    s3: BucketAccess | None = Field(default=None, description="How the bucket of an s3:// model is reached.")
    oci: RegistryAccess | None = Field(default=None, description="How the registry of an oci:// model is reached.")

    @property
    def scheme(self) -> Scheme:
        """Where it is."""
        return Scheme(self.uri.partition("://")[0])

    @property
    def is_downloaded(self) -> bool:
        """Whether the engine fetches it."""
        return self.scheme in DOWNLOADED and not self.is_in_image_volume

    @property
    def is_in_image_volume(self) -> bool:
        """Whether the node pulls it, as an image."""
        return self.scheme is Scheme.OCI and self.oci is not None and self.oci.image_volume

    @property
    def parts(self) -> tuple[str, str | None]:
        """The place, and the revision of a model that is downloaded: ORG/NAME and a branch, BUCKET/PREFIX and the pin
        of its objects, REGISTRY/REPOSITORY and a tag or digest."""
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
        """servedName, else the last part of the uri."""
        return self.served_name or self.parts[0].rstrip("/").rsplit("/", 1)[-1]


class Runtime(Model):
    """Which engine runs, on what."""

    kind: Literal["trimtab", "vllm"] = Field(default="trimtab", description="The engine: trimtab or vllm.")
    image: str | None = Field(
        default=None, min_length=1, max_length=512, description="Engine image. Default: the one the operator is set to."
    )
    device: Literal["cuda", "cpu"] = Field(
        default="cuda",
        description="Device of the engine. cpu asks for no GPU; cuda asks for as many as the layout needs.",
    )
    args: tuple[Annotated[str, Field(min_length=1, max_length=1024)], ...] = Field(
        default=(),
        max_length=64,
        description="Further flags of the engine, passed on as they are. One that repeats a field is refused.",
    )


class Parallelism(Model):
    """How one replica is spread over devices."""

    tensor: int = Field(
        default=1, ge=1, le=1024, description="Tensor parallel degree: every layer is split over so many devices."
    )
    pipeline: int = Field(
        default=1, ge=1, le=128, description="Pipeline parallel degree: layers are spread over so many stages."
    )
    data: int = Field(default=1, ge=1, le=1024, description="Data parallel ranks within one replica.")
    expert: bool = Field(default=False, description="Spread the experts of a mixture-of-experts model over the ranks.")
    gpus_per_node: int | None = Field(
        default=None, ge=1, le=64, description="Devices that one pod gets. Default: tensor × pipeline."
    )


class Speculative(Model):
    """Speculative decoding."""

    method: Literal["ngram", "draft_model", "eagle", "mtp"] = Field(
        default="ngram",
        description="How tokens are proposed: from the request's own text, by a smaller model, by a head that was "
        "trained for this model, or by the model's own layer for that.",
    )
    num_speculative_tokens: int = Field(default=3, ge=1, le=32, description="Tokens proposed per step, at most. Live.")
    model: str | None = Field(
        default=None, min_length=1, max_length=1024, description="file:/// uri of the draft model, or of the head."
    )


class Engine(Model):
    """Where each engine parameter starts. An omitted one starts at the engine's default."""

    gpu_memory_utilization: Fraction | None = Field(
        default=None,
        description='Share of the device that the engine may use, as a decimal string such as "0.90". Live.',
    )
    max_num_seqs: int | None = Field(default=None, ge=1, le=65536, description="Requests that run at once. Live.")
    max_num_batched_tokens: int | None = Field(
        default=None, ge=1, le=1048576, description="Token budget of one step. Live."
    )
    max_model_len: int | None = Field(
        default=None, ge=1, le=16777216, description="Longest prompt plus output, in tokens. Default: the model's."
    )
    block_size: Literal[8, 16, 32] | None = Field(default=None, description="Tokens in one KV block: 8, 16 or 32.")
    kv_cache_dtype: Literal["auto", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"] | None = Field(
        default=None, description="Type of the KV cache. auto: that of the model."
    )
    quantization: str | None = Field(
        default=None, min_length=1, max_length=64, description="Quantization scheme of the weights."
    )
    scheduling_policy: Literal["fcfs", "priority", "deadline"] | None = Field(
        default=None,
        description="Who of those that wait is served first: fcfs, who came first; priority, by the requests' own "
        "priority; deadline, who can still have a first token within objectives.ttft. Engines are told while they "
        "serve: none restarts. Default: deadline where objectives.ttft is given and tuning.mode is Auto, else the "
        "engine's.",
    )
    preemption_mode: Literal["recompute", "swap", "auto"] | None = Field(
        default=None, description="What happens to the KV blocks of a preempted request."
    )
    swap_space: Quantity | None = Field(default=None, description="Host memory for swapped KV blocks, for example 4Gi.")
    kv_offload_size: Quantity | None = Field(
        default=None, description="Host memory for cached prefixes that the KV cache evicts, for example 4Gi."
    )
    enable_prefix_caching: bool | None = Field(default=None, description="Reuse KV blocks of equal prefixes.")
    speculative: Speculative | None = Field(default=None, description="Speculative decoding.")
    api_server_count: int | None = Field(default=None, ge=1, le=64, description="API server processes per replica.")
    mm_processor_cache: Quantity | None = Field(
        default=None,
        description="Host memory for processed images and videos, in each API server and again in each engine core.",
    )
    limit_mm_per_prompt: dict[str, int] | None = Field(
        default=None, description="Most images and videos in one prompt, for example {image: 2, video: 0}."
    )
    enforce_eager: bool | None = Field(default=None, description="Run without CUDA graphs.")
    cudagraph_capture_sizes: tuple[Annotated[int, Field(ge=1, le=65536)], ...] | None = Field(
        default=None, max_length=128, description="Batch sizes for which CUDA graphs are captured."
    )


DEADLINE_WITHOUT_TARGET = (
    "is deadline, but spec.objectives.ttft is not given, and by its target it is known who is still in time; set "
    "spec.objectives.ttft.target, or use fcfs"
)


class ScalingPolicy(Model):
    """One rate limit of a scaling direction, as in autoscaling/v2."""

    type: Literal["Pods", "Percent"] = Field(description="Unit of `value`.")
    value: int = Field(
        ge=1, le=1000, description="Most replicas, or percent, by which the count may change in a period."
    )
    period_seconds: int = Field(ge=1, le=1800, description="Length of the period in seconds.")


class ScalingRules(Model):
    """Behaviour of one scaling direction, as in autoscaling/v2."""

    stabilization_window_seconds: int | None = Field(
        default=None,
        ge=0,
        le=3600,
        description="Seconds whose lowest (up) or highest (down) need counts. Default: up 0; down as long as learned.",
    )
    select_policy: Literal["Max", "Min", "Disabled"] | None = Field(
        default=None,
        description="Which policy decides when several apply: the one that allows most (Max, the default) or least; "
        "Disabled: no replica is added, or removed.",
    )
    policies: tuple[ScalingPolicy, ...] | None = Field(
        default=None, min_length=1, max_length=16, description="Rate limits. Default: none."
    )


class ScalingBehavior(Model):
    """Behaviour of both scaling directions, as in autoscaling/v2."""

    scale_up: ScalingRules | None = Field(default=None, description="How replicas are added.")
    scale_down: ScalingRules | None = Field(default=None, description="How replicas are removed.")


class ScalingForecast(Model):
    """Forecast of arrivals from those of the days before."""

    seasonality: Literal["Daily", "Weekly"] = Field(
        default="Daily", description="After how long the load repeats itself: every day, or every week."
    )


class Scaling(Model):
    """Automatic replica count."""

    min_replicas: int = Field(default=1, ge=0, le=1000, description="Fewest replicas; at least 1.")
    max_replicas: int = Field(ge=1, le=1000, description="Most replicas.")
    behavior: ScalingBehavior | None = Field(default=None, description="Pace of scaling, as in autoscaling/v2.")
    forecast: ScalingForecast | None = Field(
        default=None,
        description="Learn how arrivals change with the time of the day or the week, and scale by that once it has "
        "proved better than the present load alone. Default: no forecast.",
    )


NO_MEASURE_WITHOUT_REPLICAS = (
    "is 0: without a replica nothing is measured, and none would come back; use 1 or more, or leave scaling out and "
    "let KEDA write to /scale"
)
SCALING_RULES = [
    cel(
        "!has(self.minReplicas) || self.minReplicas <= self.maxReplicas",
        "minReplicas must not exceed maxReplicas",
        "spec.scaling.minReplicas: is %s, above maxReplicas %s; lower it or raise maxReplicas",
        "self.minReplicas",
        "self.maxReplicas",
    ),
    cel(
        "!has(self.minReplicas) || self.minReplicas > 0",
        f"spec.scaling.minReplicas: {NO_MEASURE_WITHOUT_REPLICAS}",
    ),
]
REPLICAS_ARE_NOT_ASKED = (
    "is ignored while spec.scaling is set; change scaling.minReplicas or maxReplicas, or remove scaling"
)


def _target_above_zero(promise: str) -> dict[str, Any]:
    """The schema's words for a promise without a time."""
    words = f"spec.objectives.{promise}.target: is %s; set a time above zero"
    said = cel("self.target.matches('[1-9]')", "target must be above zero", words, "self.target")
    return schema(**{"x-kubernetes-validations": [said]})


class TtftObjective(Model):
    """What is promised of the time to the first token."""

    percentile: int = Field(default=95, ge=1, le=99, description="Percentage of the requests that keep the promise.")
    target: Duration = Field(description="The latest time, for example 500ms.")
    per_prompt_token: FineDuration | None = Field(
        default=None, description="What each token of the prompt adds to the target, for example 125us."
    )


class ItlObjective(Model):
    """What is promised of the time between two tokens."""

    percentile: int = Field(default=95, ge=1, le=99, description="Percentage of the requests that keep the promise.")
    target: Duration = Field(description="The longest time, for example 50ms.")
    kind: Literal["Mean", "Tokens"] = Field(
        default="Mean", description="Mean: a request's mean time between tokens. Tokens: each time between two tokens."
    )


class Objectives(Model):
    """What users are promised: tuning keeps as many requests as it can within it."""

    ttft: TtftObjective | None = Field(
        default=None,
        description="Time to the first token.",
        json_schema_extra=_target_above_zero("ttft"),
    )
    itl: ItlObjective | None = Field(
        default=None,
        description="Time between two tokens.",
        json_schema_extra=_target_above_zero("itl"),
    )


TTFT_PERCENTILE = "(has(self.ttft.percentile) ? self.ttft.percentile : 95)"
ITL_PERCENTILE = "(has(self.itl.percentile) ? self.itl.percentile : 95)"
ONE_PERCENTILE = cel(
    f"!has(self.ttft) || !has(self.itl) || {TTFT_PERCENTILE} == {ITL_PERCENTILE}",
    "ttft and itl must have one percentile",
    "spec.objectives.itl.percentile: is %s, but that of ttft is %s; set the same percentile for both",
    ITL_PERCENTILE,
    TTFT_PERCENTILE,
)


class WatermarkBounds(Model):
    """Bound of the share of the KV cache that admission keeps free; engines start at 0."""

    max: Fraction = Field(description="Highest value that tuning may set; 0.0 keeps it at its start.")


class FractionBounds(Model):
    """Bounds of a knob that is a share."""

    min: Fraction | None = Field(default=None, description="Lowest value that tuning may set.")
    max: Fraction | None = Field(default=None, description="Highest value that tuning may set; the engine's cap.")


class IntBounds(Model):
    """Bounds of a knob that is a count."""

    min: int | None = Field(default=None, ge=1, le=1048576, description="Lowest value that tuning may set.")
    max: int | None = Field(
        default=None, ge=1, le=1048576, description="Highest value that tuning may set; the engine's cap."
    )


def _min_up_to_max(knob: str, number: str) -> dict[str, Any]:
    """The schema's words for bounds of a knob; `number` is what makes its values numbers in CEL."""
    rule = f"!has(self.min) || !has(self.max) || {number}(self.min) <= {number}(self.max)"
    words = f"spec.tuning.bounds.{knob}: min %s exceeds max %s; lower min or raise max"
    said = cel(rule, "min must not exceed max", words, "self.min", "self.max")
    return schema(**{"x-kubernetes-validations": [said]})


class Bounds(Model):
    """Bounds within which tuning moves each live knob. min = max pins a knob."""

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
        default=None, description="Bound of the share of the KV cache that admission keeps free."
    )


class Tuning(Model):
    """Whether and how far the operator moves the live knobs."""

    mode: Literal["Off", "Recommend", "Auto"] = Field(
        default="Recommend",
        description="Off: nothing. Recommend: say what would help in status. Auto: change the running engines.",
    )
    bounds: Bounds = Field(default=Bounds(), description="Bounds of each knob.")
    restart_class: Literal["Never", "Canary"] = Field(
        default="Never", description="Whether parameters that need a restart are tuned, one replica first."
    )


class Metrics(Model):
    """Where the operator reads the engines' metrics."""

    source: Literal["Auto", "Prometheus", "Pods"] = Field(
        default="Auto",
        description="Auto: Prometheus where the operator was given one and it can be believed, else the pods. "
        "Prometheus: nothing else. Pods: scrape the engine pods.",
    )
    labels: dict[str, str] = Field(
        default={},
        description="Labels that the series of this resource have in Prometheus, beside the namespace and the pod.",
        max_length=8,
        json_schema_extra=schema(additionalProperties={"type": "string", "maxLength": 256}),
    )


class Rollout(Model):
    """How changes reach the replicas."""

    max_unavailable: IntOrString = Field(
        default=1,
        description="Replicas that may be down during a rollout in place: a number or a percentage (rounded down, at "
        "least 1).",
        json_schema_extra=schema(maximum=1000, minimum=1, maxLength=4, pattern="^[0-9]{1,3}%$"),
    )
    max_surge: IntOrString = Field(
        default=1,
        description="Replicas that may be there beyond the wanted ones during a rollout: each serves before an old one "
        "is drained. A number or a percentage (rounded up); 0, or where no node takes another one: in place.",
        json_schema_extra=schema(maximum=1000, minimum=0, maxLength=4, pattern="^[0-9]{1,3}%$"),
    )
    drain_timeout: Duration = Field(
        default="30s", description="Time that running requests get to finish when a replica is stopped."
    )
    start_timeout: Duration | None = Field(
        default=None,
        description="Time in which the first replica of a change must become Ready, once the old one has drained; else "
        "replicas return to the last revision that worked, until the spec changes again. At most 2h. Default: 30m, and "
        "what reading the model takes at 100 MB/s.",
    )
    bake_time: Duration = Field(
        default="30s",
        description="Time for which the first replica of a change serves beside the others before they follow: it is "
        "compared with them, and the change is taken back if its engine ends or does clearly worse. At most 1h; 0s: "
        "the others follow at once, and nothing is compared.",
    )


class TemplateMetadata(Model):
    """Labels and annotations of the pods."""

    labels: dict[str, str] = Field(default={}, description="Labels added to the pods.")
    annotations: dict[str, str] = Field(default={}, description="Annotations added to the pods.")


def _free_form(**extra: Any) -> dict[str, Any]:
    """A part of a pod that is passed on: its inside is checked by the API server when the pod is created."""
    return {"x-kubernetes-preserve-unknown-fields": True, **extra}


class ContainerOverlay(BaseModel):
    """What is laid over the container `main`."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True)

    name: str = Field(max_length=63, description="Must be main, the engine's container.")
    resources: dict[str, Any] | None = Field(
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
    """What is laid over the pod. A field that is not listed here is refused by name, never ignored."""

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
        default=(), max_length=16, description="How pods are spread.", json_schema_extra=_free_form()
    )
    image_pull_secrets: tuple[dict[str, Any], ...] = Field(
        default=(), max_length=16, description="Secrets for pulling the image.", json_schema_extra=_free_form()
    )
    volumes: tuple[dict[str, Any], ...] = Field(
        default=(), max_length=64, description="Further volumes; hostPath is refused.", json_schema_extra=_free_form()
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
    """What is laid over the pods that the operator renders."""

    metadata: TemplateMetadata = Field(default=TemplateMetadata(), description="Labels and annotations of the pods.")
    spec: PodOverlay = Field(
        default=PodOverlay(),
        description="Parts of the pod spec that are laid over the rendered one.",
        json_schema_extra=_free_form(),
    )


class Spec(Model):
    """The wanted state of an inference deployment."""

    model: ModelSource = Field(description="What is served.")
    runtime: Runtime = Field(default=Runtime(), description="Which engine runs, on what.")
    parallelism: Parallelism = Field(default=Parallelism(), description="How one replica is spread over devices.")
    engine: Engine = Field(default=Engine(), description="Where each engine parameter starts.")
    replicas: int = Field(
        default=1,
        ge=0,
        le=MAX_REPLICAS,
        description="Replica count; kubectl scale and autoscalers write it. Where scaling is set it cannot be changed, "
        "and says only where the count begins.",
    )
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Who goes first where the operator has a GPU budget: the higher, the sooner. Replicas of a lower "
        "one, above its scaling.minReplicas, make room.",
    )
    scaling: Scaling | None = Field(
        default=None,
        description="Automatic replica count, by what the objectives need; tuning.mode says whether it is only told.",
        json_schema_extra=schema(**{"x-kubernetes-validations": SCALING_RULES}),
    )
    objectives: Objectives | None = Field(
        default=None,
        description="What users are promised. Default: three times what an idle engine takes, for 95 percent.",
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
    tuning: Tuning = Field(default=Tuning(), description="Whether and how far the operator moves the live knobs.")
    metrics: Metrics = Field(default=Metrics(), description="Where the operator reads the engines' metrics.")
    rollout: Rollout = Field(default=Rollout(), description="How changes reach the replicas.")
    template: PodTemplate = Field(default=PodTemplate(), description="What is laid over the pods.")


def _spec(text: str) -> Spec:
    """A spec of JSON. Raises ValidationError."""
    return Spec.model_validate_json(text, strict=True, by_alias=True, by_name=False)


_spec_again = functools.lru_cache(maxsize=MAX_KEPT_SPECS)(_spec)
"""The same: nobody changes a spec, and one is read again for each status that is written beside it."""


@dataclass(frozen=True, slots=True)
class InferenceDeployment:
    """One resource, parsed. `image` is spec.runtime.image or the operator's default; None when there is neither.

    `restarted_at` is what its owner wrote into the annotation of that name: another text asks for new pods. `is_paused`
    says that nothing of it is to be changed. `allowed_privileges` are those that the installation allows pods.
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
    """What the revision of a downloaded model meant when it was read: a commit, the pin of objects, the digest of a
    manifest; None: not known, or of no such model."""
    weights_bytes: int | None = None
    """How large the model's weights are; None: not known yet."""
    allowed_privileges: frozenset[str] = NO_PRIVILEGES
    created_at: str = ""
    """As the API server wrote it."""

    @property
    def replicas(self) -> int:
        """What the user, or an autoscaler through /scale, asks for; not heard while `spec.scaling` is set."""
        return self.spec.replicas

    @classmethod
    def parse(
        cls,
        body: Mapping[str, Any],
        *,
        default_image: str | None = None,
        allowed_privileges: frozenset[str] = NO_PRIVILEGES,
    ) -> InferenceDeployment:
        """Read a resource as the API server gives it. Raises InvalidSpec with every field that is wrong."""
        metadata = body.get("metadata") or {}
        annotations = metadata.get("annotations") or {}
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

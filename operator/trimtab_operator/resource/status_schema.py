"""Typed schema of `status` for the CRD; `report/status.py` computes the values."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from trimtab_operator.resource.spec import Model, schema

ConditionType = Literal[
    "Ready", "Progressing", "LayoutValid", "MetricsAvailable", "TuningActive", "ScalingLimited", "Degraded"
]
Phase = Literal["Pending", "Loading", "Ready", "Updating", "Draining", "Failed"]


class ConditionStatus(Model):
    """One condition, by the Kubernetes API conventions."""

    type: str = Field(max_length=64, description="Name of the condition.")
    status: Literal["True", "False", "Unknown"] = Field(description="True, False or Unknown.")
    observed_generation: int = Field(ge=0, description="Generation of the spec that the condition refers to.")
    last_transition_time: str = Field(
        max_length=64, description="When status last changed.", json_schema_extra=schema(format="date-time")
    )
    reason: str = Field(
        max_length=128, description="Machine-readable reason; docs/reference/resource.md lists every one."
    )
    message: str = Field(max_length=32768, description="The reason as a sentence.")


class LoadStatus(Model):
    """Load progress of a replica."""

    stage: str = Field(max_length=32, description="download, starting, weights, profile, kv_cache, graphs or ready.")
    percent: int = Field(ge=0, le=100, description="Progress of loading; of a download, of its bytes.")
    message: str | None = Field(
        default=None,
        max_length=256,
        description="Progress of the download: sizes and remaining time; after the download, its size and duration.",
    )
    downloaded_bytes: int | None = Field(
        default=None, ge=0, description="Bytes of the model that the engine downloaded before loading."
    )


class GroupStatus(Model):
    """One replica."""

    name: str = Field(max_length=63, description="Name of the replica's StatefulSet.")
    ordinal: int = Field(ge=0, description="Number of the replica; new replicas get the lowest free number.")
    revision: str = Field(max_length=63, description="Hash of the pod template that the replica runs.")
    phase: Phase = Field(description="Pending, Loading, Ready, Updating, Draining or Failed.")
    ready: bool = Field(description="True if the replica serves requests.")
    load: LoadStatus | None = Field(default=None, description="Progress of loading.")
    config_generation: int | None = Field(
        default=None, ge=0, description="Generation of the live configuration that the engine runs."
    )
    message: str | None = Field(default=None, max_length=1024, description="Why the replica is not ready.")
    effective: dict[str, Any] | None = Field(
        default=None,
        description="Live values of this engine that differ from engine.effective.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class ReportedLayoutStatus(Model):
    """Layout that an engine reports."""

    world_size: int = Field(ge=1, description="Ranks of one replica.")
    tensor: int = Field(ge=1, description="Tensor parallel degree.")
    pipeline: int = Field(ge=1, description="Pipeline parallel degree.")
    data: int = Field(ge=1, description="Data parallel degree.")
    expert: bool = Field(description="True if experts are distributed over the ranks.")


class LayoutStatus(ReportedLayoutStatus):
    """Placement of the ranks."""

    pods_per_replica: int = Field(ge=1, description="Pods of one replica.")
    gpus_per_pod: int = Field(ge=0, description="Devices that one pod requests.")
    reported: ReportedLayoutStatus | None = Field(
        default=None, description="Layout that a ready replica reports; a differing one if there is any."
    )


class EngineStatus(Model):
    """Configured and effective engine parameters."""

    configured: dict[str, Any] = Field(
        default={},
        description="Start values and caps in the pod template.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    effective: dict[str, Any] = Field(
        default={},
        description="Values that all ready engines report.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class DecisionStatus(Model):
    """One decision of the tuner. The same id is in the Event, the log line and here."""

    id: str = Field(max_length=64, description="Identifies the decision in Events, logs and here.")
    time: str = Field(max_length=64, description="Time of the decision.", json_schema_extra=schema(format="date-time"))
    knob: str | None = Field(
        default=None,
        max_length=100,
        description="Changed parameter: an engine field, replicas, or a parameter of the spec that needs a restart.",
    )
    from_: str | None = Field(default=None, alias="from", max_length=64, description="Value before.")
    to: str | None = Field(default=None, max_length=64, description="Value after.")
    reason: str = Field(
        max_length=64, description="Machine-readable reason; docs/reference/resource.md lists every one."
    )
    message: str = Field(max_length=4096, description="The decision as a sentence with its numbers.")
    outcome: str | None = Field(
        default=None, max_length=4096, description="Measured outcome; absent until it is known."
    )


class TtftStatus(Model):
    """Objective for the time to the first token (TTFT)."""

    percentile: int = Field(ge=1, le=99, description="Percentage of requests that must meet the target.")
    target: str = Field(max_length=24, description="Maximum TTFT.")
    per_prompt_token: str | None = Field(
        default=None, max_length=24, description="Addition to the TTFT target per prompt token."
    )


class ItlStatus(Model):
    """Objective for the inter-token latency (ITL)."""

    percentile: int = Field(ge=1, le=99, description="Percentage of requests that must meet the target.")
    target: str = Field(max_length=24, description="Maximum ITL.")
    kind: str = Field(
        max_length=16, description="Mean: the mean ITL of a request. Tokens: each interval between two tokens."
    )


class ObjectivesStatus(Model):
    """Objectives that tuning uses."""

    source: str = Field(
        max_length=16,
        description="Spec: spec.objectives. Default: three times the measured latency of an idle engine.",
    )
    ttft: TtftStatus | None = Field(default=None, description="Objective for the time to the first token (TTFT).")
    itl: ItlStatus | None = Field(default=None, description="Objective for the inter-token latency (ITL).")


class ForecastStatus(Model):
    """State of the forecast of request arrivals."""

    state: str = Field(
        max_length=16,
        description="Learning: less than one period (day or week) was observed. Unproven: not, or not yet, better than "
        "the current load. InUse: used for scaling.",
    )
    since: str | None = Field(
        default=None,
        max_length=64,
        description="Time since which the forecast is in use.",
        json_schema_extra=schema(format="date-time"),
    )


class SchedulingPolicyStatus(Model):
    """The scheduling policy that engines report."""

    policy: str | None = Field(
        default=None, max_length=16, description="fcfs, priority or deadline; absent if no engine uses it."
    )
    source: str | None = Field(
        default=None,
        max_length=16,
        description="Spec: set by spec.engine.schedulingPolicy. Objectives: derived from spec.objectives.ttft.",
    )
    ttft_target: str | None = Field(default=None, max_length=24, description="TTFT target of the deadline policy.")
    per_prompt_token: str | None = Field(
        default=None, max_length=24, description="Addition to the TTFT target per prompt token."
    )
    message: str | None = Field(
        default=None,
        max_length=32768,
        description="Replicas that do not support the policy or have not applied it yet.",
    )


class RouterStatus(Model):
    """State of the router."""

    replicas: int = Field(ge=0, description="Desired router pods.")
    ready_replicas: int = Field(ge=0, description="Router pods that take requests.")
    selected: bool = Field(
        description="True if the client Service selects the router's pods; false if it selects the replicas directly."
    )
    message: str | None = Field(default=None, max_length=1024, description="Why there are no router pods.")


class TuningStatus(Model):
    """State and decisions of tuning."""

    mode: str = Field(max_length=16, description="Current mode.")
    source: str | None = Field(
        default=None,
        max_length=32,
        description="Source of the metrics: Prometheus, Pods, or both for different engines.",
    )
    objectives: ObjectivesStatus | None = Field(
        default=None, description="Current objectives; absent until defaults can be measured."
    )
    recommendation: DecisionStatus | None = Field(default=None, description="Current recommendation.")
    applied: dict[str, str] = Field(default={}, description="Values that tuning has set, by engine field.")
    scheduling_policy: SchedulingPolicyStatus | None = Field(
        default=None,
        description="Scheduling policy that the operator set; absent if it set none.",
    )
    forecast: ForecastStatus | None = Field(
        default=None, description="State of the forecast of request arrivals; only with spec.scaling.forecast."
    )
    history: tuple[DecisionStatus, ...] = Field(
        default=(),
        max_length=10,
        description="The latest decisions, newest first.",
        json_schema_extra=schema(**{"x-kubernetes-list-type": "atomic"}),
    )


class Status(Model):
    """Observed state. It changes only if the cluster or the engines changed."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this status refers to."
    )
    conditions: tuple[ConditionStatus, ...] = Field(
        default=(),
        max_length=16,
        description="Ready, Serving, Reconciling, Stalled, Progressing, LayoutValid, MetricsAvailable, TuningActive, "
        "ScalingLimited and Degraded.",
        json_schema_extra=schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    )
    phase: str | None = Field(
        default=None, max_length=64, description="Reason of the Ready condition, for kubectl's columns."
    )
    ready: str | None = Field(
        default=None, max_length=16, description="Ready and desired replicas, for kubectl's columns."
    )
    replicas: int | None = Field(default=None, ge=0, description="Replicas that exist.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Replicas that serve requests.")
    updated_replicas: int | None = Field(default=None, ge=0, description="Replicas that run the current template.")
    desired_replicas: int | None = Field(default=None, ge=0, description="Desired replicas, limited by the GPU budget.")
    wanted_replicas: int | None = Field(
        default=None,
        ge=0,
        description="Desired replicas without the GPU budget; only set if the budget allows fewer.",
    )
    last_scale_time: str | None = Field(
        default=None,
        max_length=64,
        description="When tuning last changed the replica count; only with spec.scaling.",
        json_schema_extra=schema(format="date-time"),
    )
    selector: str | None = Field(
        default=None, max_length=512, description="Selector of the leader pods, for autoscalers."
    )
    url: str | None = Field(default=None, max_length=512, description="Base URL of the OpenAI-compatible API.")
    model: str | None = Field(default=None, max_length=128, description="Name that clients send as `model`.")
    model_revision: str | None = Field(
        default=None,
        max_length=128,
        description="Pinned revision that all replicas serve: the commit of an hf:// model, the digest of names, sizes "
        "and ETags of an s3:// model's objects, or the digest of an oci:// model's manifest.",
    )
    layout: LayoutStatus | None = Field(default=None, description="Placement of the ranks.")
    engine: EngineStatus | None = Field(default=None, description="Engine parameters, configured and effective.")
    tuning: TuningStatus | None = Field(default=None, description="State and decisions of tuning.")
    router: RouterStatus | None = Field(default=None, description="State of the router; only with spec.router.")
    groups: tuple[GroupStatus, ...] = Field(
        default=(),
        max_length=1000,
        description="The replicas.",
        json_schema_extra=schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    )

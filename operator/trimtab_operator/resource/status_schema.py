"""The typed shape of `status`: what `status.py` fills and the CRD describes."""

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
    observed_generation: int = Field(ge=0, description="Generation of the spec that the condition speaks of.")
    last_transition_time: str = Field(
        max_length=64, description="When status last changed.", json_schema_extra=schema(format="date-time")
    )
    reason: str = Field(
        max_length=128, description="Machine-readable reason; docs/reference/resource.md lists every one."
    )
    message: str = Field(max_length=32768, description="The reason as a sentence.")


class LoadStatus(Model):
    """How far a replica has loaded."""

    stage: str = Field(max_length=32, description="download, starting, weights, profile, kv_cache, graphs or ready.")
    percent: int = Field(ge=0, le=100, description="Progress of loading; of a download, of its bytes.")
    message: str | None = Field(
        default=None,
        max_length=256,
        description="A download as a sentence: sizes and the time that is left; behind it, what came in what time.",
    )
    downloaded_bytes: int | None = Field(
        default=None, ge=0, description="What the engine fetched of its model before it began to load."
    )


class GroupStatus(Model):
    """One replica."""

    name: str = Field(max_length=63, description="Name of the replica's StatefulSet.")
    ordinal: int = Field(ge=0, description="Number of the replica; the lowest free one is taken first.")
    revision: str = Field(max_length=63, description="Hash of the pod template that the replica runs.")
    phase: Phase = Field(description="Pending, Loading, Ready, Updating, Draining or Failed.")
    ready: bool = Field(description="Whether the replica takes requests.")
    load: LoadStatus | None = Field(default=None, description="Progress of loading.")
    config_generation: int | None = Field(
        default=None, ge=0, description="Generation of the live configuration that the engine runs."
    )
    message: str | None = Field(default=None, max_length=1024, description="Why the replica is not ready.")
    effective: dict[str, Any] | None = Field(
        default=None,
        description="Live values of this engine, where they differ from engine.effective.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class ReportedLayoutStatus(Model):
    """What an engine says that it runs."""

    world_size: int = Field(ge=1, description="Ranks of one replica.")
    tensor: int = Field(ge=1, description="Tensor parallel degree.")
    pipeline: int = Field(ge=1, description="Pipeline parallel degree.")
    data: int = Field(ge=1, description="Data parallel degree.")
    expert: bool = Field(description="Whether experts are spread over the ranks.")


class LayoutStatus(ReportedLayoutStatus):
    """Where ranks run."""

    pods_per_replica: int = Field(ge=1, description="Pods of one replica.")
    gpus_per_pod: int = Field(ge=0, description="Devices that one pod asks for.")
    reported: ReportedLayoutStatus | None = Field(
        default=None, description="What a ready replica reports; one that differs, where there is one."
    )


class EngineStatus(Model):
    """Engine parameters as they were asked for and as they are."""

    configured: dict[str, Any] = Field(
        default={},
        description="What the pod template renders: start values and caps.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )
    effective: dict[str, Any] = Field(
        default={},
        description="What all ready engines report.",
        json_schema_extra={"x-kubernetes-preserve-unknown-fields": True},
    )


class DecisionStatus(Model):
    """One decision of the tuner. The same id is in the Event, the log line and here."""

    id: str = Field(max_length=64, description="Identifies the decision in Events, logs and here.")
    time: str = Field(max_length=64, description="When it was taken.", json_schema_extra=schema(format="date-time"))
    knob: str | None = Field(
        default=None,
        max_length=100,
        description="What moves: an engine field, replicas, or a parameter of the spec that needs new engines.",
    )
    from_: str | None = Field(default=None, alias="from", max_length=64, description="Value before.")
    to: str | None = Field(default=None, max_length=64, description="Value after.")
    reason: str = Field(
        max_length=64, description="Machine-readable reason; docs/reference/resource.md lists every one."
    )
    message: str = Field(max_length=4096, description="The decision as a sentence with its numbers.")
    outcome: str | None = Field(default=None, max_length=4096, description="What came of it, once that is known.")


class TtftStatus(Model):
    """A promise of the time to the first token."""

    percentile: int = Field(ge=1, le=99, description="Percentage of the requests that are to keep it.")
    target: str = Field(max_length=24, description="The latest time.")
    per_prompt_token: str | None = Field(
        default=None, max_length=24, description="Addition to the TTFT target per prompt token."
    )


class ItlStatus(Model):
    """A promise of the time between two tokens."""

    percentile: int = Field(ge=1, le=99, description="Percentage of the requests that are to keep it.")
    target: str = Field(max_length=24, description="The longest time.")
    kind: str = Field(max_length=16, description="Mean: a request's mean. Tokens: each time between two tokens.")


class ObjectivesStatus(Model):
    """The promises that tuning goes by."""

    source: str = Field(
        max_length=16, description="Spec: the owner's. Default: three times what an idle engine takes, as measured."
    )
    ttft: TtftStatus | None = Field(default=None, description="Time to the first token.")
    itl: ItlStatus | None = Field(default=None, description="Time between two tokens.")


class ForecastStatus(Model):
    """What becomes of the forecast of arrivals."""

    state: str = Field(
        max_length=16,
        description="Learning: less than a whole day, or week, was seen; Unproven: it is not better than the present "
        "load alone, or not known yet to be; InUse.",
    )
    since: str | None = Field(
        default=None, max_length=64, description="In use since then.", json_schema_extra=schema(format="date-time")
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
    ttft_target: str | None = Field(
        default=None, max_length=24, description="TTFT target of the deadline policy."
    )
    per_prompt_token: str | None = Field(
        default=None, max_length=24, description="Addition to the TTFT target per prompt token."
    )
    message: str | None = Field(
        default=None,
        max_length=32768,
        description="Replicas that do not support the policy or have not applied it yet.",
    )


class TuningStatus(Model):
    """What tuning found, set and did."""

    mode: str = Field(max_length=16, description="The mode in force.")
    source: str | None = Field(
        default=None, max_length=32, description="Where metrics are read: Prometheus, Pods, or of some engines each."
    )
    objectives: ObjectivesStatus | None = Field(
        default=None, description="The promises in force; absent until defaults can be told."
    )
    recommendation: DecisionStatus | None = Field(default=None, description="What would help now.")
    applied: dict[str, str] = Field(default={}, description="Values that tuning has set, by engine field.")
    scheduling_policy: SchedulingPolicyStatus | None = Field(
        default=None,
        description="Scheduling policy that the operator set; absent if it set none.",
    )
    forecast: ForecastStatus | None = Field(
        default=None, description="What becomes of the forecast of arrivals; only with spec.scaling.forecast."
    )
    history: tuple[DecisionStatus, ...] = Field(
        default=(),
        max_length=10,
        description="The latest decisions, newest first.",
        json_schema_extra=schema(**{"x-kubernetes-list-type": "atomic"}),
    )


class Status(Model):
    """The observed state. Nothing here changes when nothing changed."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the spec that this status speaks of."
    )
    conditions: tuple[ConditionStatus, ...] = Field(
        default=(),
        max_length=16,
        description="Ready, Serving, Reconciling, Stalled, Progressing, LayoutValid, MetricsAvailable, TuningActive, "
        "ScalingLimited and Degraded.",
        json_schema_extra=schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}),
    )
    phase: str | None = Field(default=None, max_length=64, description="The Ready condition's reason, for printing.")
    ready: str | None = Field(default=None, max_length=16, description="Ready replicas of wanted ones, for printing.")
    replicas: int | None = Field(default=None, ge=0, description="Replicas that exist.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Replicas that take requests.")
    updated_replicas: int | None = Field(default=None, ge=0, description="Replicas that run the current template.")
    desired_replicas: int | None = Field(
        default=None, ge=0, description="Replicas that are wanted, as far as a GPU budget allows."
    )
    wanted_replicas: int | None = Field(
        default=None,
        ge=0,
        description="Replicas that would be wanted without a GPU budget; only where that allows fewer.",
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
        description="What all replicas serve, whatever its branch, bucket or tag has become since: the commit of an "
        "hf:// model, the digest of names, sizes and ETags of an s3:// model's objects, or of an oci:// model's "
        "manifest.",
    )
    layout: LayoutStatus | None = Field(default=None, description="Where ranks run.")
    engine: EngineStatus | None = Field(default=None, description="Engine parameters, configured and effective.")
    tuning: TuningStatus | None = Field(default=None, description="What tuning found, set and did.")
    groups: tuple[GroupStatus, ...] = Field(
        default=(),
        max_length=1000,
        description="The replicas.",
        json_schema_extra=schema(**{"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    )

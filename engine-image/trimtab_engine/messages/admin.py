"""Admin calls to an engine core, their replies, and the engine state that API servers follow."""

from typing import Any, Literal

import msgspec

from trimtab_engine.config.engine import LogLevel

PauseMode = Literal["abort", "wait", "keep"]
"""Effect of a pause on requests: end them, let them finish, or freeze them. vLLM's names."""
SLEEP_LEVELS = (0, 1, 2)
WAKE_TAGS = ("weights", "kv_cache", "scheduling")


class GetConfig(msgspec.Struct, tag="config_get"):
    """The configuration in force."""


class PatchConfig(msgspec.Struct, tag="config_patch"):
    """Change live fields. `values` is unvalidated client input, which the core validates. With `if_match` only the
    configuration of that generation is changed; a dry run changes nothing.
    """

    values: Any
    if_match: int | None = None
    dry_run: bool = False


class PreparePatch(msgspec.Struct, tag="prepare_patch"):
    """Validate a PatchConfig and map the memory that it needs, without changing anything that steps use. The
    PatchConfig or AbandonPatch follows.
    """

    values: Any
    if_match: int | None = None


class AbandonPatch(msgspec.Struct, tag="abandon_patch"):
    """Unmap the memory of PreparePatch, because another core could not prepare."""


class AdoptConfig(msgspec.Struct, tag="adopt"):
    """Configuration with which a joining core begins to serve."""

    values: dict[str, Any]
    generation: int


class Retire(msgspec.Struct, tag="retire"):
    """Accept no new request, and end when running requests have finished."""


class GetMemory(msgspec.Struct, tag="memory"):
    """The ledger of every rank."""


class PlanMemory(msgspec.Struct, tag="memory_plan"):
    """Request the memory plan of other values. `values` is unvalidated client input."""

    values: Any


class GetLayout(msgspec.Struct, tag="layout"):
    """Request the location and the shard of every rank."""


class GetRequests(msgspec.Struct, tag="requests"):
    """Request the numbers of waiting and running requests."""


class DrainCore(msgspec.Struct, tag="drain"):
    """Let running requests finish until the deadline, counted from now."""

    deadline_seconds: float


class Pause(msgspec.Struct, tag="pause"):
    """Stop working."""

    mode: PauseMode


class Resume(msgspec.Struct, tag="resume"):
    """Work again."""


class Sleep(msgspec.Struct, tag="sleep"):
    """Pause, then release memory. `level` is one of SLEEP_LEVELS."""

    level: int
    mode: PauseMode


class WakeUp(msgspec.Struct, tag="wake_up"):
    """Restore the memory released by sleep. `tags` are of WAKE_TAGS."""

    tags: list[str]


class GetLifecycle(msgspec.Struct, tag="lifecycle"):
    """Request the pause and sleep state."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forget all cached blocks; with `reset_running_requests` running requests are preempted for it."""

    reset_running_requests: bool


class LoadLora(msgspec.Struct, tag="load_lora"):
    """Serve another adapter from this folder on every rank's node. Has no effect if a rank cannot read it."""

    name: str
    folder: str


class UnloadLora(msgspec.Struct, tag="unload_lora"):
    """Make an adapter unavailable to new requests."""

    name: str


class StartProfile(msgspec.Struct, tag="start_profile"):
    """Begin to record steps."""


class StopProfile(msgspec.Struct, tag="stop_profile"):
    """End recording and write the trace."""


LifecycleCall = Pause | Resume | Sleep | WakeUp | GetLifecycle
ProfileCall = StartProfile | StopProfile
Call = (
    GetConfig
    | PatchConfig
    | PreparePatch
    | AbandonPatch
    | AdoptConfig
    | Retire
    | GetMemory
    | PlanMemory
    | GetLayout
    | GetRequests
    | DrainCore
    | LifecycleCall
    | ResetPrefixCache
    | LoadLora
    | UnloadLora
    | ProfileCall
)


class AdminCall(msgspec.Struct, tag="admin"):
    """An admin call, answered between two steps by one AdminReply with the same id."""

    call_id: str
    call: Call
    client_index: int = 0


class AdapterCard(msgspec.Struct, array_like=True, frozen=True):
    """Description of an available adapter."""

    name: str
    folder: str
    parent: str | None = None
    """Name of the parent model to report. None means the first served name."""


class EngineState(msgspec.Struct, tag="engine_state", frozen=True, kw_only=True):
    """Engine state that every API server follows. Sent to all of them when anything but `time` changes, and about once
    a second as a heartbeat.
    """

    time: float = 0.0
    """Time of the core's last inbox read: counts do not include requests sent later."""
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_late: int = 0
    """The part of num_waiting in the late line (`deadline`), which does not delay new requests."""
    max_num_seqs: int = 0
    max_num_queued_reqs: int = 0
    max_num_queued_tokens: int = 0
    disable_log_stats: bool = False
    stats_interval_seconds: float = 10.0
    log_level: LogLevel = "info"
    pause_mode: PauseMode | None = None
    """None if not paused."""
    sleep_level: int | None = None
    """None if awake."""
    longest_step_seconds: float = 0.0
    """Longest step so far, rounded up to seconds: a core counts as hung only after several of these."""
    adapters: tuple[AdapterCard, ...] = ()
    """Adapters available to requests."""
    reports_state: bool = False
    """True if a router listens: requests then need their prefix keys."""


class AdminReply(msgspec.Struct, tag="admin_reply"):
    """Answer to one AdminCall: HTTP status and JSON body as docs/reference/contract.md section 2 has them."""

    call_id: str
    status: int
    body: dict[str, Any]

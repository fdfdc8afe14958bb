"""Table of the live fields: kind, allowed values, and reasons for the bounds.

A field's own bounds hold for any other values (caps of the envelope); joint bounds compare it with another live value
and are checked on the merged result of a PATCH.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any, get_args

from trimtab_engine.config.engine import (
    MAX_BATCHED_TOKENS,
    MAX_QUEUE_LIMIT,
    MAX_STATS_INTERVAL_SECONDS,
    MAX_TTFT_TARGET,
    MAX_WATERMARK,
    MIN_STATS_INTERVAL_SECONDS,
    MIN_TTFT_TARGET,
    LogLevel,
)
from trimtab_engine.config.live.reading import Bound, Bounds, Kind, Number, Value
from trimtab_engine.config.live.values import Envelope, LiveValues
from trimtab_engine.scheduling.policy import PreemptionMode, QueueOrder

Joint = Callable[[LiveValues], Bound]


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A live field, named as its attribute of LiveValues. Choices have `choices`, numbers `own` bounds."""

    name: str
    kind: Kind
    own: Callable[[Envelope], Bounds] | None = None
    at_least: Joint | None = None
    at_most: Joint | None = None
    choices: Callable[[Envelope], tuple[str, ...]] = lambda _: ()
    missing: str = ""
    """Advice for a choice that is missing at start."""
    conflict: Callable[[LiveValues], str] = lambda _: ""
    """Return why a choice conflicts with the other values, with advice. Empty if it does not."""
    aliases: tuple[str, ...] = ()
    is_live: Callable[[Envelope], bool] = lambda _: True
    is_drained: bool = False
    """True if running requests finish under the old value (class drain)."""
    kept_as_decimal: bool = False
    """Kept as the decimal text that was written, shown as a number."""

    @property
    def is_number(self) -> bool:
        return self.own is not None

    def shown(self, values: LiveValues) -> Value:
        """Return the value as answers have it."""
        value: Value = getattr(values, self.name)
        return float(value) if self.kept_as_decimal else value

    def with_value(self, values: LiveValues, value: Value) -> LiveValues:
        # repr keeps the written decimal: 0.29 stays 0.29
        kept: Any = format(Decimal(repr(value)), "f") if self.kept_as_decimal else value
        return replace(values, **{self.name: kept})

    def own_bounds(self, envelope: Envelope) -> Bounds:
        """Return the minimum and maximum for any other values."""
        assert self.own is not None
        return self.own(envelope)

    def bounds(self, envelope: Envelope, values: LiveValues) -> Bounds:
        """Return the minimum and maximum given the other values."""
        low, high = self.own_bounds(envelope)
        if self.at_least is not None:
            low = max(low, self.at_least(values), key=lambda bound: bound.value)
        if self.at_most is not None:
            high = min(high, self.at_most(values), key=lambda bound: bound.value)
        return low, high

    def described(self, envelope: Envelope, values: LiveValues) -> dict[str, object]:
        """This field in GET /admin/v1/config."""
        if self.is_number:
            low, high = self.bounds(envelope, values)
            return {"class": "drain" if self.is_drained else "live", "min": low.value, "max": high.value}
        allowed = [False, True] if self.kind == "switch" else list(self.choices(envelope))
        return {"class": "live", "min": None, "max": None, "values": allowed}


# --- the table ----------------------------------------------------------------------------------------------------


def _between(low: Number, high: Number) -> Callable[[Envelope], Bounds]:
    """Bounds that no start changes."""
    bounds = Bound(low, f"it must be {low:g} or more"), Bound(high, f"it must be {high:.10g} or less")
    return lambda _: bounds


def _cap(value: Number, flag: str) -> Bound:
    return Bound(value, f"the cap is {value} ({flag}, fixed at start)")


def _slot_bounds(envelope: Envelope) -> Bounds:
    return Bound(1, "it must be 1 or more"), _cap(envelope.max_num_seqs_cap, "--max-num-seqs-cap")


def _at_most_token_budget(values: LiveValues) -> Bound:
    budget = values.max_num_batched_tokens
    return Bound(budget, f"it must not exceed max_num_batched_tokens, {budget}; raise that as well")


def _token_budget_bounds(envelope: Envelope) -> Bounds:
    low = Bound(1, "it must be 1 or more")
    if not envelope.enable_chunked_prefill:
        longest = envelope.max_model_len
        low = Bound(longest, f"without chunked prefill it must be at least max_model_len, {longest}")
    return low, _cap(envelope.max_num_batched_tokens_cap, "--max-num-batched-tokens-cap")


def _at_least_max_num_seqs(values: LiveValues) -> Bound:
    return Bound(values.max_num_seqs, f"it must be at least max_num_seqs, {values.max_num_seqs}; lower that as well")


def _deadline_target_bound(values: LiveValues) -> Bound:
    if values.scheduling_policy != "deadline":
        return Bound(0, "it must be 0 or more")
    reason = f"with scheduling_policy deadline it must be {MIN_TTFT_TARGET:g} or more; set that to fcfs as well"
    return Bound(MIN_TTFT_TARGET, reason)


def _missing_deadline_target(values: LiveValues) -> str:
    if values.scheduling_policy != "deadline" or values.ttft_target >= MIN_TTFT_TARGET:
        return ""
    return (
        f"ttft_target is {values.ttft_target:g}; set it as well, to the TTFT target in seconds, "
        f"{MIN_TTFT_TARGET:g} or more"
    )


def _utilization(envelope: Envelope) -> Bounds:
    least, cap = envelope.min_utilization, envelope.gpu_memory_utilization_cap
    assert least is not None  # else the engine could not have started
    low = Bound(float(least), f"one request of max_model_len {envelope.max_model_len} needs {least} or more")
    return low, _cap(float(cap), "--gpu-memory-utilization-cap")


def _swap_space(envelope: Envelope) -> Bounds:
    return Bound(0, "it must be 0 or more"), _cap(envelope.swap_space_bytes_cap, "--swap-space-cap")


def _host_cache(envelope: Envelope) -> Bounds:
    return Bound(0, "it must be 0 or more"), _cap(envelope.kv_offload_bytes_cap, "--kv-offload-size-cap")


def _depth(envelope: Envelope) -> Bounds:
    return Bound(0, "it must be 0 or more"), _cap(
        envelope.num_speculative_tokens_cap, "num_speculative_tokens of --speculative-config"
    )


def _cores(envelope: Envelope) -> Bounds:
    return Bound(1, "it must be 1 or more"), _cap(envelope.data_parallel_size_cap, "--data-parallel-size-cap")


def _preemption_modes(envelope: Envelope) -> tuple[str, ...]:
    """Return the possible modes. Without swap space in the envelope nothing can be swapped."""
    return get_args(PreemptionMode) if envelope.swap_space_bytes_cap else ("recompute",)


FIELDS: tuple[Field, ...] = (
    Field(
        name="max_num_seqs",
        kind="integer",
        own=_slot_bounds,
        at_most=_at_most_token_budget,
        aliases=("max_num_active_seqs",),
    ),
    Field(name="max_num_batched_tokens", kind="integer", own=_token_budget_bounds, at_least=_at_least_max_num_seqs),
    Field(
        name="gpu_memory_utilization",
        kind="number",
        own=_utilization,
        is_live=lambda envelope: envelope.kv_fixed_by is None,
        kept_as_decimal=True,
    ),
    Field(name="long_prefill_token_threshold", kind="integer", own=_between(0, MAX_BATCHED_TOKENS)),
    Field(name="watermark", kind="number", own=_between(0, MAX_WATERMARK)),
    Field(
        name="scheduling_policy",
        kind="choice",
        choices=lambda _: get_args(QueueOrder),
        conflict=_missing_deadline_target,
    ),
    Field(name="ttft_target", kind="number", own=_between(0, MAX_TTFT_TARGET), at_least=_deadline_target_bound),
    Field(name="ttft_target_per_prompt_token", kind="number", own=_between(0, MAX_TTFT_TARGET)),
    Field(name="preemption_mode", kind="choice", choices=_preemption_modes, missing="--swap-space-cap"),
    Field(name="swap_space_bytes", kind="bytes", own=_swap_space),
    Field(name="kv_offload_bytes", kind="bytes", own=_host_cache),
    Field(name="max_num_queued_reqs", kind="integer", own=_between(0, MAX_QUEUE_LIMIT)),
    Field(name="max_num_queued_tokens", kind="integer", own=_between(0, MAX_QUEUE_LIMIT)),
    Field(name="num_speculative_tokens", kind="integer", own=_depth),
    Field(
        name="data_parallel_size",
        kind="integer",
        own=_cores,
        is_live=lambda envelope: envelope.fixed_core_count is None,
        is_drained=True,
    ),
    Field(name="enable_prefix_caching", kind="switch"),
    Field(name="disable_log_stats", kind="switch"),
    Field(
        name="stats_interval_seconds",
        kind="number",
        own=_between(MIN_STATS_INTERVAL_SECONDS, MAX_STATS_INTERVAL_SECONDS),
    ),
    Field(name="log_level", kind="choice", choices=lambda _: get_args(LogLevel)),
)
BY_NAME = {name: field for field in FIELDS for name in (field.name, *field.aliases)}

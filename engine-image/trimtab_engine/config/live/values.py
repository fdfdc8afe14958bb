"""Envelope fixed at start-up, and live values that may change while the engine serves.

A new live field is an attribute of LiveValues, a row in fields.py, and a line where it takes effect.
"""

from dataclasses import dataclass
from typing import Literal

from trimtab_engine.config.engine import LogLevel
from trimtab_engine.config.live.reading import Json
from trimtab_engine.scheduling.policy import PreemptionMode, QueueOrder, SchedulingPolicy

FACTS = ("num_blocks_cap", "kv_fixed_by", "kv_memory")
"""Fields of the envelope that no flag sets."""


@dataclass(frozen=True, slots=True)
class FixedCoreCount:
    """Reason why engine cores cannot join or retire while the engine serves. `reason` may use {asked}, the requested
    size, and, if every rank keeps its number of expert slots, the {places} that there would be and the {redundant}
    experts required.
    """

    size: int
    reason: str
    num_experts: int = 0
    places_per_core: int = 0

    def why(self, asked: int) -> str:
        redundant = self.places_per_core * asked - self.num_experts
        return self.reason.format(asked=asked, redundant=redundant, places=self.places_per_core * asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Values fixed at start-up. Live values stay within it; changing it requires a restart."""

    max_num_seqs_cap: int
    max_num_batched_tokens_cap: int
    gpu_memory_utilization_cap: str
    max_model_len: int
    block_size: int
    enable_chunked_prefill: bool
    min_utilization: str | None
    """Utilization required by one request of max_model_len (memory/formula.py), as a decimal; set unless `kv_fixed_by`
    is.
    """
    num_blocks_cap: int
    swap_space_bytes_cap: int = 0
    kv_offload_bytes_cap: int = 0
    num_speculative_tokens_cap: int = 0
    data_parallel_size_cap: int = 1
    fixed_core_count: FixedCoreCount | None = None
    """Reason why data_parallel_size can only be changed by a restart. None if cores may join and retire."""
    kv_fixed_by: str | None = None
    """The flag that fixes the KV cache and makes gpu_memory_utilization not live. None without one."""
    kv_memory: Literal["mapped", "allocated"] = "mapped"
    """allocated: the cap's memory is taken from the start, and a lower utilisation gives none of it back."""
    restart_fields: tuple[tuple[str, object], ...] = ()
    """Further fields that only a restart changes, with their values, such as ("model", "/models/m")."""

    def to_json(self) -> Json:
        body: Json = {
            "max_num_seqs_cap": self.max_num_seqs_cap,
            "max_num_batched_tokens_cap": self.max_num_batched_tokens_cap,
            "gpu_memory_utilization_cap": float(self.gpu_memory_utilization_cap),
            "swap_space_bytes_cap": self.swap_space_bytes_cap,
            "kv_offload_bytes_cap": self.kv_offload_bytes_cap,
            "num_speculative_tokens_cap": self.num_speculative_tokens_cap,
            "data_parallel_size_cap": self.data_parallel_size_cap,
            "max_model_len": self.max_model_len,
            "block_size": self.block_size,
            "enable_chunked_prefill": self.enable_chunked_prefill,
            "num_blocks_cap": self.num_blocks_cap,
            "kv_fixed_by": self.kv_fixed_by,
            "kv_memory": self.kv_memory,
        }
        if self.fixed_core_count is not None:
            body["data_parallel_size"] = self.fixed_core_count.size
        return body | dict(self.restart_fields)

    @property
    def restart_names(self) -> list[str]:
        """Every field that only a restart changes."""
        names = [name for name in self.to_json() if name not in FACTS]
        return [*names, "gpu_memory_utilization"] if self.kv_fixed_by else names


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveValues:
    """The values in force. The utilisation is the decimal that was written, so that no binary rounding moves a byte."""

    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: str
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    scheduling_policy: QueueOrder = "fcfs"
    ttft_target: float = 0.0
    ttft_target_per_prompt_token: float = 0.0
    preemption_mode: PreemptionMode = "recompute"
    swap_space_bytes: int = 0
    kv_offload_bytes: int = 0
    max_num_queued_reqs: int = 0
    """0: no limit; likewise for the tokens."""
    max_num_queued_tokens: int = 0
    num_speculative_tokens: int = 0
    data_parallel_size: int = 1
    """Desired number of engine cores. The first process starts and retires them (engine_client/scaling.py)."""
    enable_prefix_caching: bool = True
    disable_log_stats: bool = False
    stats_interval_seconds: float = 10.0
    log_level: LogLevel = "info"

    def policy(self) -> SchedulingPolicy:
        """Return the part that the scheduler takes."""
        return SchedulingPolicy(
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            long_prefill_token_threshold=self.long_prefill_token_threshold,
            watermark=self.watermark,
            scheduling_policy=self.scheduling_policy,
            ttft_target=self.ttft_target,
            ttft_target_per_prompt_token=self.ttft_target_per_prompt_token,
            preemption_mode=self.preemption_mode,
            enable_prefix_caching=self.enable_prefix_caching,
            num_speculative_tokens=self.num_speculative_tokens,
        )

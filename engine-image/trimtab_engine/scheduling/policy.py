"""Scheduling parameters as one immutable value, replaced as a whole between two steps (docs/reference/contract.md
section 2).
"""

from dataclasses import dataclass
from typing import Literal

QueueOrder = Literal["fcfs", "priority", "deadline"]
PreemptionMode = Literal["recompute", "swap", "auto"]
LATEST_START = 0.75  # of a request's allowance, before any step has shown how long computing its prompt takes
EARLIEST_LATE = 0.5  # share of the TTFT allowance: no request is late earlier, however long a step took


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """Live values that the scheduler reads, with vLLM's names.

    Raises:
        ValueError: If values contradict each other.
    """

    max_num_seqs: int
    """Maximum number of running requests. After lowering it, running requests continue and nothing is admitted until
    enough have finished.
    """
    max_num_batched_tokens: int
    """Tokens of one step, over all requests."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one request's prefill in a step while others could use them too; 0: no limit, and none without
    chunked prefill."""
    watermark: float = 0.0
    """Fraction of KV blocks that admission leaves free while requests run, so that they can grow."""
    scheduling_policy: QueueOrder = "fcfs"
    """Queue order. fcfs: by arrival. priority: lowest request priority number first, then by arrival. deadline: by
    arrival, with requests that can no longer meet their TTFT target after all others.
    """
    ttft_target: float = 0.0
    """TTFT target in seconds, used by the deadline policy only."""
    ttft_target_per_prompt_token: float = 0.0
    """Seconds that each token of its prompt adds."""
    preemption_mode: PreemptionMode = "recompute"
    """Handling of a preempted request's KV cache: recompute, swap to host memory, or the cheaper of both."""
    enable_prefix_caching: bool = True
    """True if requests share the blocks of equal prefixes."""
    num_speculative_tokens: int = 0
    """Draft tokens per request and step, at most; 0: no speculation."""

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1 or self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} must be at least "
                f"max_num_seqs {self.max_num_seqs}, and that at least 1"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark is {self.watermark}; it must be 0 or more and below 1")
        if self.long_prefill_token_threshold < 0 or self.num_speculative_tokens < 0:
            raise ValueError("long_prefill_token_threshold and num_speculative_tokens must be 0 or more")
        if self.ttft_target < 0 or self.ttft_target_per_prompt_token < 0:
            raise ValueError("ttft_target and ttft_target_per_prompt_token must be 0 or more")
        if self.scheduling_policy == "deadline" and not self.ttft_target:
            raise ValueError("scheduling_policy is deadline, but ttft_target is 0; set ttft_target as well")

    def is_too_late(self, waited: float, num_prompt_tokens: int, prompt_seconds: float) -> bool:
        """Return True if a request that has waited `waited` seconds can no longer meet its TTFT target.
        `prompt_seconds` is the time to compute its prompt; 0 if unknown.
        """
        allowance = self.ttft_target + self.ttft_target_per_prompt_token * num_prompt_tokens
        if not prompt_seconds:
            return waited > LATEST_START * allowance
        return waited > max(EARLIEST_LATE * allowance, allowance - prompt_seconds)

"""What steers the scheduler. A value: it is replaced as a whole between two steps (docs/reference/contract.md
section 2)."""

from dataclasses import dataclass
from typing import Literal

QueueOrder = Literal["fcfs", "priority", "deadline"]
PreemptionMode = Literal["recompute", "swap", "auto"]
LATEST_START = 0.75  # of a request's allowance, before any step has shown how long computing its prompt takes
EARLIEST_LATE = 0.5  # of an allowance: nobody is late before that, however long a step has taken


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """The live values that the scheduler reads, with vLLM's names. Raises ValueError when they contradict."""

    max_num_seqs: int
    """Requests that run at once. Lowering it drains down: what runs goes on, nothing is admitted."""
    max_num_batched_tokens: int
    """Tokens of one step, over all requests."""
    long_prefill_token_threshold: int = 0
    """Most tokens of one request's prefill in a step while others could use them too; 0: no limit, and none without
    chunked prefill."""
    watermark: float = 0.0
    """Part of the KV blocks that admission leaves free while something runs, so that what runs has room to grow."""
    scheduling_policy: QueueOrder = "fcfs"
    """fcfs: by arrival. priority: by the request's priority, the lowest number first, then by arrival. deadline: by
    arrival, and behind all others those who cannot have their first token in time any more."""
    ttft_target: float = 0.0
    """Under deadline: seconds within which a request shall have its first token; elsewhere without effect."""
    ttft_target_per_prompt_token: float = 0.0
    """Seconds that each token of its prompt adds."""
    preemption_mode: PreemptionMode = "recompute"
    """What becomes of a preempted request's KV cache: computed again, moved to host memory, or the cheaper of both."""
    enable_prefix_caching: bool = True
    """Whether requests share the blocks of equal beginnings."""
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
        """Whether the first token of a request that has waited for so many seconds cannot come in time any more:
        computing its prompt takes `prompt_seconds`; 0: that is not known yet."""
        allowance = self.ttft_target + self.ttft_target_per_prompt_token * num_prompt_tokens
        if not prompt_seconds:
            return waited > LATEST_START * allowance
        return waited > max(EARLIEST_LATE * allowance, allowance - prompt_seconds)

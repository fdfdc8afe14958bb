"""Scheduler counters and the names of their reasons. No decision reads these numbers."""

from dataclasses import dataclass, field
from enum import StrEnum

from trimtab_engine.scheduling.batch import Preempted, ScheduledSequence


class PreemptionReason(StrEnum):
    CAPACITY = "capacity"  # a running request needed blocks
    RESIZE = "resize"  # the KV cache was shrunk below the blocks in use
    RESET = "reset"  # everything had to leave the device: sleep, or a reset of the prefix cache


class BlockedReason(StrEnum):
    """Reason why the head of the queue was not admitted."""

    KV = "kv"  # its tokens do not fit into the free blocks, or this step had to preempt
    SEQS = "seqs"  # max_num_seqs requests run already
    TOKENS = "tokens"  # the step's token budget is spent
    ENCODER = "encoder"  # its next image or video finds no room in the encoder's budget or cache
    ADAPTERS = "adapters"  # as many adapters as a step may have are in use, and its own is none of them


@dataclass(slots=True)
class SchedulerStats:
    """Counts since the last take_stats(). Keys are the reasons' values."""

    preempted: dict[str, dict[str, int]] = field(default_factory=dict)
    """Requests by mode, recompute or swap, and PreemptionReason."""
    recomputed_tokens: int = 0
    preempt_stall_seconds: list[float] = field(default_factory=list)
    """One entry per resumed request: the seconds it was off the device."""
    blocked_seconds: dict[str, float] = field(default_factory=dict)
    """Seconds that the head of the queue waited, by BlockedReason."""
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that finished prefill."""
    num_cached_prompt_tokens: int = 0
    """Prompt tokens found in the prefix cache, on the device or in the host cache."""
    num_host_cached_prompt_tokens: int = 0
    """The part of num_cached_prompt_tokens found in the host cache."""
    num_generation_tokens: int = 0
    num_arrived: int = 0
    """Requests that were queued for the first time."""
    num_arrived_prompt_tokens: int = 0
    num_late: int = 0
    """Requests found to miss their TTFT target (policy `deadline`)."""
    prefix_cache_queries: int = 0
    """Tokens looked up for new requests; resumed requests do not count."""
    prefix_cache_hits: int = 0
    """Looked-up tokens found on the device."""
    host_cache_queries: int = 0
    """Tokens of new requests that were looked up and not found on the device, while there is a host cache."""
    host_cache_hits: int = 0
    """Looked-up tokens found in the host cache."""
    num_encoded_items: int = 0
    """Images and videos that steps computed."""
    num_encoded_tokens: int = 0

    def note_arrived(self, num_prompt_tokens: int) -> None:
        self.num_arrived += 1
        self.num_arrived_prompt_tokens += num_prompt_tokens

    def note_preempted(self, preempted: Preempted) -> None:
        by_reason = self.preempted.setdefault(preempted.mode, {})
        by_reason[preempted.reason] = by_reason.get(preempted.reason, 0) + 1

    def note_blocked(self, reason: BlockedReason, seconds: float) -> None:
        self.blocked_seconds[reason.value] = self.blocked_seconds.get(reason.value, 0.0) + seconds

    def note_prefill(self, sequence: ScheduledSequence) -> None:
        """Count a chunk of prefill that was just scheduled: what of it was computed before, and whether it ends."""
        request, start = sequence.request, sequence.start
        if start < request.num_ever_computed_tokens:
            self.recomputed_tokens += min(start + sequence.num_tokens, request.num_ever_computed_tokens) - start
        if (sequence.samples and request.num_output_tokens == 0) or sequence.ends_pooling:
            self.num_prompt_tokens += request.num_prompt_tokens
            self.num_cached_prompt_tokens += request.num_cached_tokens
            self.num_host_cached_prompt_tokens += request.num_host_cached_tokens

"""State of requests and replicas on which a router chooses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class RoutedRequest:
    """One request in the terms of routing."""

    prompt_tokens: int
    """Prompt length; an estimate from bytes in the router, exact in the simulator."""
    keys: tuple[int, ...] = ()
    """Prefix keys in order; key i identifies the first i + 1 cuts of the prompt (protocol/prefix_keys.py)."""
    tokens_per_key: float = 0.0
    """Tokens of one cut: 512 bytes in tokens of this model."""
    max_tokens: int | None = None
    """Most tokens of the answer; None if the client set no limit."""
    adapter: str | None = None
    tenant: str = ""
    priority: int = 0
    """Priority band; 0 is served first."""
    session: str | None = None
    """Value of the session header; it only breaks ties."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """Fitted step time in seconds: base + per_token * tokens + per_sequence * running + per_context * context."""

    base: float
    per_token: float
    per_sequence: float
    per_context: float

    def seconds(self, tokens: float, running: float, context: float) -> float:
        """Return the time of a step that computes `tokens` for `running` requests over `context` tokens of KV."""
        return self.base + self.per_token * tokens + self.per_sequence * running + self.per_context * context


@dataclass(slots=True)
class ReplicaState:
    """State of one replica: its last report plus what this router sent since (the credit).

    The report is exact at `reported_at`. `pending_*` are this router's dispatches that the report does not include
    yet; a router without a state stream counts every unfinished request of its own there.
    """

    replica: str
    """Unique name: the pod's name, or host:port."""
    index: int
    """Bit of this replica in the prefix index."""
    reported_at: float | None = None
    """Monotonic seconds of the last report; None if there was none."""
    running: int = 0
    waiting: int = 0
    prefill_tokens: float = 0.0
    """Uncached prompt tokens still to be computed, of waiting requests and of those in prefill."""
    context_tokens: int = 0
    """KV tokens of running requests."""
    kv_used_tokens: int = 0
    """KV tokens that cannot be evicted."""
    kv_total_tokens: int = 0
    token_budget: int = 0
    """max_num_batched_tokens in force."""
    slots: int = 0
    """max_num_seqs in force."""
    step_time: StepTime | None = None
    """None until the engine has measured enough steps."""
    prefill_share: float = 0.0
    """Mean share of step time spent on prefill, 0 to 1."""
    step_ends_at: float | None = None
    """Monotonic seconds at which the running step is expected to end."""
    draining: bool = False
    """No new requests: the replica is about to be removed, paused or asleep."""
    adapters: frozenset[str] = frozenset()
    """Adapters in device slots."""
    pending_requests: int = 0
    pending_prefill_tokens: float = 0.0
    pending_context_tokens: float = 0.0


class Candidate(NamedTuple):
    """One replica with its score, in seconds."""

    replica: str
    score: float
    """What the choice minimizes: predicted time to first token plus what the request costs others."""
    predicted_ttft: float
    cached_tokens: int
    """Prompt tokens that are predicted to be in the replica's prefix cache."""
    queue_seconds: float
    """Predicted wait before the request's first prompt token is computed."""
    step_seconds: float
    """Predicted length of one of the replica's steps."""


class Choice(NamedTuple):
    """The chosen replica and the next best one, which explains the choice."""

    best: Candidate
    runner_up: Candidate | None
    rule: str
    """Which rule decided: predicted-ttft, uncached-work (no step time is known yet) or least-request."""
    has_room: bool = True
    """True if the predicted queue of some replica is at most one full step: holding the request would gain nothing."""

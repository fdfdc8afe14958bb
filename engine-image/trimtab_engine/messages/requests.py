"""Messages about requests between API servers and engine cores: new requests, aborts, step outputs and statistics.

Times are CLOCK_MONOTONIC seconds of the API servers' host (engine_client/nodes/member.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from trimtab_engine.messages.state_stream import CoreReport, Dispatch, PrefixCuts
from trimtab_engine.multimodal.items import Span
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import PackedLogprobs, Sampling, TokenLogprobs


class AddRequest(msgspec.Struct, tag="add"):
    """A new sequence. `request_id` is unique among live requests; `arrival_time` is the arrival of the HTTP request."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrival_time: float
    priority: int = 0
    may_queue: bool = True
    """False: a core that cannot run the request in its next step rejects it with finish_reason REFUSED, so that another
    core can run it.
    """
    data_parallel_rank: int | None = None
    """The core that must run it. None means any."""
    cache_salt: str = ""
    """Requests share cached prefixes only with requests of equal salt: their own salt and that of their API key."""
    client_index: int = 0
    """Index of the requesting API server in the core's list of clients; outputs are sent there."""
    spans: tuple[Span, ...] = ()
    """Images and videos in the prompt, in its order; the prompt's ids are placeholders there. On its way the prompt has
    one placeholder for each, and items that the core has lack their patches (multimodal/sender_receiver_cache.py)."""
    pooling: Pooling | None = None
    """Pooling parameters; `sampling` is then ignored. None if tokens are generated."""
    adapter: str = ""
    """Name of the adapter. Empty for the base model."""
    cuts: PrefixCuts | None = None
    """Prefix keys of the prompt. None without a router that listens, and for other choices of the same prompt."""
    dispatch: Dispatch | None = None
    """Dispatch to acknowledge. None if the request did not come from a router."""


class AbortRequests(msgspec.Struct, tag="abort"):
    """End these requests now and free their blocks; unknown ids are ignored (they may just have finished)."""

    request_ids: list[str]


class ForgetMedia(msgspec.Struct, tag="forget_media"):
    """Forget this client's images and videos: it sends them in full from now on."""

    client_index: int


class SequenceOutput(msgspec.Struct, array_like=True):
    """Output of one step for one request. `finish_reason`: stop, length, abort, error; None while it runs."""

    request_id: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_token_id: int | None = None
    """The stop token that ended it, when it was one of the request's own stop_token_ids."""
    logprobs: list[TokenLogprobs] | None = None
    first_scheduled_time: float | None = None
    """Sent once, with the first output after the request was first scheduled."""
    num_preemptions: int = 0
    """Sent with the last output."""
    ends_with_text: bool = False
    """With finish_reason stop: True if the newest token is text, as the last token of a grammar."""
    num_cached_tokens: int = 0
    """Sent with the first output: how many of the prompt's tokens were found in the prefix cache."""
    prompt_logprobs: PackedLogprobs | None = None
    """Sent with the first output if requested: log-probabilities of prompt tokens from the second on."""
    error: str = ""
    """With finish_reason error: the error message for the client."""
    engine_index: int = 0
    """Index of the data-parallel core; filled in by the client."""
    is_engines_fault: bool = False
    """With finish_reason error: True for an internal error (HTTP 500)."""
    time: float | None = None
    """End of the step by the core's clock; filled in by the client. None if no step produced it."""
    num_host_cached_tokens: int = 0
    """Sent with the first output: the part of num_cached_tokens found in the host cache."""
    pooled: bytes | None = None
    """Pooled vector, float32 little endian, of a pooling request, which it ends."""


REFUSED = "refused"
"""finish_reason of a request that must not queue; never shown to API clients."""


class ExpertBalance(msgspec.Struct, array_like=True):
    """Results of expert balancing on the core's own rank, for the layers of its pipeline stage."""

    balancedness: float | None = None
    """Mean over maximum of the ranks' loads in the newest measured steps. None if there is no new measurement."""
    num_rearrangements: int = 0
    moved_bytes: int = 0
    """Bytes of expert weights received from other ranks."""
    seconds: float = 0.0
    """Seconds spent rearranging experts."""


@dataclass(slots=True)
class SpeculationCounts:
    """Sums over requests and steps. A "draft" is one request's guesses in one step, as in vLLM's metrics."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """Number of drafts accepted at least up to each position; as long as the longest draft."""

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    def note(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one request's drafts of one step and how many were accepted."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self._lengthen(num_draft_tokens)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def add(self, num_drafts: int, num_draft_tokens: int, accepted_per_position: Sequence[int]) -> None:
        """Add another sum."""
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_draft_tokens
        self._lengthen(len(accepted_per_position))
        for position, count in enumerate(accepted_per_position):
            self.accepted_per_position[position] += count

    def _lengthen(self, length: int) -> None:
        self.accepted_per_position += [0] * (length - len(self.accepted_per_position))


class AdaptersInUse(msgspec.Struct, array_like=True):
    """Adapter names of running requests and of waiting requests."""

    max_loras: int
    """Maximum number of different adapters in a step."""
    running: list[str]
    waiting: list[str]


class StepStats(msgspec.Struct, array_like=True):
    """State after one step and the counts of the step. Counters are per step: the API server sums them."""

    step: int
    time: float
    step_seconds: float
    kind: str
    """prefill, decode, mixed or idle (a state report without a step)."""
    num_running: int
    num_waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    kv_blocks_cap: int
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    """Prompt tokens of requests that finished prefill in this step."""
    num_generation_tokens: int = 0
    num_batch_requests: int = 0
    num_context_tokens: int = 0
    """Sum of sequence lengths after the step: the tokens that it reads from the KV cache."""
    num_attended_tokens: int = 0
    """Pairs of a computed token and one that it attends to."""
    num_arrived: int = 0
    """Requests that were queued for the first time since the last report."""
    num_arrived_prompt_tokens: int = 0
    preempted: dict[str, dict[str, int]] = {}
    """Preempted requests of this step by mode (recompute, swap) and reason (capacity, resize, reset)."""
    recomputed_tokens: int = 0
    preempt_stall_seconds: list[float] = []
    """Per request resumed in this step: the seconds it was off the device."""
    blocked_seconds: dict[str, float] = {}
    """Time by reason (kv, seqs, tokens) for which the head of the queue has waited since the last report."""
    memory_bytes: dict[str, int] | None = None
    """The ledger by kind; sent when it changed and about once a second."""
    num_cached_prompt_tokens: int = 0
    """The part of num_prompt_tokens found in the prefix cache."""
    prefix_cache_queries: int = 0
    """Tokens of the requests admitted for the first time that were looked up."""
    prefix_cache_hits: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    swap_seconds: float = 0.0
    num_waiting_tokens: int = 0
    """Tokens that waiting requests must still compute before their first token."""
    oldest_waiting_arrival: float | None = None
    """Arrival time of the oldest waiting request."""
    kv_blocks_cached: int = 0
    """Free blocks with cached content."""
    evicted_blocks: int = 0
    """Cached blocks that were reused for other content."""
    token_budget: int = 0
    """max_num_batched_tokens of this step."""
    num_deferred: int = 0
    """Requests that cannot run yet because their grammar is being built."""
    config_generation: int = 1
    config_values: dict[str, float] | None = None
    """The applied live values; sent when they changed and about once a second."""
    wire_bytes: dict[str, int] = {}
    """Between the core's own rank and other ranks in this step, by kind of collective (parallel/groups.py)."""
    engine_index: int = 0
    """Index of the data-parallel core; filled in by the client."""
    num_drafts: int = 0
    """Requests whose drafts were verified in this step."""
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = []
    """Number of requests that accepted their first draft, their second, and so on; as long as the longest draft."""
    graph_steps: dict[str, int] = {}
    """Steps that replayed CUDA graphs, by kind (full, piecewise)."""
    eager_steps: dict[str, int] = {}
    """Steps of a device with graphs that replayed none, by reason (off, too_large, mixed)."""
    graph_padding_tokens: int = 0
    """Padding rows computed by graphs."""
    graph_captures: int = 0
    kernel_compilations: int = 0
    expert_balance: ExpertBalance | None = None
    """None if there is nothing new."""
    failed_requests: dict[str, int] = {}
    """Requests without a possible token, by reason (sampling/failures.py)."""
    num_host_cached_prompt_tokens: int = 0
    """The part of num_cached_prompt_tokens found in the host cache."""
    host_cache_queries: int = 0
    """Tokens looked up and not found on the device, while there is a host cache."""
    host_cache_hits: int = 0
    host_cache_blocks: int = 0
    """Blocks of evicted content in host memory."""
    offloaded_bytes: int = 0
    """Copied to the host cache in this step."""
    restored_bytes: int = 0
    """Copied from the host cache in this step."""
    num_encoded_items: int = 0
    """Images and videos computed in this step; cached ones are not computed again."""
    num_encoded_tokens: int = 0
    num_late: int = 0
    """Requests found to miss their TTFT target (policy `deadline`)."""
    num_waiting_late: int = 0
    """The part of num_waiting that is late."""
    adapters: AdaptersInUse | None = None
    """Sent about once a second, where adapters are served."""


class PlainTokens(msgspec.Struct, array_like=True):
    """One more token for each of many requests without any other change: column format, because this is nearly all
    output of steps.
    """

    token_ids: list[int]
    request_ids: list[str] | None
    """None if equal to the previous PlainTokens from this core to this client."""

    def as_outputs(self) -> list[SequenceOutput]:
        """Return single outputs. Requires request ids."""
        pairs = zip(self.request_ids or (), self.token_ids, strict=True)
        return [SequenceOutput(request_id, [token_id]) for request_id, token_id in pairs]


class StepOutputs(msgspec.Struct, tag="outputs"):
    """Outputs of one step for client 0. Only client 0 receives the statistics, so they are counted once."""

    request_outputs: list[SequenceOutput]
    stats: StepStats
    plain: PlainTokens | None = None
    """Plain tokens of requests not in `request_outputs`."""
    state: CoreReport | None = None
    """None unless a router listens to the state stream."""

    @property
    def outputs(self) -> list[SequenceOutput]:
        """All outputs as single ones; for direct users of the engine."""
        return self.request_outputs if self.plain is None else self.request_outputs + self.plain.as_outputs()


class ClientOutputs(msgspec.Struct, tag="client_outputs"):
    """Outputs of one step for another client. `step` and `time` are those of the step's statistics."""

    outputs: list[SequenceOutput]
    step: int = 0
    time: float = 0.0
    plain: PlainTokens | None = None
    """Plain tokens, as in StepOutputs."""

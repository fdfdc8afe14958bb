"""What the API server and the engine core say to each other: msgspec structs over ZMQ, never pickle.

Times are CLOCK_MONOTONIC seconds of the API servers' host (nodes/clock.py). Every message is a tagged struct, so that
one decoder per direction reads all of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from trimtab_engine.config.engine import LogLevel
from trimtab_engine.config.pooling import GENERATES_ALONE, Tasks
from trimtab_engine.multimodal.items import Modality, Span
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs

PauseMode = Literal["abort", "wait", "keep"]
"""What a pause does to requests: end them, let them finish, or freeze them where they are. vLLM's names."""
SLEEP_LEVELS = (0, 1, 2)
WAKE_TAGS = ("weights", "kv_cache", "scheduling")


class ClientAddresses(msgspec.Struct, frozen=True):
    """Where one client of the core has bound its two one-way sockets. The core connects."""

    to_core: str
    from_core: str


class CoreStart(msgspec.Struct):
    """What the core reads from stdin, as one line of JSON. Client 0 gets the statistics; it may be the only one."""

    config: dict[str, Any]
    clients: list[ClientAddresses]
    clock_offset: float = 0.0
    """Seconds to add to this host's CLOCK_MONOTONIC to have that of the API servers, which are on another one."""
    media_cache_bytes: int = 0
    """How much of images and videos the core keeps for each client, which then sends their hashes alone."""
    joins: bool = False
    """Beside cores that serve already: when it has loaded it says so, and waits for the call `adopt`."""


# --- API server -> engine core ------------------------------------------------------------------------------------


class AddRequest(msgspec.Struct, tag="add"):
    """A new sequence. `request_id` is unique among live requests; `arrival_time` is when the HTTP request came."""

    request_id: str
    prompt_token_ids: list[int]
    sampling: Sampling
    arrival_time: float
    priority: int = 0
    may_queue: bool = True
    """False: a core that cannot run it in its next step refuses it, with finish_reason REFUSED, so that another may."""
    data_parallel_rank: int | None = None
    """The core that shall run it. None: any."""
    cache_salt: str = ""
    """Requests share cached prefixes only with those of the same salt: the request's own, and that of its API key."""
    client_index: int = 0
    """Which API server asked: its outputs go there. The index is the place in the core's list of clients."""
    spans: tuple[Span, ...] = ()
    """Images and videos in the prompt, in its order; the prompt's ids are placeholders there. On its way the prompt has
    one placeholder for each, and items that the core has lack their patches (multimodal/mirror.py)."""
    pooling: Pooling | None = None
    """What is made of its hidden states instead of tokens; `sampling` then says nothing."""
    adapter: str = ""
    """The name of the adapter that it asks for; empty: the model alone."""


class AbortRequests(msgspec.Struct, tag="abort"):
    """End these requests now and free their blocks; unknown ids are ignored (they may just have finished)."""

    request_ids: list[str]


class GetConfig(msgspec.Struct, tag="config_get"):
    """The configuration in force."""


class PatchConfig(msgspec.Struct, tag="config_patch"):
    """Change live fields. `values` is what the client sent, whatever it is: the core judges it. With `if_match` only
    the configuration of that generation is changed; a dry run changes nothing."""

    values: Any
    if_match: int | None = None
    dry_run: bool = False


class PreparePatch(msgspec.Struct, tag="prepare_patch"):
    """Judge a PatchConfig and map the memory that it needs, but change nothing that steps see. What follows is that
    PatchConfig, or AbandonPatch."""

    values: Any
    if_match: int | None = None


class AbandonPatch(msgspec.Struct, tag="abandon_patch"):
    """Give back what PreparePatch has mapped: another core could not."""


class AdoptConfig(msgspec.Struct, tag="adopt"):
    """The configuration in force, with which a core that joins begins to serve."""

    values: dict[str, Any]
    generation: int


class Retire(msgspec.Struct, tag="retire"):
    """Take nothing new, and end when what runs has finished."""


class GetMemory(msgspec.Struct, tag="memory"):
    """The ledger of every rank."""


class PlanMemory(msgspec.Struct, tag="memory_plan"):
    """What other values would give. `values` is what the client sent, whatever it is."""

    values: Any


class GetLayout(msgspec.Struct, tag="layout"):
    """Which rank runs where, and what it holds."""


class GetRequests(msgspec.Struct, tag="requests"):
    """What waits or runs, in numbers."""


class DrainCore(msgspec.Struct, tag="drain"):
    """Let what runs finish until the deadline, counted from now."""

    deadline_seconds: float


class Pause(msgspec.Struct, tag="pause"):
    """Stop working."""

    mode: PauseMode


class Resume(msgspec.Struct, tag="resume"):
    """Work again."""


class Sleep(msgspec.Struct, tag="sleep"):
    """Pause, then give memory back. `level` is one of SLEEP_LEVELS."""

    level: int
    mode: PauseMode


class WakeUp(msgspec.Struct, tag="wake_up"):
    """Bring back what sleep gave up. `tags` are of WAKE_TAGS."""

    tags: list[str]


class GetLifecycle(msgspec.Struct, tag="lifecycle"):
    """What pause and sleep have led to."""


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache"):
    """Forget all cached blocks; with `reset_running_requests` what runs is preempted for it."""

    reset_running_requests: bool


class LoadLora(msgspec.Struct, tag="load_lora"):
    """Serve another adapter, from this folder of every rank's node. It has no effect where a rank cannot read it."""

    name: str
    folder: str


class UnloadLora(msgspec.Struct, tag="unload_lora"):
    """Serve an adapter to no new request."""

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
    """One admin call, answered between two steps by one AdminReply with the same id."""

    call_id: str
    call: Call
    client_index: int = 0


class StartWave(msgspec.Struct, tag="wave"):
    """A data-parallel core has begun this wave: the others take part (parallel/wave.py). The client passes it on."""

    number: int


class ForgetMedia(msgspec.Struct, tag="forget_media"):
    """Forget this client's images and videos: what it sends from now on comes whole."""

    client_index: int


class RetireSeen(msgspec.Struct, tag="retire_seen"):
    """The answer to CoreRetiring: this client sends the core no further request."""

    client_index: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Leave the loop; requests that still run are aborted."""


ToCore = AddRequest | AbortRequests | AdminCall | StartWave | ForgetMedia | RetireSeen | Shutdown


# --- engine core -> API server ------------------------------------------------------------------------------------


class LoadProgress(msgspec.Struct, tag="progress"):
    """How far start-up is; stages as in docs/reference/contract.md section 3. `percent` is of the whole start-up,
    0..100."""

    stage: str
    percent: float


class CoreReady(msgspec.Struct, tag="ready"):
    """Start-up is done: requests are accepted from now on."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    cache_config: dict[str, str]
    """Label values of vllm:cache_config_info."""
    num_ranks: int = 1
    """That really run for this core."""
    modalities: list[Modality] = []
    """What this engine computes besides text."""
    tasks: Tasks = GENERATES_ALONE
    """What is done with prompts."""


class CoreBusy(msgspec.Struct, tag="busy"):
    """The core begins something during which nothing comes from it, for up to so many seconds."""

    seconds: float


class CoreLoaded(msgspec.Struct, tag="loaded"):
    """A core that joins has loaded. CoreReady follows its adoption."""


class CoreRetiring(msgspec.Struct, tag="retiring"):
    """This core takes nothing new; every client answers with RetireSeen. It ends when what runs has finished."""


class CoreFailed(msgspec.Struct, tag="failed"):
    """Start-up or the loop failed: the one line to print, and the process's exit code."""

    message: str
    exit_code: int


class SequenceOutput(msgspec.Struct, array_like=True):
    """What one step brought to one request. `finish_reason`: stop, length, abort, error; None while it runs."""

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
    """With finish_reason stop: the newest token is text all the same, as it is the last one of a grammar."""
    num_cached_tokens: int = 0
    """Sent with the first output: how many of the prompt's tokens were found in the prefix cache."""
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Sent with the first output, where they were asked for: of the prompt's tokens from the second on."""
    error: str = ""
    """With finish_reason error: what was wrong with the request, in words for its client."""
    engine_index: int = 0
    """Which of several data-parallel cores; the client fills it in, which knows whom it hears."""
    is_engines_fault: bool = False
    """With finish_reason error: nothing was wrong with the request. HTTP 500."""
    time: float | None = None
    """When the step ended that brought it, by the core's clock; the client fills it in. None: no step did."""
    num_host_cached_tokens: int = 0
    """Sent with the first output: how many of num_cached_tokens came from the host cache."""
    pooled: bytes | None = None
    """What its prompt was pooled to, float32 little endian: of a request that pools, which it ends."""


REFUSED = "refused"
"""finish_reason of a request that was not to queue; it stays between client and core."""


class ExpertBalance(msgspec.Struct, array_like=True):
    """What balancing experts has brought on the core's own rank: of the layers of its pipeline stage."""

    balancedness: float | None = None
    """Mean over maximum of the ranks' loads in the newest steps that were measured; None: not measured anew."""
    num_rearrangements: int = 0
    moved_bytes: int = 0
    """Bytes of experts' weights that came from other ranks."""
    seconds: float = 0.0
    """In which experts were rearranged."""


@dataclass(slots=True)
class SpeculationCounts:
    """Sums over requests and steps. A "draft" is one request's guesses in one step, as in vLLM's metrics."""

    num_drafts: int = 0
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    """How many drafts stood at least up to each position; as long as the longest draft."""

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_per_position)

    def note(self, num_draft_tokens: int, num_accepted: int) -> None:
        """One request's drafts of one step, and how many of them stood."""
        self.num_drafts += 1
        self.num_draft_tokens += num_draft_tokens
        self._lengthen(num_draft_tokens)
        for position in range(num_accepted):
            self.accepted_per_position[position] += 1

    def add(self, num_drafts: int, num_draft_tokens: int, accepted_per_position: Sequence[int]) -> None:
        """Another sum."""
        self.num_drafts += num_drafts
        self.num_draft_tokens += num_draft_tokens
        self._lengthen(len(accepted_per_position))
        for position, count in enumerate(accepted_per_position):
            self.accepted_per_position[position] += count

    def _lengthen(self, length: int) -> None:
        self.accepted_per_position += [0] * (length - len(self.accepted_per_position))


class AdaptersInUse(msgspec.Struct, array_like=True):
    """The names of those whose requests run, and of those whose requests wait."""

    max_loras: int
    """How many different ones a step may have."""
    running: list[str]
    waiting: list[str]


class StepStats(msgspec.Struct, array_like=True):
    """The core's state after one step, and what the step added. Counters are per step: the API server sums them."""

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
    """Prompt tokens of requests whose prefill ended in this step."""
    num_generation_tokens: int = 0
    num_batch_requests: int = 0
    num_context_tokens: int = 0
    """How long the batch's sequences are when the step has run, together: what it reads of the KV cache."""
    num_attended_tokens: int = 0
    """Pairs of a computed token and one that it attends to."""
    num_arrived: int = 0
    """Requests that were queued for the first time since the last report."""
    num_arrived_prompt_tokens: int = 0
    preempted: dict[str, dict[str, int]] = {}
    """Preempted requests of this step by mode (recompute, swap) and reason (capacity, resize, reset)."""
    recomputed_tokens: int = 0
    preempt_stall_seconds: list[float] = []
    """For each request that runs again in this step: how long it was off the device."""
    blocked_seconds: dict[str, float] = {}
    """Time by reason (kv, seqs, tokens) for which the head of the queue has waited since the last report."""
    memory_bytes: dict[str, int] | None = None
    """The ledger by kind; sent when it changed and about once a second."""
    num_cached_prompt_tokens: int = 0
    """How many of num_prompt_tokens the prefix cache had."""
    prefix_cache_queries: int = 0
    """Tokens of the requests admitted for the first time that were looked up."""
    prefix_cache_hits: int = 0
    swapped_out_bytes: int = 0
    swapped_in_bytes: int = 0
    swap_seconds: float = 0.0
    num_waiting_tokens: int = 0
    """Tokens that the waiting requests have still to compute before they answer."""
    oldest_waiting_arrival: float | None = None
    """When the oldest request that waits arrived."""
    kv_blocks_cached: int = 0
    """Free blocks whose content can still be found."""
    evicted_blocks: int = 0
    """Such blocks that were taken for something else."""
    token_budget: int = 0
    """max_num_batched_tokens of this step."""
    num_deferred: int = 0
    """Requests that could not run even if there were room: they wait for their grammar."""
    config_generation: int = 1
    config_values: dict[str, float] | None = None
    """The applied live values; sent when they changed and about once a second."""
    wire_bytes: dict[str, int] = {}
    """Between the core's own rank and other ranks in this step, by kind of collective (parallel/groups.py)."""
    engine_index: int = 0
    """Which of several data-parallel cores; the client fills it in, which knows whom it hears."""
    num_drafts: int = 0
    """Requests whose drafts this step verified."""
    num_draft_tokens: int = 0
    accepted_per_position: list[int] = []
    """How many of the requests with drafts accepted their first one, their second, …; as long as the longest draft."""
    graph_steps: dict[str, int] = {}
    """Steps that replayed CUDA graphs, by kind (full, piecewise)."""
    eager_steps: dict[str, int] = {}
    """Steps of a device with graphs that replayed none, by reason (off, too_large, mixed)."""
    graph_padding_tokens: int = 0
    """Rows that graphs computed for nothing."""
    graph_captures: int = 0
    kernel_compilations: int = 0
    expert_balance: ExpertBalance | None = None
    """None: nothing new."""
    failed_requests: dict[str, int] = {}
    """Requests that no token could be chosen for, by why (sampling/failures.py)."""
    num_host_cached_prompt_tokens: int = 0
    """How many of num_cached_prompt_tokens came from the host cache."""
    host_cache_queries: int = 0
    """Tokens looked up and not found on the device, while there is a host cache."""
    host_cache_hits: int = 0
    host_cache_blocks: int = 0
    """Blocks of evicted content that host memory holds."""
    offloaded_bytes: int = 0
    """Copied to the host cache in this step."""
    restored_bytes: int = 0
    """Copied from there."""
    num_encoded_items: int = 0
    """Images and videos that the step computed; what is kept of one from before is not computed again."""
    num_encoded_tokens: int = 0
    num_late: int = 0
    """Requests whose first token could not come in time any more when they were looked at (policy `deadline`)."""
    num_waiting_late: int = 0
    """How many of those wait."""
    adapters: AdaptersInUse | None = None
    """Sent about once a second, where adapters are served."""


class PlainTokens(msgspec.Struct, array_like=True):
    """One more token for each of many requests, of which there is nothing else to tell: in columns, as that is nearly
    all of what steps bring."""

    token_ids: list[int]
    request_ids: list[str] | None
    """None: those of the PlainTokens before, from this core to this client."""

    def as_outputs(self) -> list[SequenceOutput]:
        """One by one, where the requests are named."""
        pairs = zip(self.request_ids or (), self.token_ids, strict=True)
        return [SequenceOutput(request_id, [token_id]) for request_id, token_id in pairs]


class StepOutputs(msgspec.Struct, tag="outputs"):
    """What one step brought, for client 0: the statistics go nowhere else, so that they are counted once."""

    told: list[SequenceOutput]
    stats: StepStats
    plain: PlainTokens | None = None
    """Of other requests than those that are `told` of."""

    @property
    def outputs(self) -> list[SequenceOutput]:
        """All of it one by one, for who has the step as the engine made it."""
        return self.told if self.plain is None else self.told + self.plain.as_outputs()


class ClientOutputs(msgspec.Struct, tag="client_outputs"):
    """What one step brought to the requests of another client. `step` and `time` are those of the step's statistics."""

    outputs: list[SequenceOutput]
    step: int = 0
    time: float = 0.0
    plain: PlainTokens | None = None
    """As in StepOutputs."""


class AdapterCard(msgspec.Struct, array_like=True, frozen=True):
    """An adapter that requests may ask for."""

    name: str
    folder: str
    parent: str | None = None
    """The model's name to show as its parent; None: the first that is served."""


class EngineState(msgspec.Struct, tag="engine_state", frozen=True, kw_only=True):
    """What every API server obeys of the engine's state. Sent to all of them whenever it changes, but for `time`, and
    about once a second as a sign of life."""

    time: float = 0.0
    """When the core last read its inbox: requests sent later are in no count."""
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_late: int = 0
    """How many of those wait in the late line (`deadline`): they hold up nobody who comes."""
    max_num_seqs: int = 0
    max_num_queued_reqs: int = 0
    max_num_queued_tokens: int = 0
    disable_log_stats: bool = False
    stats_interval_seconds: float = 10.0
    log_level: LogLevel = "info"
    pause_mode: PauseMode | None = None
    """None: it is not paused."""
    sleep_level: int | None = None
    """None: it is awake."""
    longest_step_seconds: float = 0.0
    """So far, rounded up to whole seconds: no core is called hung within a few of them."""
    adapters: tuple[AdapterCard, ...] = ()
    """Those that requests may ask for."""


class AdminReply(msgspec.Struct, tag="admin_reply"):
    """Answer to one AdminCall: HTTP status and JSON body as docs/reference/contract.md section 2 has them."""

    call_id: str
    status: int
    body: dict[str, Any]


FromCore = (
    LoadProgress
    | CoreLoaded
    | CoreReady
    | CoreRetiring
    | CoreBusy
    | CoreFailed
    | StepOutputs
    | ClientOutputs
    | EngineState
    | AdminReply
    | StartWave
)

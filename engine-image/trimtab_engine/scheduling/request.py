"""A request in the engine core: its tokens and its state. Independent of scheduler and tensors."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from trimtab_engine.multimodal.items import Span
from trimtab_engine.multimodal.positions import RopePositions
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import PackedLogprobs, Sampling, TokenLogprobs


class RequestStatus(Enum):
    """State of a request. FINISHED_* values are OpenAI's finish reasons."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, _: str) -> None:
        # An attribute, not a property: read for each request several times a step.
        self.is_finished = self.name.startswith("FINISHED")


class Grammar(Protocol):
    """Progress of a request's output within the grammar that it must match (structured/matcher.py)."""

    num_words: int
    """Number of 32-bit words in one mask."""
    mask_seconds: float
    """CPU time of the last mask; 0 before the first."""

    @property
    def error(self) -> str | None:
        """The reason why the grammar cannot continue; None if it can."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing can follow but the end."""
        ...

    def copy(self) -> "Grammar":
        """Return an independent copy at the same position."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Advance by these tokens."""
        ...

    def num_acceptable(self, token_ids: Sequence[int]) -> int:
        """Return how many leading tokens the grammar accepts in sequence. Does not change its state."""
        ...

    def fill_with_drafts(self, draft_token_ids: Sequence[int], address: int, num_bytes: int) -> None:
        """Write 1 + len(draft) masks to memory, `num_bytes` apart: before the first draft token, and after each."""
        ...


@dataclass(slots=True, eq=False, weakref_slot=True)
class Request:
    """A sequence being served.

    `token_ids` is prompt and output in one list; `num_computed_tokens` of them have their keys and values in the KV
    cache (counted when scheduled, as the step will surely run). Identity is by object; ids are unique while alive.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling: Sampling
    arrival_time: float
    priority: int = 0
    """Priority under the policy `priority`: the lowest number runs first."""
    cache_salt: str = ""
    """Requests share cached blocks only with requests of the same salt."""
    spans: tuple[Span, ...] = ()
    """Images and videos in its prompt, in its order."""
    rope: RopePositions | None = None
    """Token positions over time, height and width. None if each token's index is its position on all axes."""
    pooling: Pooling | None = None
    """Pooling parameters; the request ends with its prompt. None if it samples tokens."""
    adapter: Adapter | None = None
    """The adapter applied to the model. None for the base model."""
    order: int = 0
    """Number of requests added before it; set when the scheduler accepts it."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    """Tokens that a step in flight samples: 1 from schedule() to update(), else 0. A pooled result counts as one."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Draft tokens after the newest token; the next step verifies as many as fit. Empty while the policy's
    num_speculative_tokens is 0; earlier drafts are dropped by the next step.
    """
    num_preemptions: int = 0
    preempted_at: float | None = None
    """Time of its last preemption. None while it runs or before it first ran."""
    first_scheduled_time: float | None = None
    is_late: bool = False
    """True while it waits in the late line of the policy `deadline`: it was found to miss its TTFT target and has not
    been admitted.
    """
    was_late: bool = False
    """True once it was found late and counted."""
    block_tables: list[list[int]] = field(default_factory=lambda: [[]])
    """The block table of each KV group. Block i of all, in a table at i - num_out_of_window, holds tokens
    [i*block_size, (i+1)*block_size). Set, as num_out_of_window is, when the scheduler takes the request. A list is only
    ever appended to; any other change makes another one.
    """
    num_out_of_window: list[int] = field(default_factory=lambda: [0])
    """Per KV group: leading blocks outside the attention window, already freed."""
    num_blocks: int = 0
    """Number of token blocks that its tables cover, including freed leading blocks."""
    host_block_ids: list[int] = field(default_factory=list)
    """Its blocks in the swap space while it is swapped out; num_computed_tokens then includes them."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks, as far as they were needed; empty without prefix caching."""
    num_prefix_cached_blocks: int = 0
    """Leading blocks of its tables that are registered in the prefix cache."""
    num_cached_tokens: int = 0
    """Prompt tokens that it found in the prefix cache when it was first admitted, the host cache included."""
    num_host_cached_tokens: int = 0
    """The part of num_cached_tokens found in the host cache."""
    max_num_tokens: int = 0
    """Prompt and output together end here with finish_reason length; set when the scheduler takes the request."""
    end_token_ids: frozenset[int] = frozenset()
    """Token ids that end it once min_tokens are out: end-of-sequence and its own stop ids; set likewise."""
    stop_token_id: int | None = None
    """The one of its own stop_token_ids that ended it."""
    grammar: Grammar | None = None
    """Grammar state after the output tokens so far; the engine advances it."""
    error: str = ""
    """The error message for its client, with finish_reason error."""
    prompt_logprobs: PackedLogprobs = field(default_factory=PackedLogprobs)
    """Log-probabilities of its prompt tokens from the second on, as far as computed. Empty once reported."""
    has_reported_prompt: bool = False
    """True once its prompt_logprobs were sent with its first output."""
    hidden_sum: bytes = b""
    """Sum of the pooled hidden states so far, [hidden_size] float32."""
    num_summed_tokens: int = 0
    """Number of its tokens included in hidden_sum."""
    is_plain: bool = field(init=False)
    """Cached sampling.is_plain: read in every step."""
    is_greedy: bool = field(init=False)
    """True if it is plain and greedy."""
    packed_parameters: bytes = b""
    """Sampling parameters in the device sampler's format; empty until it first samples the request."""
    num_ever_computed_tokens: int = 0
    """High-water mark of num_computed_tokens over preemptions: tokens computed below it are recomputed."""

    def __post_init__(self) -> None:
        self.is_plain = self.sampling.is_plain
        self.is_greedy = self.is_plain and self.sampling.temperature == 0

    @classmethod
    def of(
        cls,
        request_id: str,
        prompt_token_ids: list[int],
        sampling: Sampling,
        *,
        arrival_time: float,
        priority: int = 0,
        cache_salt: str = "",
        spans: tuple[Span, ...] = (),
        rope: RopePositions | None = None,
        pooling: Pooling | None = None,
        adapter: Adapter | None = None,
    ) -> "Request":
        token_ids, num_tokens = list(prompt_token_ids), len(prompt_token_ids)
        return cls(
            request_id,
            token_ids,
            num_tokens,
            sampling,
            arrival_time,
            priority,
            cache_salt,
            spans=spans,
            rope=rope,
            pooling=pooling,
            adapter=adapter,
        )

    def note_prompt_logprobs(self, position: int, judged: list[TokenLogprobs]) -> None:
        """Store log-probabilities of the tokens after `position`. Positions stored before a preemption are skipped."""
        if not self.has_reported_prompt:
            self.prompt_logprobs.extend(judged[max(0, len(self.prompt_logprobs) - position) :])

    def take_prompt_logprobs(self) -> PackedLogprobs | None:
        """Return the log-probabilities of its prompt, once. None if none were requested."""
        if self.sampling.prompt_logprobs is None or self.has_reported_prompt:
            return None
        reported, self.prompt_logprobs, self.has_reported_prompt = self.prompt_logprobs, PackedLogprobs(), True
        return reported

    @property
    def scores_prompt(self) -> bool:
        """True if log-probabilities of its prompt were requested and are still to be computed."""
        return self.sampling.prompt_logprobs is not None and not self.has_reported_prompt

    @property
    def is_swapped_out(self) -> bool:
        return bool(self.host_block_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

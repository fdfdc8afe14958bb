"""One request as the engine core sees it: its tokens and its state. It knows no scheduler and no tensor."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

from trimtab_engine.multimodal.items import Span
from trimtab_engine.multimodal.positions import RopePositions
from trimtab_engine.scheduling.adapter import Adapter
from trimtab_engine.scheduling.pooling import Pooling
from trimtab_engine.scheduling.sampling import Sampling, TokenLogprobs


class RequestStatus(Enum):
    """Where a request stands. FINISHED_* values are OpenAI's finish reasons."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"
    FINISHED_ERROR = "error"

    def __init__(self, _: str) -> None:
        # An attribute: it is asked for each request several times a step.
        self.is_finished = self.name.startswith("FINISHED")


class Grammar(Protocol):
    """Where a request's output stands in what it must match (structured/matcher.py)."""

    num_words: int
    """32-bit words of one mask."""

    @property
    def error(self) -> str | None:
        """Why it cannot go on."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing can follow but the end."""
        ...

    def copy(self) -> "Grammar":
        """Another one at the same place."""
        ...

    def accept(self, token_ids: Sequence[int]) -> None:
        """Go on by these tokens."""
        ...

    def num_acceptable(self, token_ids: Sequence[int]) -> int:
        """How many of these tokens, from the first, may come one after the other. Nothing changes."""
        ...

    def fill_with_drafts(self, draft_token_ids: Sequence[int], address: int, num_bytes: int) -> None:
        """Write 1 + len(draft) masks to memory, `num_bytes` apart: before the first draft token, and after each."""
        ...


@dataclass(slots=True, eq=False)
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
    """Under the policy `priority`: the lowest number goes first."""
    cache_salt: str = ""
    """Requests share cached blocks only with those of the same salt."""
    spans: tuple[Span, ...] = ()
    """Images and videos in its prompt, in its order."""
    rope: RopePositions | None = None
    """Where its tokens are over time, height and width; None: where they are in it, on all three."""
    pooling: Pooling | None = None
    """What is made of its prompt's hidden states instead of tokens: it ends with its prompt. None: it samples."""
    adapter: Adapter | None = None
    """What is added to the model for it; None: nothing."""
    order: int = 0
    """How many requests were added before it; set when the scheduler takes it."""
    status: RequestStatus = RequestStatus.WAITING
    num_computed_tokens: int = 0
    num_pending_tokens: int = 0
    """Tokens that a step in flight samples: 1 from schedule() to update(), else 0. What it pools counts as one."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Guesses of the tokens after the newest one; the next step verifies as many as it has room for. Nobody guesses
    while the policy's num_speculative_tokens is 0; what was guessed before it became 0 is dropped by the next step."""
    num_preemptions: int = 0
    preempted_at: float | None = None
    """When it was last preempted; None while it runs or before it ever ran."""
    first_scheduled_time: float | None = None
    is_late: bool = False
    """It waits in the late line: under the policy `deadline`, its first token could not come in time any more when it
    was looked at, and it has had no turn yet."""
    was_late: bool = False
    """It was so once, and has been counted."""
    block_tables: list[list[int]] = field(default_factory=lambda: [[]])
    """The block table of each KV group. Block i of all, in a table at i - num_gone, holds tokens
    [i*block_size, (i+1)*block_size). Set, as num_gone is, when the scheduler takes the request. A list is only ever
    appended to; any other change makes another one."""
    num_gone: list[int] = field(default_factory=lambda: [0])
    """Per KV group: leading blocks that its tokens do not see any more, and that it has let go of."""
    num_blocks: int = 0
    """Over how many blocks of tokens its tables reach, those that are gone included."""
    host_block_ids: list[int] = field(default_factory=list)
    """What its tables held, in the swap space, while it is swapped out; num_computed_tokens then counts that too."""
    block_hashes: list[bytes] = field(default_factory=list)
    """Hashes of its full blocks, as far as they were needed; empty without prefix caching."""
    num_offered_blocks: int = 0
    """Leading blocks of its tables that the prefix cache has been told of."""
    num_cached_tokens: int = 0
    """Prompt tokens that it found in the prefix cache when it was first admitted, the host cache included."""
    num_host_cached_tokens: int = 0
    """How many of them were in the host cache."""
    max_num_tokens: int = 0
    """Prompt and output together end here with finish_reason length; set when the scheduler takes the request."""
    end_token_ids: frozenset[int] = frozenset()
    """Token ids that end it once min_tokens are out: end-of-sequence and its own stop ids; set likewise."""
    stop_token_id: int | None = None
    """The one of its own stop_token_ids that ended it."""
    grammar: Grammar | None = None
    """What its output must match, after the output tokens so far; the engine moves it on."""
    error: str = ""
    """Why it ended with finish_reason error, for its client."""
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    """Log-probabilities of its prompt's tokens from the second on, as far as they are computed; where they were asked
    for."""
    hidden_sum: bytes = b""
    """Where it pools: the sum of the hidden states that count, [hidden_size] float32, as far as they are computed."""
    num_summed_tokens: int = 0
    """Of how many of its tokens that is, from the first on where all count."""
    is_plain: bool = field(init=False)
    """Its sampling's: asked in every step."""
    takes_likeliest: bool = field(init=False)
    """It is plain, and greedy."""
    num_ever_computed_tokens: int = 0
    """High-water mark of num_computed_tokens over preemptions: what is computed below it is computed again."""

    def __post_init__(self) -> None:
        self.is_plain = self.sampling.is_plain
        self.takes_likeliest = self.is_plain and self.sampling.temperature == 0

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
        """Keep those of the tokens behind `position`, …; what was judged before a preemption is not kept twice."""
        self.prompt_logprobs += judged[max(0, len(self.prompt_logprobs) - position) :]

    @property
    def is_swapped_out(self) -> bool:
        return bool(self.host_block_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

"""What the offline LLM class returns, in vLLM's shape, and how it comes together step by step.

`RequestOutput` here is a whole answer to one prompt; messages.SequenceOutput is what one step brought to one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from trimtab_engine import messages
from trimtab_engine.offline.sampling_params import SamplingParams
from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.stream import TextStream
from trimtab_engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability at one position. `rank` 1 is the most likely."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice. `finish_reason` is stop, length, abort or error; `stop_reason` is what stopped it, None for its
    natural end; `error` says what was wrong.

    `cumulative_logprob` and `logprobs` (token id to Logprob, per position) are None unless they were asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When things happened to the first choice, in CLOCK_MONOTONIC seconds. None: it never came so far."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. `prompt` is None when token ids were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Per prompt token, where they were asked for; the first is None."""


@dataclass(slots=True)
class Choice:
    """One sequence while it runs: collects tokens, turns them into text, looks for stop strings."""

    index: int
    params: SamplingParams
    min_tokens: int
    tokenizer: Tokenizer
    arrival_time: float
    prompt_token_ids: Sequence[int] = ()
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int | None = None
    _positions: list[TokenLogprobs] = field(default_factory=list)
    _prompt_positions: list[TokenLogprobs] | None = None
    _texts: list[str] = field(default_factory=list)
    _stream: TextStream | None = None
    """None: text was not asked for."""

    def __post_init__(self) -> None:
        if self.params.detokenize:
            self._stream = TextStream(
                self.tokenizer,
                self.prompt_token_ids,
                skip_special_tokens=self.params.skip_special_tokens,
                stop=self.params.stop_strings,
                include_stop=self.params.include_stop_str_in_output,
                min_tokens=self.min_tokens,
            )

    def take(self, output: messages.SequenceOutput, now: float) -> bool:
        """Add what one step brought. True: a stop string ended it here, and the engine does not know yet."""
        if output.first_scheduled_time is not None:
            self.first_scheduled_time = output.first_scheduled_time
            self.num_cached_tokens = output.num_cached_tokens
        self._prompt_positions = output.prompt_logprobs or self._prompt_positions
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if output.token_ids:
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
        self._positions += output.logprobs or []
        self.finish_reason, self.stop_reason = output.finish_reason, output.stop_token_id
        self.error = output.error if output.finish_reason == "error" else None
        if self._stream is None:
            self.token_ids += output.token_ids
            return False
        taken = self._stream.take(output.token_ids, output.finish_reason, ends_with_text=output.ends_with_text)
        self._texts.append(taken.text)
        self.token_ids += output.token_ids[: taken.num_tokens]
        if self._stream.matched is None:
            return False
        del self._positions[len(self.token_ids) :]  # what follows the stop string was generated for nothing
        self.finish_reason, self.stop_reason = "stop", self._stream.matched
        return output.finish_reason is None

    def output(self) -> CompletionOutput:
        """The choice as it stands."""
        wants_logprobs = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text="".join(self._texts),
            token_ids=self.token_ids,
            cumulative_logprob=sum(p.logprobs[0] for p in self._positions) if wants_logprobs else None,
            logprobs=[self._logprobs(position) for position in self._positions] if wants_logprobs else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            error=self.error,
        )

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """One entry for each of the prompt's tokens: None for the first one, which follows nothing."""
        if self._prompt_positions is None:
            return None
        return [None, *(self._logprobs(position) for position in self._prompt_positions)]

    def _logprobs(self, position: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token with its own rank, then the most likely ones in order."""
        entries: dict[int, Logprob] = {}
        for order, (token_id, value) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
            rank = position.rank if order == 0 else order
            text = self.tokenizer.token_text(token_id) if self.params.detokenize else None
            entries.setdefault(token_id, Logprob(value, rank, text))
        return entries

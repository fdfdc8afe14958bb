"""Results of the offline LLM class, compatible with vLLM, and their step-by-step construction.

`RequestOutput` is the complete result of one prompt; SequenceOutput is one step's output of one sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trimtab_engine.messages.requests import SequenceOutput
from trimtab_engine.offline.sampling_params import SamplingParams
from trimtab_engine.scheduling.sampling import PackedLogprobs, TokenLogprobs
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
    """One choice. `finish_reason` is stop, length, abort or error; `stop_reason` is the stop string or token, None for
    a natural end; `error` is the reason of a failure.

    `cumulative_logprob` and `logprobs` (token ID to Logprob, per position) are None unless requested.
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
    """Timestamps of the first choice in CLOCK_MONOTONIC seconds. None for phases that were not reached."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    last_token_time: float | None
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """Result of one prompt. `prompt` is None if token IDs were given."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool = True
    metrics: RequestMetrics | None = None
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache."""
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    """Log-probabilities per prompt token, if requested; the first is None."""


@dataclass(slots=True)
class Choice:
    """One running sequence: collects tokens, converts them to text, searches for stop strings."""

    index: int
    params: SamplingParams
    min_tokens: int
    tokenizer: Tokenizer
    arrival_time: float
    prompt_token_ids: Sequence[int] = ()
    special_stop: Mapping[int, str] = field(default_factory=dict)
    """Stop strings that are special tokens, by token ID."""
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
    _prompt_positions: PackedLogprobs | None = None
    _texts: list[str] = field(default_factory=list)
    _stream: TextStream | None = None
    """None if no text was requested."""

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

    def take(self, output: SequenceOutput, now: float) -> bool:
        """Add one step's output. Return True if a stop string ended the sequence here, which the engine does not know
        yet.
        """
        if output.first_scheduled_time is not None:
            self.first_scheduled_time = output.first_scheduled_time
            self.num_cached_tokens = output.num_cached_tokens
        self._prompt_positions = output.prompt_logprobs or self._prompt_positions
        self.num_preemptions = max(self.num_preemptions, output.num_preemptions)
        if output.token_ids:
            self.first_token_time = self.first_token_time or now
            self.last_token_time = now
        self._positions += output.logprobs or []
        stop_token_id = output.stop_token_id
        self.finish_reason = output.finish_reason
        self.stop_reason = None if stop_token_id is None else self.special_stop.get(stop_token_id, stop_token_id)
        self.error = output.error if output.finish_reason == "error" else None
        if self._stream is None:
            self.token_ids += output.token_ids
            return False
        taken = self._stream.take(output.token_ids, output.finish_reason, ends_with_text=output.ends_with_text)
        self._texts.append(taken.text)
        self.token_ids += output.token_ids[: taken.num_tokens]
        if self._stream.matched is None:
            return False
        del self._positions[len(self.token_ids) :]  # tokens after the stop string are dropped
        self.finish_reason, self.stop_reason = "stop", self._stream.matched
        return output.finish_reason is None

    def output(self) -> CompletionOutput:
        """Return the choice in its current state."""
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
        """One entry per prompt token; None for the first one."""
        if self._prompt_positions is None:
            return None
        return [None, *(self._logprobs(position) for position in self._prompt_positions)]

    def _logprobs(self, position: TokenLogprobs) -> dict[int, Logprob]:
        """Return the chosen token with its own rank, then the most likely ones in order."""
        entries: dict[int, Logprob] = {}
        for order, (token_id, value) in enumerate(zip(position.token_ids, position.logprobs, strict=True)):
            rank = position.rank if order == 0 else order
            text = self.tokenizer.added_text(token_id) if self.params.detokenize else None
            entries.setdefault(token_id, Logprob(value, rank, text))
        return entries

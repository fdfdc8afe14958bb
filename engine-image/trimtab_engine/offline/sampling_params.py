"""Sampling parameters of the offline LLM class: vLLM's names, and the validation of the HTTP API.

Allowed values and unsupported features are defined in one place for both: api/openai/protocol.py.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ValidationError

from trimtab_engine.api.openai.protocol import GenerationRequest
from trimtab_engine.api.openai.restrictions import Restrictions, bad_word_tokens
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.text.tokenizer import Tokenizer

OWN_FIELDS = ("detokenize", "logprobs", "prompt_logprobs")
"""Fields that the API lacks or has in another form."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of one prompt. temperature 0 is greedy; max_tokens None is as much as fits.

    `logprobs` is the number of most likely tokens reported in addition to each chosen one (None: no logprobs).
    `structured_outputs` is a dict such as {"regex": "[0-9]+"}.

    Raises:
        InvalidRequest: A value is invalid, or a feature is not supported.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    """False for token IDs without text; stop strings are then not available."""
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    """Number of log-probabilities of the prompt's own tokens."""
    logit_bias: dict[int, float] | None = None
    bad_words: Sequence[str] | None = None
    structured_outputs: Any = None
    best_of: int | None = None
    truncate_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self._validate()
        if self.stop and not self.detokenize:
            raise InvalidRequest("stop requires text; set detokenize to True, or use stop_token_ids")
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None and count < 0:
                raise InvalidRequest(f"{name} must be 0 or more, or None ({count})")

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    def sampling_per_choice(self, room: int, tokenizer: Tokenizer, special_stop: Iterable[int] = ()) -> list[Sampling]:
        """Return the sampling of each of the `n` choices; `room` is the maximum number of output tokens, and
        `special_stop` has the token IDs of the stop strings that are special tokens.
        """
        checked = self._validate()
        if self.min_tokens > room:
            raise InvalidRequest(f"min_tokens is {self.min_tokens}, but only {room} tokens can be generated")
        max_tokens = min(self.max_tokens or room, room)
        restrictions = Restrictions(_grammar(checked), bad_word_tokens(tokenizer, checked.bad_words or []))
        return [
            checked.sampling(
                max_tokens=max_tokens,
                logprobs=self.logprobs,
                index=index,
                restrictions=restrictions,
                special_stop=special_stop,
                prompt_logprobs=self.prompt_logprobs if index == 0 else None,
            )
            for index in range(self.n)
        ]

    def _validate(self) -> GenerationRequest:
        """Return these values validated by the API's request model."""
        values = {name: value for name, value in asdict(self).items() if name not in OWN_FIELDS and value is not None}
        for name in ("stop", "stop_token_ids", "bad_words"):
            if isinstance(values.get(name), tuple):
                values[name] = list(values[name])
        for name, value in values.items():  # JSON has one number type; here 1 is accepted for 1.0, as in vLLM
            if isinstance(getattr(SamplingParams, name, None), float) and type(value) is int:
                values[name] = float(value)
        try:
            return GenerationRequest.model_validate(values)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            reason = first["msg"].removeprefix("Value error, ")
            raise InvalidRequest(f"{where}: {reason}" if where else reason) from None


def _grammar(checked: GenerationRequest) -> str | None:
    """Return the user's grammar. It runs in the user's own process, so it is not validated with time limits."""
    constraint = checked.constraint()
    if constraint is None:
        return None
    from trimtab_engine.structured.reasons import one_sentence
    from trimtab_engine.structured.validation import grammar_text  # lazy import: llguidance is only needed for grammars

    try:
        return grammar_text(constraint.to_json())
    except ValueError as error:
        raise InvalidRequest(f"structured_outputs: {one_sentence(str(error))}") from None

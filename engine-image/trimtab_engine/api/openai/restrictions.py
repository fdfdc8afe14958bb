"""What a request's tokens are chosen from: the grammar, logit_bias, allowed_token_ids, bad_words. Judged against the
model's vocabulary."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.openai.constraints import Constraint, StructuredFields
from trimtab_engine.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from trimtab_engine.api.openai.state import Serving

MAX_LOGIT_BIASES = 1024
MAX_BIAS = 100.0
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 256
MAX_BAD_WORD_CHARACTERS = 256

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]


class RestrictionFields(StructuredFields):
    """The fields of a generation request that restrict the choice of tokens."""

    logit_bias: dict[TokenId, Bias] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _read_token_ids(cls, value: Any) -> Any:
        """JSON's keys are text; the token ids in them are plain decimal numbers."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_LOGIT_BIASES:
            raise ValueError(f"it has {len(value)} entries; at most {MAX_LOGIT_BIASES} are read")
        for key in value:
            is_number = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
            if not is_number and type(key) is not int:
                raise ValueError(f"the key {str(key)[:50]!r} is no token id")
        read = {int(key): bias for key, bias in value.items()}
        if len(read) < len(value):
            raise ValueError("a token id is given twice, in two spellings")
        return read


@dataclass(frozen=True, slots=True)
class Restrictions:
    """What remains to be known before sampling parameters can be made."""

    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()


NO_RESTRICTIONS = Restrictions()


async def restrictions_of(
    body: RestrictionFields, serving: "Serving", constraint: Constraint | None = None
) -> Restrictions:
    """Check ids, tokenise bad words, try the grammar. `constraint` (of tool calls) comes before the body's own.

    Raises ApiError 400.
    """
    vocab_size = serving.facts.vocab_size
    for field, ids in (("logit_bias", body.logit_bias), ("allowed_token_ids", body.allowed_token_ids)):
        highest = max(ids, default=0) if ids else 0
        if highest >= vocab_size:
            raise invalid(f"{field} has {highest}, out of a vocabulary of {vocab_size}", field)
    constraint = constraint or body.constraint()
    grammar = None if constraint is None else await serving.trials.grammar(constraint, _param(body))
    return Restrictions(grammar, bad_word_tokens(serving.tokenizer, body.bad_words or []))


def bad_word_tokens(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Each word's tokens as they are at the beginning of a text and, where that differs, after a space (as in vLLM)."""
    sequences: dict[tuple[int, ...], None] = {}
    for word in words:
        plain = tokenizer.encode(word, add_special_tokens=False)
        spaced = tokenizer.encode(" " + word.lstrip(), add_special_tokens=False)
        for ids in (plain, spaced):
            if ids:
                sequences[tuple(ids)] = None
    return tuple(sequences)


def _param(body: StructuredFields) -> str | None:
    names = ("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar")
    return next((name for name in names if getattr(body, name) is not None), None)

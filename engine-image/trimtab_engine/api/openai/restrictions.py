"""Restrictions of token choice: grammar, logit_bias, allowed_token_ids and bad_words, checked against the model's
vocabulary.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, field_validator

from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.openai.constraints import Constraint, StructuredFields
from trimtab_engine.scheduling.sampling import token_mask
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
    """Request fields that restrict the choice of tokens."""

    logit_bias: dict[TokenId, Bias] | None = None
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_ALLOWED_TOKEN_IDS, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None

    @field_validator("logit_bias", mode="before")
    @classmethod
    def _read_token_ids(cls, value: Any) -> Any:
        """Convert JSON's string keys; token IDs must be plain decimal numbers."""
        if not isinstance(value, dict):
            return value
        if len(value) > MAX_LOGIT_BIASES:
            raise ValueError(f"{len(value)} entries; at most {MAX_LOGIT_BIASES} are allowed")
        for key in value:
            is_number = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10
            if not is_number and type(key) is not int:
                raise ValueError(f"the key {str(key)[:50]!r} is not a token id")
        read = {int(key): bias for key, bias in value.items()}
        if len(read) < len(value):
            raise ValueError("a token id appears twice, in two spellings")
        return read


@dataclass(frozen=True, slots=True)
class Restrictions:
    """Checked restrictions, needed to build sampling parameters."""

    grammar: str | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_tokens: bytes = b""
    """Bitmask of `allowed_token_ids`, which all choices share."""


NO_RESTRICTIONS = Restrictions()


async def check_restrictions(
    body: RestrictionFields, serving: "Serving", constraint: Constraint | None = None
) -> Restrictions:
    """Check token IDs, tokenize bad words and validate the grammar. `constraint` (of tool calls) takes precedence.

    Raises:
        ApiError: 400 if a restriction is invalid.
    """
    vocab_size = serving.facts.vocab_size
    for field, ids in (("logit_bias", body.logit_bias), ("allowed_token_ids", body.allowed_token_ids)):
        highest = max(ids, default=0) if ids else 0
        if highest >= vocab_size:
            raise invalid(f"{field}: {highest} is outside the vocabulary of {vocab_size} tokens", field)
    constraint = constraint or body.constraint()
    grammar = None if constraint is None else await serving.trials.grammar(constraint, _param(body))
    bad_words = bad_word_tokens(serving.tokenizer, body.bad_words or [])
    return Restrictions(grammar, bad_words, token_mask(body.allowed_token_ids or ()))


def bad_word_tokens(tokenizer: Tokenizer, words: list[str]) -> tuple[tuple[int, ...], ...]:
    """Return each word's tokens at the start of a text and, if different, after a space (as in vLLM)."""
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

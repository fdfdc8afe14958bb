"""Log-probabilities in OpenAI's two formats. Pure, except for token text lookups."""

from collections.abc import Callable, Sequence
from typing import Any

from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.tokenizer import Tokenizer

Name = Callable[[int], str]
"""Representation of a token: its text, or its ID (return_tokens_as_token_ids)."""
LOWEST = -9999.0  # JSON has no infinity; vLLM's value


def format_token_id(token_id: int) -> str:
    """Return vLLM's name of a token whose text may be ambiguous."""
    return f"token_id:{token_id}"


def completion_logprobs(
    tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], offset: int, name: Name | None = None
) -> dict[str, Any]:
    """Return /v1/completions' four parallel lists. `offset` is the start of the first token's text. A position without
    a logprob (the first token of an echoed prompt) has null in both lists.
    """
    name = name or tokenizer.token_text
    offsets = []
    for position in positions:
        offsets.append(offset)
        offset += len(tokenizer.token_text(position.token_ids[0]))
    return {
        "tokens": [name(position.token_ids[0]) for position in positions],
        "token_logprobs": [_number(position.logprobs[0]) if position.logprobs else None for position in positions],
        "top_logprobs": [
            {
                name(token_id): _number(value)
                for token_id, value in zip(position.token_ids, position.logprobs, strict=True)
            }
            if position.logprobs
            else None
            for position in positions
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], name: Name | None = None) -> dict[str, Any]:
    """Return /v1/chat/completions' list: one entry per token, with nested top_logprobs."""
    return {"content": [_chat_position(tokenizer, position, name) for position in positions]}


def prompt_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: one object per prompt token, keyed by token ID; null for the first token."""
    return [None, *(_by_token_id(tokenizer, position) for position in positions)]


def _by_token_id(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, Any]:
    """Return one position by token ID. `rank` is known for the token itself and for the top tokens, which are
    sorted.
    """
    ranks = [position.rank, *range(1, len(position.token_ids))]
    entries = zip(position.token_ids, position.logprobs, ranks, strict=True)
    return {
        str(token_id): {"logprob": _number(value), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, value, rank in entries
    }


def _chat_position(tokenizer: Tokenizer, position: TokenLogprobs, name: Name | None) -> dict[str, Any]:
    entries = [
        _chat_token(tokenizer, token_id, value, name)
        for token_id, value in zip(position.token_ids, position.logprobs, strict=True)
    ]
    return {**entries[0], "top_logprobs": entries[1:]}


def _chat_token(tokenizer: Tokenizer, token_id: int, value: float, name: Name | None) -> dict[str, Any]:
    """Return one token's entry; `bytes` are always those of its text."""
    text = tokenizer.token_text(token_id)
    return {"token": name(token_id) if name else text, "logprob": _number(value), "bytes": list(text.encode())}


def _number(value: float) -> float:
    return max(value, LOWEST)

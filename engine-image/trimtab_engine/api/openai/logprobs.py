"""Log-probabilities in OpenAI's two forms. Pure, but for looking up token texts."""

from collections.abc import Sequence
from typing import Any

from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.tokenizer import Tokenizer

LOWEST = -9999.0  # JSON has no infinity; vLLM writes this number too


def completion_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], offset: int) -> dict[str, Any]:
    """/v1/completions: four parallel lists. `offset` is where the first token's text begins. A position without a
    logprob, which the first token of an echoed prompt is, has null in both."""
    tokens = [tokenizer.token_text(position.token_ids[0]) for position in positions]
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "tokens": tokens,
        "token_logprobs": [_number(position.logprobs[0]) if position.logprobs else None for position in positions],
        "top_logprobs": [
            {
                tokenizer.token_text(token_id): _number(value)
                for token_id, value in zip(position.token_ids, position.logprobs, strict=True)
            }
            if position.logprobs
            else None
            for position in positions
        ],
        "text_offset": offsets,
    }


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs]) -> dict[str, Any]:
    """/v1/chat/completions: one entry per token, with the most likely ones inside."""
    return {"content": [_chat_position(tokenizer, position) for position in positions]}


def prompt_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """vLLM's prompt_logprobs: one object per token of the prompt, keyed by token id; the first token has none."""
    return [None, *(_by_token_id(tokenizer, position) for position in positions)]


def _by_token_id(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, Any]:
    """`rank` is known of the token itself and of the most likely ones, which come in order."""
    ranks = [position.rank, *range(1, len(position.token_ids))]
    entries = zip(position.token_ids, position.logprobs, ranks, strict=True)
    return {
        str(token_id): {"logprob": _number(value), "rank": rank, "decoded_token": tokenizer.token_text(token_id)}
        for token_id, value, rank in entries
    }


def _chat_position(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, Any]:
    entries = [
        _chat_token(tokenizer, token_id, value)
        for token_id, value in zip(position.token_ids, position.logprobs, strict=True)
    ]
    return {**entries[0], "top_logprobs": entries[1:]}


def _chat_token(tokenizer: Tokenizer, token_id: int, value: float) -> dict[str, Any]:
    text = tokenizer.token_text(token_id)
    return {"token": text, "logprob": _number(value), "bytes": list(text.encode())}


def _number(value: float) -> float:
    return max(value, LOWEST)

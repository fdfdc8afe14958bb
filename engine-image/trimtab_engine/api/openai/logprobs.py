"""Log-probabilities in OpenAI's two formats. Pure, except for token text lookups."""

import codecs
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trimtab_engine.scheduling.sampling import TokenLogprobs
from trimtab_engine.text.tokenizer import BROKEN, Tokenizer

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
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    tokens: list[str] = []
    values: list[float | None] = []
    tops: list[dict[str, float] | None] = []
    offsets: list[int] = []
    for position in positions:
        token_id = position.token_ids[0]
        added = _added_bytes(tokenizer, token_id, is_first=not position.logprobs)
        offsets.append(offset)
        offset += len(decoder.decode(added))
        tokens.append(name(token_id) if name else _name_bytes(added))
        values.append(_number(position.logprobs[0]) if position.logprobs else None)
        tops.append(_by_name(tokenizer, position, name) if position.logprobs else None)
    return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _added_bytes(tokenizer: Tokenizer, token_id: int, *, is_first: bool) -> bytes:
    """Return the bytes that a token adds to the text; the first one of a text may lose a blank."""
    text = tokenizer.token_text(token_id) if is_first else BROKEN
    return tokenizer.token_bytes(token_id) if BROKEN in text else text.encode()


def _by_name(tokenizer: Tokenizer, position: TokenLogprobs, name: Name | None) -> dict[str, float]:
    """Return the values of one position by token name. The chosen token is first and has its own value; a later token
    with the same name is named by its ID.
    """
    ids: dict[str, int] = {}
    values: dict[str, float] = {}
    for token_id, value in zip(position.token_ids, position.logprobs, strict=True):
        key = name(token_id) if name else _name_bytes(tokenizer.token_bytes(token_id))
        if ids.setdefault(key, token_id) != token_id:
            key = format_token_id(token_id)
        values[key] = _number(value)
    return values


def _name_bytes(added: bytes) -> str:
    r"""Return OpenAI's name of a token: its text, or bytes:\xf0\x9f if it is not whole characters."""
    try:
        return added.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in added)


def chat_logprobs(tokenizer: Tokenizer, positions: Sequence[TokenLogprobs], name: Name | None = None) -> dict[str, Any]:
    """Return /v1/chat/completions' list: one entry per token, with nested top_logprobs."""
    return {"content": [_chat_position(tokenizer, position, name) for position in positions]}


def prompt_logprobs(tokenizer: Tokenizer, positions: Iterable[TokenLogprobs]) -> list[dict[str, Any] | None]:
    """Return vLLM's prompt_logprobs: one object per prompt token, keyed by token ID; null for the first token."""
    return [None, *(_by_token_id(tokenizer, position) for position in positions)]


def _by_token_id(tokenizer: Tokenizer, position: TokenLogprobs) -> dict[str, Any]:
    """Return one position by token ID. `rank` is known for the token itself and for the top tokens, which are
    sorted.
    """
    ranks = [position.rank, *range(1, len(position.token_ids))]
    entries = zip(position.token_ids, position.logprobs, ranks, strict=True)
    return {
        str(token_id): {"logprob": _number(value), "rank": rank, "decoded_token": tokenizer.added_text(token_id)}
        for token_id, value, rank in entries
    }


def _chat_position(tokenizer: Tokenizer, position: TokenLogprobs, name: Name | None) -> dict[str, Any]:
    entries = [
        _chat_token(tokenizer, token_id, value, name)
        for token_id, value in zip(position.token_ids, position.logprobs, strict=True)
    ]
    return {**entries[0], "top_logprobs": entries[1:]}


def _chat_token(tokenizer: Tokenizer, token_id: int, value: float, name: Name | None) -> dict[str, Any]:
    """Return one token's entry. The `bytes` of all tokens join to the text; a token may be a part of a character."""
    added = tokenizer.token_bytes(token_id)
    token = name(token_id) if name else added.decode("utf-8", "replace")
    return {"token": token, "logprob": _number(value), "bytes": list(added)}


def _number(value: float) -> float:
    return max(value, LOWEST)

"""Prefix keys of a request's prompts, and the tokens that they cover (state_stream/key_ends.py)."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise

from fastapi import Request
from trimtab_router.protocol.prefix_keys import CUT_BYTES, CanonicalPrompt, canonical_prompts

from trimtab_engine.api.http.request_identity import key_salt
from trimtab_engine.api.openai.protocol import CompletionRequest, GenerationRequest
from trimtab_engine.api.openai.state import ServerState
from trimtab_engine.messages.state_stream import PrefixCuts
from trimtab_engine.state_stream.key_ends import align_token_bytes, text_ends, token_ends
from trimtab_engine.text.tokenizer import LONG_TEXT_CHARACTERS, Tokenizer, well_formed

TOKEN_ID_BYTES = 4


async def canonical_forms(state: ServerState, request: Request, body: GenerationRequest) -> list[CanonicalPrompt]:
    """Return the canonical form of each prompt; an empty list if no router listens."""
    if not state.core.state.reports_state:
        return []
    parsed = await request.json()  # parsed before, for validation
    return canonical_prompts(
        parsed, path=request.url.path, adapter=state.adapter_of(body.model), salt=key_salt(request)
    )


async def completion_cuts(
    state: ServerState, tokenizer: Tokenizer, request: Request, body: CompletionRequest, prompts: Sequence[list[int]]
) -> list[PrefixCuts]:
    """Return the keys of each prompt of a completion; an empty list if no router listens."""
    forms = await canonical_forms(state, request, body)
    if len(forms) != len(prompts):
        return []
    return [
        await text_cuts(tokenizer, form, prompt, token_ids, add_special_tokens=body.add_special_tokens is not False)
        if isinstance(prompt, str)
        else token_id_cuts(form)
        for form, prompt, token_ids in zip(forms, body.prompts(), prompts, strict=True)
    ]


async def text_cuts(
    tokenizer: Tokenizer, prompt: CanonicalPrompt, text: str, token_ids: Sequence[int], *, add_special_tokens: bool
) -> PrefixCuts:
    """Return the keys of a prompt whose text and tokens are known."""
    if len(text) < LONG_TEXT_CHARACTERS:
        return _text_cuts(tokenizer, prompt, text, token_ids, add_special_tokens)
    return await asyncio.to_thread(_text_cuts, tokenizer, prompt, text, token_ids, add_special_tokens)


def _text_cuts(
    tokenizer: Tokenizer, prompt: CanonicalPrompt, text: str, token_ids: Sequence[int], add_special_tokens: bool
) -> PrefixCuts:
    text = well_formed(text)
    encoded = text.encode()
    found = prompt.keys()
    ends = text_ends(prompt, encoded, len(found.keys))
    if ends:
        lengths = list(map(tokenizer.token_lengths.__getitem__, token_ids))
        if align_token_bytes(lengths, len(encoded), begins_special=token_ids[0] in tokenizer.special_ids):
            ends = token_ends(ends, lengths)
        else:
            after = tokenizer.ends_of_tokens(text, add_special_tokens=add_special_tokens)
            steps = [end - begin for begin, end in pairwise([0, *after])]
            ends = token_ends(_characters(encoded, ends), steps)
    return PrefixCuts(list(found.keys[: len(ends)]), ends, found.num_bytes)


def token_id_cuts(prompt: CanonicalPrompt) -> PrefixCuts:
    """Return the keys of a prompt of token IDs."""
    found = prompt.keys()
    tokens_per_key = CUT_BYTES // TOKEN_ID_BYTES
    ends = range(tokens_per_key, tokens_per_key * len(found.keys) + 1, tokens_per_key)
    return PrefixCuts(list(found.keys), list(ends))


def _characters(text: bytes, ends: Sequence[int]) -> list[int]:
    """Return byte positions as character positions; within a character, that before it."""
    if text.isascii():
        return list(ends)
    characters, positions, before = 0, [], 0
    for end in ends:
        begin = end
        while before < begin < len(text) and text[begin] & 0xC0 == 0x80:
            begin -= 1
        characters += len(text[before:begin].decode())
        positions.append(characters)
        before = begin
    return positions

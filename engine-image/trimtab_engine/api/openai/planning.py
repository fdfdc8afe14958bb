"""Conversion of a validated body to a plan: tokenization of prompts, and length checks against the model's context."""

from collections.abc import Sequence
from typing import Any

import msgspec
from fastapi import Request
from trimtab_router.protocol.prefix_keys import CanonicalPrompt

from trimtab_engine.api.http.dispatches import dispatch_of
from trimtab_engine.api.http.errors import invalid, shorten
from trimtab_engine.api.http.request_identity import key_salt
from trimtab_engine.api.metrics.tracing import TRACE_HEADERS
from trimtab_engine.api.openai.generation import GenerationPlan
from trimtab_engine.api.openai.media import Media, PromptMedia
from trimtab_engine.api.openai.prefix_cuts import text_cuts
from trimtab_engine.api.openai.prompt_fields import TemplateFields
from trimtab_engine.api.openai.protocol import (
    MAX_REPORTED,
    MAX_RETURNED_IDS,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    media_of,
)
from trimtab_engine.api.openai.response_builders import ResponseBuilder
from trimtab_engine.api.openai.restrictions import Restrictions
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.messages.state_stream import PrefixCuts
from trimtab_engine.multimodal.items import Span
from trimtab_engine.text.tokenizer import well_formed

MAX_RANK_CHARACTERS = 4
MAX_CHARACTERS_PER_TOKEN = 64  # no token is longer on average; longer texts are rejected before tokenization


async def completion_prompts(
    serving: Serving, body: CompletionRequest, *, max_tokens: int
) -> tuple[list[list[int]], list[str] | None]:
    """Return the token IDs of every prompt, and their texts if `echo` is set."""
    try:
        prompts = body.prompts()
    except ValueError as error:
        raise invalid(str(error), "prompt") from error
    ids, texts = await tokenize_prompts(
        serving, prompts, "prompt", add_special_tokens=body.add_special_tokens is not False
    )
    kept = [body.kept(prompt, max_model_len=serving.facts.max_model_len, max_tokens=max_tokens) for prompt in ids]
    for prompt_ids in kept:
        check_known(serving, prompt_ids, "prompt")
    if not body.echo:
        return kept, None
    decode = serving.tokenizer.decode
    if texts and all(len(prompt) == len(whole) for prompt, whole in zip(kept, ids, strict=True)):
        return kept, [well_formed(text) for text in texts]
    return kept, [decode(prompt, skip_special_tokens=body.skip_special_tokens) for prompt in kept]


async def tokenize_prompts(
    serving: Serving, prompts: Sequence[str | list[int]], param: str, *, add_special_tokens: bool
) -> tuple[list[list[int]], list[str]]:
    """Return the token IDs of prompts that are all texts or all token IDs; and the texts."""
    ids: list[list[int]] = []
    texts: list[str] = []
    for prompt in prompts:
        if isinstance(prompt, str):
            _check_length(serving, prompt, param)
            texts.append(prompt)
        else:
            ids.append(prompt)
    if texts:
        ids = await serving.tokenizer.encode_many_async(texts, add_special_tokens=add_special_tokens)
        if not all(ids):
            raise invalid(f"{param} has no tokens; send at least one", param)
    return ids, texts


async def chat_prompt(
    serving: Serving,
    body: ChatRequest,
    tools: Sequence[dict[str, Any]] | None,
    *,
    max_tokens: int | None,
    salt: str,
    forms: Sequence[CanonicalPrompt] = (),
) -> tuple[list[int], tuple[Span, ...], list[PrefixCuts]]:
    """Return the token IDs of a conversation up to the assistant's response, its images and videos, and the prefix keys
    of its canonical form, if any. Media are cached per salt.
    """
    media = media_of(body.messages)
    if media:
        taken = _check_media(serving, media)
        if body.truncate_prompt_tokens is not None:
            raise invalid(
                "truncate_prompt_tokens is not allowed with images and videos; remove it", "truncate_prompt_tokens"
            )
    text = await render_chat(serving, body.messages, body, tools=tools)
    ids = await tokenize_bounded(serving, text, "messages", add_special_tokens=bool(body.add_special_tokens))
    if not ids:
        raise invalid("messages have no tokens; send at least one", "messages")
    ids = body.kept(ids, max_model_len=serving.facts.max_model_len, max_tokens=max_tokens)
    check_known(serving, ids, "messages")
    cuts = [
        await text_cuts(serving.tokenizer, form, text, ids, add_special_tokens=bool(body.add_special_tokens))
        for form in forms
    ]
    if not media:
        return ids, (), cuts
    items = await taken.items(media, salt=salt, max_tokens=serving.facts.max_model_len)
    expanded, spans = taken.expand_placeholders(ids, items)
    cuts = [_shift_cuts(each, taken.expanded_ends(each.ends, ids, spans)) for each in cuts]
    return expanded, spans, cuts


def _shift_cuts(cuts: PrefixCuts, ends: list[int]) -> PrefixCuts:
    return msgspec.structs.replace(cuts, keys=cuts.keys[: len(ends)], ends=ends)


def _check_media(serving: Serving, media: Sequence[Media]) -> PromptMedia:
    """Return the media processor.

    Raises:
        ApiError: 400 if the model does not support the modality, or there are too many items.
    """
    if serving.media is None:
        kinds = " and ".join(sorted({f"{each.modality}_url" for each in media}))
        raise invalid(f"content of type {kinds} is not supported by this model; send text", "messages")
    serving.media.check(media)
    return serving.media


def reject_media(messages: Sequence[ChatMessage], route: str) -> None:
    """Raise ApiError 400 for images and videos on routes that do not accept them."""
    if media_of(messages):
        raise invalid(f"images and videos are not supported by {route} yet; send text", "messages")


async def render_chat(
    serving: Serving,
    messages: Sequence[ChatMessage],
    fields: TemplateFields,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """Return the conversation rendered with the model's chat template and the request's template fields."""
    return await serving.renderer.render(
        [message.for_template(serving.renderer.content_forms) for message in messages],
        tools=tools,
        variables=fields.template_variables or None,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        max_characters=serving.facts.max_model_len * MAX_CHARACTERS_PER_TOKEN,
    )


async def tokenize_bounded(serving: Serving, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Return the tokens of a text after a check of its length."""
    _check_length(serving, text, param)
    return await serving.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)


def build_plan(
    state: ServerState,
    serving: Serving,
    request: Request,
    body: GenerationRequest,
    builder: ResponseBuilder,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    restrictions: Restrictions,
    arrival: float,
    spans: tuple[Span, ...] = (),
    cuts: Sequence[PrefixCuts] = (),
) -> GenerationPlan:
    """Return the plan. `max_tokens` None means as many as fit; 0 means one token that is not returned. `spans` are the
    images and videos of a single prompt, `cuts` the prefix keys of each prompt.
    """
    vocab_size = serving.facts.vocab_size
    requested = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"  # field with the number of logprobs
    for name, count in ((requested, logprobs), ("prompt_logprobs", prompt_logprobs)):
        if count is not None and count > state.options.max_logprobs:
            raise invalid(f"{name} is {count}; the maximum is {state.options.max_logprobs}", name)
    outside = [token_id for token_id in body.stop_token_ids or () if token_id >= vocab_size]
    if outside:
        raise invalid(
            f"stop_token_ids: {outside[0]} is outside the vocabulary of {vocab_size} tokens", "stop_token_ids"
        )
    check_returned_ids(body, prompts)
    _check_reported(body, prompts, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    most = state.options.sampling_defaults.max_new_tokens
    rooms = [_max_new_tokens(serving, body, prompt, max_tokens, most) for prompt in prompts]
    special_stop = serving.tokenizer.special_stop_tokens(body.stop_strings, vocab_size)
    sampling = [
        body.sampling(
            max_tokens=room,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            index=index,
            restrictions=restrictions,
            special_stop=special_stop,
            defaults=state.options.sampling_defaults,
        )
        for room in rooms
        for index in range(body.n)
    ]
    return GenerationPlan(
        request_id=builder.request_id,
        prompts=prompts,
        sampling=sampling,
        stop=body.stop_strings,
        special_stop=special_stop,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        arrival_time=arrival,
        cache_salt=cache_salt_of(request, body),
        adapter=state.adapter_of(body.model),
        spans=spans,
        priority=body.priority,
        data_parallel_rank=pinned_rank(state, request),
        stream_interval=body.stream_interval or state.options.stream_interval,
        trace_headers={name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        if state.options.otlp_traces_endpoint
        else {},
        cuts=cuts,
        dispatch=dispatch_of(request),
    )


def cache_salt_of(request: Request, body: GenerationRequest) -> str:
    """Return the cache salt of a request: the tenant's and its own."""
    return key_salt(request) + (body.cache_salt or "")


def _check_reported(
    body: GenerationRequest,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> None:
    """Check the number of reported log-probabilities: choices x positions x width. Streams do not retain those of the
    output; output without max_tokens is counted during generation (respond.py).
    """
    requested = 0
    if prompt_logprobs is not None:
        requested += body.n * sum(len(prompt) - 1 for prompt in prompts) * (1 + prompt_logprobs)
    if logprobs is not None and max_tokens is not None and not body.stream:
        requested += body.n * len(prompts) * max_tokens * (1 + logprobs)
    if requested > MAX_REPORTED:
        raise invalid(
            f"the response would have {requested} log-probabilities (choices x positions x tokens per position), above "
            f"{MAX_REPORTED}; lower n, max_tokens, logprobs or prompt_logprobs",
            "logprobs" if prompt_logprobs is None else "prompt_logprobs",
        )


def check_returned_ids(body: GenerationRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Check the number of returned prompt token IDs: a chat response has its prompt once, a completion once per choice.

    Raises:
        ApiError: 400 above MAX_RETURNED_IDS.
    """
    times = 1 if isinstance(body, ChatRequest) else body.n
    num_ids = times * sum(len(prompt) for prompt in prompts)
    if body.return_token_ids and num_ids > MAX_RETURNED_IDS:
        raise invalid(
            f"the response would have {num_ids} prompt token ids (choices x tokens), above {MAX_RETURNED_IDS}; "
            f"lower n or send fewer prompts",
            "return_token_ids",
        )


def pinned_rank(state: ServerState, request: Request) -> int | None:
    """Return the data-parallel core of the header X-data-parallel-rank, or None if it is not set."""
    text = request.headers.get("x-data-parallel-rank")
    if text is None:
        return None
    ranks = state.core.ranks
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_RANK_CHARACTERS
    if not is_number or int(text) not in ranks:
        there = f"{ranks[0]} to {ranks[-1]}"
        raise invalid(f"X-data-parallel-rank: {shorten(text)!r} is not a rank; use {there}", "X-data-parallel-rank")
    return int(text)


def _max_new_tokens(
    serving: Serving, body: GenerationRequest, prompt: list[int], max_tokens: int | None, most: int | None
) -> int:
    """Return the number of tokens that can be generated after this prompt, `most` at most.

    Raises:
        ApiError: 400 if the requested tokens do not fit.
    """
    limit, num_ids = serving.facts.max_model_len, len(prompt)
    if num_ids >= limit:
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, your request has {num_ids} input tokens, "
            f"and at least one output token is required. Please reduce the length of the input.",
            "prompt",
        )
    if max_tokens is not None and isinstance(body, ChatRequest) and body.is_cut_to_context:
        max_tokens = min(max_tokens, limit - num_ids)
    if max_tokens is not None and num_ids + max_tokens > limit:
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens "
            f"and your prompt contains {num_ids} input tokens, {num_ids + max_tokens} in all. Please reduce either.",
            "max_tokens",
        )
    room = limit - num_ids if max_tokens is None else max(max_tokens, 1)
    room = room if most is None else min(room, most)
    if body.min_tokens > room:
        raise invalid(f"min_tokens is {body.min_tokens}, but only {room} tokens can be generated", "min_tokens")
    return room


def _check_length(serving: Serving, text: str, param: str) -> None:
    limit = serving.facts.max_model_len
    if len(text) > limit * MAX_CHARACTERS_PER_TOKEN:
        raise invalid(
            f"this model's maximum context length is {limit} tokens; the {param} has {len(text)} characters, "
            f"more than {limit} tokens; shorten it",
            param,
        )


def check_known(serving: Serving, ids: list[int], param: str) -> None:
    """Check that the model has an embedding for every token ID. A tokenizer may have tokens that were added after
    training.
    """
    highest, vocab_size = max(ids), serving.facts.vocab_size
    if highest >= vocab_size:
        name = serving.tokenizer.token_name(highest)
        shown = f" ({shorten(name)!r})" if name else ""
        raise invalid(f"token id {highest}{shown} is out of vocabulary; the model has {vocab_size} tokens", param)

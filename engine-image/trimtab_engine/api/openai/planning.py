"""From a checked body to a plan: prompts become token ids, and lengths are judged against the model's context."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request

from trimtab_engine.api.http.errors import invalid, shorten
from trimtab_engine.api.http.request_identity import key_salt
from trimtab_engine.api.metrics.tracing import TRACE_HEADERS
from trimtab_engine.api.openai.forms import AnswerForm
from trimtab_engine.api.openai.generation import GenerationPlan
from trimtab_engine.api.openai.media import Media, PromptMedia
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
from trimtab_engine.api.openai.restrictions import Restrictions
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.multimodal.items import Span

MAX_RANK_CHARACTERS = 4
MAX_CHARACTERS_PER_TOKEN = 64  # no prompt within max_model_len is longer; beyond it, tokenising would be a waste


async def completion_prompts(
    serving: Serving, body: CompletionRequest, *, max_tokens: int
) -> tuple[list[list[int]], list[str] | None]:
    """Token ids of every prompt, and their texts where they are echoed."""
    try:
        prompts = body.prompts()
    except ValueError as error:
        raise invalid(str(error), "prompt") from error
    ids, texts = await ids_of_prompts(
        serving, prompts, "prompt", add_special_tokens=body.add_special_tokens is not False
    )
    kept = [body.kept(prompt, max_model_len=serving.facts.max_model_len, max_tokens=max_tokens) for prompt in ids]
    for prompt_ids in kept:
        check_known(serving, prompt_ids, "prompt")
    if not body.echo:
        return kept, None
    decode = serving.tokenizer.decode
    if texts and all(len(prompt) == len(whole) for prompt, whole in zip(kept, ids, strict=True)):
        return kept, texts
    return kept, [decode(prompt, skip_special_tokens=body.skip_special_tokens) for prompt in kept]


async def ids_of_prompts(
    serving: Serving, prompts: Sequence[str | list[int]], param: str, *, add_special_tokens: bool
) -> tuple[list[list[int]], list[str]]:
    """Token ids of prompts that are texts or ids already, all of one kind; and the texts."""
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
    serving: Serving, body: ChatRequest, tools: Sequence[dict[str, Any]] | None, *, max_tokens: int | None, salt: str
) -> tuple[list[int], tuple[Span, ...]]:
    """Token ids of a conversation, up to where the assistant's answer begins, and the images and videos in it, which
    are shared with requests of the same salt."""
    media = media_of(body.messages)
    if media:
        taken = _check_media(serving, media)
        if body.truncate_prompt_tokens is not None:
            raise invalid("truncate_prompt_tokens could cut an image in two; leave it out", "truncate_prompt_tokens")
    text = await rendered(serving, body.messages, body, tools=tools)
    ids = await bounded(serving, text, "messages", add_special_tokens=bool(body.add_special_tokens))
    if not ids:
        raise invalid("messages have no tokens; send at least one", "messages")
    ids = body.kept(ids, max_model_len=serving.facts.max_model_len, max_tokens=max_tokens)
    check_known(serving, ids, "messages")
    if not media:
        return ids, ()
    return taken.placed(ids, await taken.items(media, salt=salt, max_tokens=serving.facts.max_model_len))


def _check_media(serving: Serving, media: Sequence[Media]) -> PromptMedia:
    """What reads images and videos. ApiError 400 where nothing does, for kinds that are not taken, and for too many."""
    if serving.media is None:
        kinds = " and ".join(sorted({f"{each.modality}_url" for each in media}))
        raise invalid(f"content of type {kinds} is not supported by this model; send text", "messages")
    serving.media.check(media)
    return serving.media


def refuse_media(messages: Sequence[ChatMessage], route: str) -> None:
    """ApiError 400 for images and videos, where only what generates takes them."""
    if media_of(messages):
        raise invalid(f"images and videos are not supported by {route} yet; send text", "messages")


async def rendered(
    serving: Serving,
    messages: Sequence[ChatMessage],
    fields: TemplateFields,
    *,
    tools: Sequence[dict[str, Any]] | None = None,
) -> str:
    """The conversation as the model's template writes it, switched as `fields` say."""
    try:
        written = [message.for_template() for message in messages]
    except ValueError as error:
        raise invalid(str(error), "messages") from error
    return await serving.renderer.render(
        written,
        tools=tools,
        variables=fields.chat_template_kwargs,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        max_characters=serving.facts.max_model_len * MAX_CHARACTERS_PER_TOKEN,
    )


async def bounded(serving: Serving, text: str, param: str, *, add_special_tokens: bool) -> list[int]:
    """Tokens of a text that is not absurdly long."""
    _check_length(serving, text, param)
    return await serving.tokenizer.encode_async(text, add_special_tokens=add_special_tokens)


def plan_of(
    state: ServerState,
    serving: Serving,
    request: Request,
    body: GenerationRequest,
    form: AnswerForm,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
    restrictions: Restrictions,
    arrival: float,
    spans: tuple[Span, ...] = (),
) -> GenerationPlan:
    """`max_tokens` None: as much as fits; 0: one token, which the answer leaves out. `spans`: images and videos of the
    only prompt."""
    vocab_size = serving.facts.vocab_size
    asked = "top_logprobs" if isinstance(body, ChatRequest) else "logprobs"  # the field that holds the number
    for name, count in ((asked, logprobs), ("prompt_logprobs", prompt_logprobs)):
        if count is not None and count > state.options.max_logprobs:
            raise invalid(f"{name} is {count}; at most {state.options.max_logprobs} are given here", name)
    outside = [token_id for token_id in body.stop_token_ids or () if token_id >= vocab_size]
    if outside:
        raise invalid(f"stop_token_ids has {outside[0]}, out of a vocabulary of {vocab_size}", "stop_token_ids")
    check_returned_ids(body, prompts)
    _check_reported(body, prompts, max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
    rooms = [_room(serving, body, prompt, max_tokens) for prompt in prompts]
    sampling = [
        body.sampling(
            max_tokens=room,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            index=index,
            restrictions=restrictions,
        )
        for room in rooms
        for index in range(body.n)
    ]
    return GenerationPlan(
        request_id=form.request_id,
        prompts=prompts,
        sampling=sampling,
        stop=body.stop_strings,
        include_stop=body.include_stop_str_in_output,
        skip_special_tokens=body.skip_special_tokens,
        arrival_time=arrival,
        cache_salt=salt_of(request, body),
        adapter=state.adapter_of(body.model),
        spans=spans,
        priority=body.priority,
        data_parallel_rank=pinned_rank(state, request),
        stream_interval=body.stream_interval or state.options.stream_interval,
        trace_headers={name: request.headers[name] for name in TRACE_HEADERS if name in request.headers}
        if state.options.otlp_traces_endpoint
        else {},
    )


def salt_of(request: Request, body: GenerationRequest) -> str:
    """What a request shares with others only of the same: the tenant's, and its own."""
    return key_salt(request) + (body.cache_salt or "")


def _check_reported(
    body: GenerationRequest,
    prompts: list[list[int]],
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> None:
    """One HTTP request may have so many log-probabilities reported: choices x positions x width. A stream keeps none of
    those of its output; what is generated without max_tokens is counted as it comes (respond.py)."""
    asked = 0
    if prompt_logprobs is not None:
        asked += body.n * sum(len(prompt) - 1 for prompt in prompts) * (1 + prompt_logprobs)
    if logprobs is not None and max_tokens is not None and not body.stream:
        asked += body.n * len(prompts) * max_tokens * (1 + logprobs)
    if asked > MAX_REPORTED:
        raise invalid(
            f"{asked} log-probabilities would be reported (choices x positions x tokens at each); at most "
            f"{MAX_REPORTED} are in one answer: lower n, max_tokens, logprobs or prompt_logprobs",
            "logprobs" if prompt_logprobs is None else "prompt_logprobs",
        )


def check_returned_ids(body: GenerationRequest, prompts: Sequence[Sequence[int]]) -> None:
    """Token ids of prompts that come back: a chat answer has its prompt once, a completion with each choice. ApiError
    400 above MAX_RETURNED_IDS."""
    times = 1 if isinstance(body, ChatRequest) else body.n
    num_ids = times * sum(len(prompt) for prompt in prompts)
    if body.return_token_ids and num_ids > MAX_RETURNED_IDS:
        raise invalid(
            f"{num_ids} token ids of prompts would come back (choices x tokens); at most {MAX_RETURNED_IDS} are in one "
            f"answer: lower n, or send fewer prompts",
            "return_token_ids",
        )


def pinned_rank(state: ServerState, request: Request) -> int | None:
    """The data-parallel core that X-data-parallel-rank asks for; None: the client leaves the choice."""
    text = request.headers.get("x-data-parallel-rank")
    if text is None:
        return None
    ranks = state.core.ranks
    is_number = text.isascii() and text.isdigit() and len(text) <= MAX_RANK_CHARACTERS
    if not is_number or int(text) not in ranks:
        there = f"{ranks[0]} to {ranks[-1]}"
        raise invalid(f"X-data-parallel-rank is {shorten(text)!r}; ranks here are {there}", "X-data-parallel-rank")
    return int(text)


def _room(serving: Serving, body: GenerationRequest, prompt: list[int], max_tokens: int | None) -> int:
    """Tokens that may be generated behind this prompt. Raises 400 when they do not fit."""
    limit, asked = serving.facts.max_model_len, len(prompt)
    if asked >= limit:
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, your request has {asked} input tokens, "
            f"and one token of output needs room. Please reduce the length of the input.",
            "prompt",
        )
    if max_tokens is not None and asked + max_tokens > limit:
        raise invalid(
            f"This model's maximum context length is {limit} tokens. However, you requested {max_tokens} output tokens "
            f"and your prompt contains {asked} input tokens, {asked + max_tokens} in all. Please reduce either.",
            "max_tokens",
        )
    room = limit - asked if max_tokens is None else max(max_tokens, 1)
    if body.min_tokens > room:
        raise invalid(f"min_tokens is {body.min_tokens}, but at most {room} tokens can be generated", "min_tokens")
    return room


def _check_length(serving: Serving, text: str, param: str) -> None:
    limit = serving.facts.max_model_len
    if len(text) > limit * MAX_CHARACTERS_PER_TOKEN:
        raise invalid(
            f"this model's maximum context length is {limit} tokens; the {param} has {len(text)} characters, which "
            f"cannot be fewer tokens than that; shorten it",
            param,
        )


def check_known(serving: Serving, ids: list[int], param: str) -> None:
    """The model must have an embedding for every token id, whether the client sent it or the tokenizer made it of text:
    a tokenizer may have tokens that were added after the model was trained."""
    highest, vocab_size = max(ids), serving.facts.vocab_size
    if highest >= vocab_size:
        name = serving.tokenizer.token_name(highest)
        shown = f" ({shorten(name)!r})" if name else ""
        raise invalid(f"token id {highest}{shown} is out of vocabulary; the model has {vocab_size} tokens", param)

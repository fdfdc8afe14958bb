"""Preparation of a validated body: plan, response format and echo. Errors are 400, both for generation and for
rendering.
"""

import time
from dataclasses import dataclass

from fastapi import Request

from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.http.request_identity import request_id_of
from trimtab_engine.api.openai.answer_reader import ResponseParser
from trimtab_engine.api.openai.constraints import Constraint
from trimtab_engine.api.openai.generation import GenerationPlan
from trimtab_engine.api.openai.parsed_chat_response import ParsedChatResponseBuilder
from trimtab_engine.api.openai.planning import build_plan, cache_salt_of, chat_prompt, completion_prompts
from trimtab_engine.api.openai.prefix_cuts import canonical_forms, completion_cuts
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest
from trimtab_engine.api.openai.reasoning_parsers import NEEDS_SPECIAL_TOKENS, PARSERS
from trimtab_engine.api.openai.respond import Echo
from trimtab_engine.api.openai.response_builders import ChatResponseBuilder, CompletionResponseBuilder, ResponseBuilder
from trimtab_engine.api.openai.restrictions import check_restrictions
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.api.openai.tools import ToolUse, build_tool_use

PROMPT_END_TOKENS = 8  # in which a template may have opened or closed the reasoning section
DEFAULT_MAX_TOKENS = 16  # of a completion without max_tokens; OpenAI's default


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One request, ready to run. `constraint` is the constraint of its output, or None."""

    builder: ResponseBuilder
    plan: GenerationPlan
    echo: Echo | None = None
    constraint: Constraint | None = None


async def prepare_completion(
    state: ServerState, serving: Serving, body: CompletionRequest, request: Request
) -> PreparedRequest:
    arrival = time.monotonic()
    builder = CompletionResponseBuilder(
        state.check_model(body.model),
        serving.tokenizer,
        request_id_of(request, body.request_id),
        tokens_by_id=bool(body.return_tokens_as_token_ids),
    )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts, texts = await completion_prompts(serving, body, max_tokens=max_tokens)
    plan = build_plan(
        state,
        serving,
        request,
        body,
        builder,
        prompts,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
        restrictions=await check_restrictions(body, serving),
        arrival=arrival,
        cuts=await completion_cuts(state, serving.tokenizer, request, body, prompts),
    )
    echo = None if texts is None else Echo(texts, alone=max_tokens == 0)
    return PreparedRequest(builder, plan, echo, body.constraint())


async def prepare_chat(state: ServerState, serving: Serving, body: ChatRequest, request: Request) -> PreparedRequest:
    arrival = time.monotonic()
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens is {body.min_tokens}, above max_completion_tokens {max_tokens}", "min_tokens")
    use = build_tool_use(
        body,
        template_knows_tools=serving.renderer.uses_tools,
        auto_parser=state.options.tool_call_parser if state.options.enable_auto_tool_choice else None,
        is_constrained=body.constraint() is not None,
    )
    model = state.check_model(body.model)
    salt = cache_salt_of(request, body)
    forms = await canonical_forms(state, request, body)
    ids, spans, cuts = await chat_prompt(serving, body, use.for_template, max_tokens=max_tokens, salt=salt, forms=forms)
    builder = _chat_response_builder(state, serving, body, request, use, model, ids)
    plan = build_plan(
        state,
        serving,
        request,
        body,
        builder,
        [ids],
        max_tokens=max_tokens,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        restrictions=await check_restrictions(body, serving, use.constraint),
        arrival=arrival,
        spans=spans,
        cuts=cuts,
    )
    return PreparedRequest(builder, plan, constraint=use.constraint or body.constraint())


def _chat_response_builder(
    state: ServerState,
    serving: Serving,
    body: ChatRequest,
    request: Request,
    use: ToolUse,
    model: str,
    prompt_ids: list[int],
) -> ChatResponseBuilder:
    """Return the chat format.

    Tool calls and harmony channels are parsed from text with special tokens, because some models write them so. With a
    grammar from the first token on there is no reasoning to parse.
    """
    request_id, tokens_by_id = request_id_of(request, body.request_id), bool(body.return_tokens_as_token_ids)
    name = state.options.reasoning_parser
    if body.include_reasoning is False and name is None:
        raise invalid("include_reasoning requires an engine started with --reasoning-parser", "include_reasoning")
    if name is not None and (use.constraint or body.constraint()) is not None:
        name = None
    if use.parser is None and name is None:
        return ChatResponseBuilder(model, serving.tokenizer, request_id, tokens_by_id=tokens_by_id)
    if use.parser is not None or name in NEEDS_SPECIAL_TOKENS:
        body.skip_special_tokens = False
    prompt_end = ""
    if name is not None:
        of_template = serving.tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:])
        prompt_end = body.messages[-1].text if body.continue_final_message else of_template
    make_tools, include_reasoning = use.parser, body.include_reasoning is not False

    def make_reader() -> ResponseParser:
        reasoning = None if name is None else PARSERS[name](prompt_end)
        return ResponseParser(reasoning, make_tools() if make_tools else None, include_reasoning=include_reasoning)

    return ParsedChatResponseBuilder(
        model, serving.tokenizer, request_id, make_reader, use.only_first, tokens_by_id=tokens_by_id
    )

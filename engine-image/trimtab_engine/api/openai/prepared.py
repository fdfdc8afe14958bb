"""From a checked body to all that answering it takes: the plan, the form of the answer, what is echoed. What these find
wrong is 400 wherever the request goes: to the engine, or only to be rendered."""

import time
from dataclasses import dataclass

from fastapi import Request

from trimtab_engine.api.http.errors import invalid
from trimtab_engine.api.http.request_identity import request_id_of
from trimtab_engine.api.openai.answer_reader import AnswerReader
from trimtab_engine.api.openai.constraints import Constraint
from trimtab_engine.api.openai.forms import AnswerForm, ChatForm, CompletionForm
from trimtab_engine.api.openai.generation import GenerationPlan
from trimtab_engine.api.openai.parsed_form import ParsedForm
from trimtab_engine.api.openai.planning import chat_prompt, completion_prompts, plan_of, salt_of
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest
from trimtab_engine.api.openai.reasoning_parsers import PARSERS, WRITTEN_WITH_SPECIAL_TOKENS
from trimtab_engine.api.openai.respond import Echo
from trimtab_engine.api.openai.restrictions import restrictions_of
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.api.openai.tools import ToolUse, tool_use_of

PROMPT_END_TOKENS = 8  # in which a template may have begun, or ended, the model's thoughts
DEFAULT_MAX_TOKENS = 16  # of a completion that does not say; OpenAI's number


@dataclass(frozen=True, slots=True)
class Prepared:
    """One request, ready to run. `constraint` is what its output must match; None: anything."""

    form: AnswerForm
    plan: GenerationPlan
    echo: Echo | None = None
    constraint: Constraint | None = None


async def prepared_completion(
    state: ServerState, serving: Serving, body: CompletionRequest, request: Request
) -> Prepared:
    arrival = time.monotonic()
    form = CompletionForm(
        state.check_model(body.model),
        serving.tokenizer,
        request_id_of(request, body.request_id),
        tokens_by_id=bool(body.return_tokens_as_token_ids),
    )
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    prompts, texts = await completion_prompts(serving, body, max_tokens=max_tokens)
    plan = plan_of(
        state,
        serving,
        request,
        body,
        form,
        prompts,
        max_tokens=max_tokens,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
        restrictions=await restrictions_of(body, serving),
        arrival=arrival,
    )
    echo = None if texts is None else Echo(texts, alone=max_tokens == 0)
    return Prepared(form, plan, echo, body.constraint())


async def prepared_chat(state: ServerState, serving: Serving, body: ChatRequest, request: Request) -> Prepared:
    arrival = time.monotonic()
    max_tokens = body.max_completion_tokens or body.max_tokens
    if max_tokens is not None and body.min_tokens > max_tokens:
        raise invalid(f"min_tokens is {body.min_tokens}, above max_completion_tokens {max_tokens}", "min_tokens")
    use = tool_use_of(
        body,
        template_knows_tools=serving.renderer.uses_tools,
        auto_parser=state.options.tool_call_parser if state.options.enable_auto_tool_choice else None,
        is_constrained=body.constraint() is not None,
    )
    model = state.check_model(body.model)
    salt = salt_of(request, body)
    ids, spans = await chat_prompt(serving, body, use.for_template, max_tokens=max_tokens, salt=salt)
    form = _chat_form(state, serving, body, request, use, model, ids)
    plan = plan_of(
        state,
        serving,
        request,
        body,
        form,
        [ids],
        max_tokens=max_tokens,
        logprobs=body.num_logprobs,
        prompt_logprobs=body.prompt_logprobs,
        restrictions=await restrictions_of(body, serving, use.constraint),
        arrival=arrival,
        spans=spans,
    )
    return Prepared(form, plan, constraint=use.constraint or body.constraint())


def _chat_form(
    state: ServerState,
    serving: Serving,
    body: ChatRequest,
    request: Request,
    use: ToolUse,
    model: str,
    prompt_ids: list[int],
) -> ChatForm:
    """Calls, and thoughts on channels, are read from text in which special tokens are not skipped: some models write
    them so. Where a grammar holds the answer from its first token on there are no thoughts to read."""
    request_id, tokens_by_id = request_id_of(request, body.request_id), bool(body.return_tokens_as_token_ids)
    name = state.options.reasoning_parser
    if body.include_reasoning is False and name is None:
        raise invalid("include_reasoning needs an engine that was started with --reasoning-parser", "include_reasoning")
    if name is not None and (use.constraint or body.constraint()) is not None:
        name = None
    if use.parser is None and name is None:
        return ChatForm(model, serving.tokenizer, request_id, tokens_by_id=tokens_by_id)
    if use.parser is not None or name in WRITTEN_WITH_SPECIAL_TOKENS:
        body.skip_special_tokens = False
    prompt_end = ""
    if name is not None:
        of_template = serving.tokenizer.decode(prompt_ids[-PROMPT_END_TOKENS:])
        prompt_end = body.messages[-1].text if body.continue_final_message else of_template
    make_tools, tells_thoughts = use.parser, body.include_reasoning is not False

    def make_reader() -> AnswerReader:
        reasoning = None if name is None else PARSERS[name](prompt_end)
        return AnswerReader(reasoning, make_tools() if make_tools else None, tells_thoughts=tells_thoughts)

    return ParsedForm(model, serving.tokenizer, request_id, make_reader, use.only_first, tokens_by_id=tokens_by_id)

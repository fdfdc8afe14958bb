"""Invalid requests are rejected within milliseconds, whatever the number of errors."""

import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError
from trimtab_engine.api.openai.embedding_request import EmbeddingRequest
from trimtab_engine.api.openai.protocol import (
    FIELDS_WITHOUT_EFFECT,
    UNSUPPORTED,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    TokenizeRequest,
)
from trimtab_engine.api.openai.unsupported_routes import UNSUPPORTED as UNSUPPORTED_ROUTES
from trimtab_engine.text.chat_template import ContentForm

API = Path(__file__).parents[4] / "docs" / "reference" / "api.md"
MANY = 200_000  # a report on each of them took 10 s and 800 MB
MAX_FINDINGS = 10
CPU_SECONDS = 1.0


def chat(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "a", **message}]}


@pytest.mark.usefixtures("frozen_gc")
@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}),
        (CompletionRequest, {"prompt": [1.5] * MANY}),
        (CompletionRequest, {"prompt": [[-1] * MANY]}),
        (CompletionRequest, {"prompt": ["a"] * MANY + [1]}),
        (CompletionRequest, {"prompt": "a", "stop_token_ids": [-1] * MANY}),
        (CompletionRequest, {"prompt": "a", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "a", **{f"k{i}": 1 for i in range(MANY)}}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, chat(content=[{"type": "text"}] * MANY)),
        (ChatRequest, chat(**{f"k{i}": 1 for i in range(MANY)})),
        (ChatRequest, chat(content=[{"type": "text", "text": "a", **{f"k{i}": 1 for i in range(MANY)}}])),
        (TokenizeRequest, {"messages": [{}] * MANY}),
        (TokenizeRequest, {"prompt": "a", **{f"k{i}": 1 for i in range(MANY)}}),
    ],
)
def test_request_with_many_errors_reports_the_first_few(model: type[BaseModel], body: dict[str, Any]) -> None:
    began = time.thread_time()
    with pytest.raises(ValidationError) as refused:
        model.model_validate(body)
    assert refused.value.error_count() <= MAX_FINDINGS
    assert time.thread_time() - began < CPU_SECONDS


@pytest.mark.parametrize(("given", "sampled"), [(None, 1.0), (0.0, 0.0), (1e-300, 0.0), (1e-6, 0.0), (1e-5, 1e-5)])
def test_tiny_temperature_is_greedy(given: float | None, sampled: float) -> None:
    request = CompletionRequest.model_validate({"prompt": "a", "temperature": given})
    assert request.sampling(max_tokens=1, logprobs=None, index=0).temperature == sampled


@pytest.mark.parametrize("name", [*UNSUPPORTED, *FIELDS_WITHOUT_EFFECT, *UNSUPPORTED_ROUTES])
def test_api_page_lists_unsupported_and_ignored_fields(name: str) -> None:
    assert f"`{name}`" in API.read_text()


SHARED_DEFAULTS: dict[str, Any] = {
    "frequency_penalty": None, "logit_bias": None, "n": 1, "presence_penalty": None, "seed": None, "stop": [],
    "stream": False, "stream_options": None, "temperature": None, "top_p": None, "user": None,
    "use_beam_search": False, "top_k": None, "min_p": None, "repetition_penalty": None, "watermarking": None,
    "length_penalty": 1.0, "stop_token_ids": [], "include_stop_str_in_output": False, "ignore_eos": False,
    "min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None, "truncation_side": None, "allowed_token_ids": None, "prompt_logprobs": None,
    "logprob_token_ids": None, "bad_words": [], "response_format": None, "structured_outputs": None, "priority": 0,
    "session_id": None, "return_tokens_as_token_ids": None, "return_token_ids": None,
    "routed_experts_prompt_start": 0, "return_token_offsets": False, "return_mm_kwargs": True, "cache_salt": None,
    "kv_transfer_params": None, "ec_transfer_params": None, "vllm_xargs": None, "repetition_detection": None,
    "thinking_token_budget": None, "stream_interval": None,
}  # fmt: skip
"""vLLM's fields of both kinds of completions with its defaults, as sent by clients that dump their request model."""
DEFAULTS: dict[type[BaseModel], dict[str, Any]] = {
    CompletionRequest: SHARED_DEFAULTS | {
        "prompt": "a", "echo": False, "logprobs": None, "max_tokens": 16, "suffix": None, "prompt_embeds": None,
        "add_special_tokens": True,
    },
    ChatRequest: SHARED_DEFAULTS | chat() | {
        "logprobs": False, "top_logprobs": 0, "max_tokens": None, "max_completion_tokens": None, "tools": None,
        "tool_choice": "none", "reasoning_effort": None, "include_reasoning": True, "parallel_tool_calls": True,
        "echo": False, "add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False,
        "documents": None, "chat_template": None, "chat_template_kwargs": None, "media_io_kwargs": None,
        "mm_processor_kwargs": None, "return_prompt_text": None,
    },
}  # fmt: skip


@pytest.mark.parametrize("model", DEFAULTS)
def test_all_vllm_fields_at_defaults_are_accepted(model: type[BaseModel]) -> None:
    model.model_validate(DEFAULTS[model])


@pytest.mark.parametrize("model", DEFAULTS)
def test_every_vllm_field_is_supported_or_rejected_by_name(model: type[BaseModel]) -> None:
    for name in DEFAULTS[model].keys() - model.model_fields.keys() - {*FIELDS_WITHOUT_EFFECT}:
        with pytest.raises(ValidationError, match=rf"{name} is (not supported yet|supported only as)"):
            model.model_validate(DEFAULTS[model] | {name: "anything else"})


@pytest.mark.parametrize(
    ("content", "form", "expected"),
    [
        (["A ", "B"], "text", "A \nB"),
        (["A ", "B"], "any", ["A ", "B"]),
        (["A ", "B"], "parts", ["A ", "B"]),
        ("A", "text", "A"),
        ("A", "any", "A"),
        ("A", "parts", ["A"]),
    ],
)
def test_content_parts_reach_templates_that_render_them(content: Any, form: ContentForm, expected: Any) -> None:
    def parts(texts: Any) -> Any:
        return texts if isinstance(texts, str) else [{"type": "text", "text": text} for text in texts]

    for role, shown in (("user", "user"), ("tool", "tool"), ("developer", "system")):
        message = ChatMessage.model_validate({"role": role, "content": parts(content)})
        assert message.for_template({shown: form}) == {"role": shown, "content": parts(expected)}


@pytest.mark.parametrize("model", [CompletionRequest, ChatRequest, EmbeddingRequest])
def test_null_in_optional_field_is_the_default(model: type[BaseModel]) -> None:
    body: dict[str, Any] = {"prompt": "a"} if model is CompletionRequest else {"messages": [chat()["messages"][0]]}
    optional = {name for name, field in model.model_fields.items() if not field.is_required()} - body.keys()
    assert optional >= {"encoding_format"} or optional >= {"n", "stream"}
    assert model.model_validate(body | dict.fromkeys(optional)) == model.model_validate(body)


def test_null_in_required_field_is_rejected() -> None:
    with pytest.raises(ValidationError):
        CompletionRequest.model_validate({"prompt": None})


@pytest.mark.parametrize("include_obfuscation", [True, False, None])
def test_stream_obfuscation_has_no_effect(include_obfuscation: bool | None) -> None:
    options = {"include_usage": True, "include_obfuscation": include_obfuscation}
    request = ChatRequest.model_validate({**chat(), "stream": True, "stream_options": options})
    assert request.includes_usage

"""Requests of the differential suite: greedy, and small enough for a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = "The capital of France is"
MESSAGES = [{"role": "user", "content": "Name one colour."}]
COLOUR_SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "enum": ["red", "green", "blue"]}},
    "required": ["colour"],
    "additionalProperties": False,
}
WEATHER_TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True)
class ComparedRequest:
    """One request that is sent to both servers."""

    name: str
    path: str
    body: Any
    method: str = "POST"


def _completion(name: str, **fields: Any) -> ComparedRequest:
    body = {"model": "smol", "temperature": 0, "max_tokens": 8, "prompt": PROMPT} | fields
    return ComparedRequest(name, COMPLETIONS, body)


def _chat(name: str, **fields: Any) -> ComparedRequest:
    body = {"model": "smol", "temperature": 0, "max_tokens": 8, "messages": MESSAGES} | fields
    return ComparedRequest(name, CHAT, body)


USAGE = {"include_usage": True}
CONTINUOUS_USAGE = {"include_usage": True, "continuous_usage_stats": True}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR_SCHEMA}}
FORCED_TOOL = {"type": "function", "function": {"name": "get_weather"}}
UNKNOWN_TOOL = {"type": "function", "function": {"name": "x"}}
IMAGE_MESSAGES = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
TOOL_HISTORY = [
    {"role": "user", "content": "Weather in Rome?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
]

REQUESTS: tuple[ComparedRequest, ...] = (
    # Completions
    _completion("completion"),
    _completion("completion-long", max_tokens=64),
    _completion("completion-default-max-tokens", max_tokens=None),
    _completion("completion-token-ids", prompt=[504, 3575, 282, 4649, 314]),
    _completion("completion-prompts", prompt=[PROMPT, "One, two, three,"]),
    _completion("completion-token-id-prompts", prompt=[[504, 3575], [282, 4649]]),
    _completion("completion-echo", echo=True),
    _completion("completion-echo-logprobs", echo=True, logprobs=2),
    _completion("completion-echo-no-tokens", echo=True, max_tokens=0, logprobs=1),
    _completion("completion-logprobs", logprobs=3),
    _completion("completion-logprobs-zero", logprobs=0),
    _completion("completion-prompt-logprobs", prompt_logprobs=1),
    _completion("completion-stop", stop=" Paris", max_tokens=16),
    _completion("completion-stop-list", stop=["\n", "."], max_tokens=24),
    _completion("completion-stop-included", stop=["."], include_stop_str_in_output=True, max_tokens=24),
    _completion("completion-stop-token", stop_token_ids=[30], max_tokens=24),
    _completion("completion-n", n=2),
    _completion("completion-n-logprobs", n=2, logprobs=1),
    _completion("completion-min-tokens", min_tokens=4, max_tokens=6),
    _completion("completion-ignore-eos", ignore_eos=True, max_tokens=12),
    _completion("completion-logit-bias", logit_bias={"28": 100}, max_tokens=3),
    _completion("completion-allowed-token-ids", allowed_token_ids=[28, 30], max_tokens=3),
    _completion("completion-bad-words", bad_words=[" Paris"]),
    _completion("completion-repetition-penalty", repetition_penalty=1.3, max_tokens=16),
    _completion("completion-presence-penalty", presence_penalty=1.0, frequency_penalty=0.5, max_tokens=16),
    _completion("completion-truncated-prompt", truncate_prompt_tokens=3),
    _completion("completion-no-special-tokens", skip_special_tokens=False, spaces_between_special_tokens=False),
    _completion("completion-return-token-ids", return_token_ids=True),
    _completion("completion-suffix", suffix=" end"),
    _completion("completion-user", user="me"),
    _completion("completion-seed", seed=7),
    _completion("completion-structured-choice", structured_outputs={"choice": ["red", "blue"]}),
    _completion("completion-structured-regex", structured_outputs={"regex": "[0-9]{3}"}),
    _completion("completion-stream", stream=True),
    _completion("completion-stream-usage", stream=True, stream_options=USAGE),
    _completion("completion-stream-continuous-usage", stream=True, stream_options=CONTINUOUS_USAGE),
    _completion("completion-stream-logprobs", stream=True, logprobs=2),
    _completion("completion-stream-stop", stream=True, stop=["."], max_tokens=24),
    _completion("completion-stream-echo", stream=True, echo=True),
    # Chat
    _chat("chat"),
    _chat("chat-long", max_tokens=64),
    _chat("chat-max-completion-tokens", max_tokens=None, max_completion_tokens=5),
    _chat("chat-system", messages=[{"role": "system", "content": "Answer in French."}, *MESSAGES]),
    _chat("chat-text-parts", messages=[{"role": "user", "content": [{"type": "text", "text": "Name one colour."}]}]),
    _chat("chat-developer", messages=[{"role": "developer", "content": "Be brief."}, *MESSAGES]),
    _chat("chat-logprobs", logprobs=True),
    _chat("chat-top-logprobs", logprobs=True, top_logprobs=3),
    _chat("chat-n", n=2),
    _chat("chat-stop", stop=["."], max_tokens=24),
    _chat("chat-continue", messages=[*MESSAGES, {"role": "assistant", "content": "The colour is"}],
          add_generation_prompt=False, continue_final_message=True),
    _chat("chat-echo", echo=True),
    _chat("chat-json-object", response_format={"type": "json_object"}, max_tokens=24),
    _chat("chat-json-schema", response_format=JSON_SCHEMA, max_tokens=24),
    _chat("chat-structured-json", structured_outputs={"json": COLOUR_SCHEMA}, max_tokens=24),
    _chat("chat-structured-grammar", structured_outputs={"grammar": 'root ::= "red" | "blue"'}),
    _chat("chat-response-text", response_format={"type": "text"}),
    _chat("chat-tool-auto", tools=[WEATHER_TOOL], max_tokens=16),
    _chat("chat-tool-none", tools=[WEATHER_TOOL], tool_choice="none", max_tokens=16),
    _chat("chat-tool-required", tools=[WEATHER_TOOL], tool_choice="required", max_tokens=48),
    _chat("chat-tool-named", tools=[WEATHER_TOOL], tool_choice=FORCED_TOOL, max_tokens=48),
    _chat("chat-tool-history", messages=TOOL_HISTORY, tools=[WEATHER_TOOL], max_tokens=16),
    _chat("chat-stream", stream=True),
    _chat("chat-stream-usage", stream=True, stream_options=USAGE),
    _chat("chat-stream-continuous-usage", stream=True, stream_options=CONTINUOUS_USAGE),
    _chat("chat-stream-logprobs", stream=True, logprobs=True, top_logprobs=1),
    _chat("chat-stream-n", stream=True, n=2),
    _chat("chat-stream-tool-named", stream=True, tools=[WEATHER_TOOL], tool_choice=FORCED_TOOL, max_tokens=48),
    _chat("chat-stream-stop", stream=True, stop=["."], max_tokens=24),
    # Other routes
    ComparedRequest("models", "/v1/models", None, "GET"),
    ComparedRequest("model-unknown", "/v1/models/none", None, "GET"),
    ComparedRequest("health", "/health", None, "GET"),
    ComparedRequest("version", "/version", None, "GET"),
    ComparedRequest("tokenize", "/tokenize", {"model": "smol", "prompt": PROMPT}),
    ComparedRequest("tokenize-chat", "/tokenize", {"model": "smol", "messages": MESSAGES}),
    ComparedRequest("tokenize-strings", "/tokenize", {"model": "smol", "prompt": PROMPT, "return_token_strs": True}),
    ComparedRequest("detokenize", "/detokenize", {"model": "smol", "tokens": [504, 3575, 282]}),
    ComparedRequest("embeddings-generative", "/v1/embeddings", {"model": "smol", "input": "text"}),
    # Errors
    _completion("error-model", model="none"),
    _chat("error-chat-model", model="none"),
    _completion("error-temperature", temperature=-1),
    _completion("error-top-p", top_p=1.5),
    _completion("error-top-k", top_k=-2),
    _completion("error-max-tokens", max_tokens=-1),
    _completion("error-max-tokens-zero", max_tokens=0),
    _completion("error-n-zero", n=0),
    _completion("error-logprobs", logprobs=1000),
    _completion("error-logprobs-negative", logprobs=-3),
    _completion("error-penalty", presence_penalty=3),
    _completion("error-repetition-penalty", repetition_penalty=0),
    _completion("error-min-tokens", min_tokens=9, max_tokens=8),
    _completion("error-prompt-missing", prompt=None),
    _completion("error-prompt-empty", prompt=[]),
    _completion("error-prompt-token", prompt=[999999]),
    _completion("error-prompt-long", prompt=[28] * 3000),
    _completion("error-max-tokens-long", max_tokens=3000),
    _completion("error-stream-options", stream_options=USAGE),
    _completion("error-stop-empty", stop=[""]),
    _completion("error-regex", structured_outputs={"regex": "["}),
    _completion("error-structured-two", structured_outputs={"regex": "a", "choice": ["a"]}),
    _completion("error-logit-bias-token", logit_bias={"999999": 1}),
    _completion("error-logit-bias-name", logit_bias={"x": 1}),
    _completion("error-allowed-token-ids", allowed_token_ids=[]),
    _completion("error-type", max_tokens="many"),
    _chat("error-messages-empty", messages=[]),
    _chat("error-role", messages=[{"role": "robot", "content": "x"}]),
    _chat("error-messages-missing", messages=None),
    _chat("error-top-logprobs-alone", top_logprobs=2),
    _chat("error-top-logprobs", logprobs=True, top_logprobs=1000),
    _chat("error-tool-choice-alone", tool_choice="required"),
    _chat("error-tool-choice-unknown", tools=[WEATHER_TOOL], tool_choice=UNKNOWN_TOOL),
    _chat("error-schema", response_format={"type": "json_schema"}),
    _chat("error-image", messages=IMAGE_MESSAGES),
    ComparedRequest("error-json", COMPLETIONS, b"{"),
    ComparedRequest("error-json-list", COMPLETIONS, []),
    ComparedRequest("error-method", COMPLETIONS, None, "GET"),
    ComparedRequest("error-route", "/v1/nothing", {}),
    ComparedRequest("error-detokenize", "/detokenize", {"model": "smol", "tokens": [-1]}),
)  # fmt: skip

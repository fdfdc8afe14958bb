"""Body of POST /v1/responses, and its conversion to a chat request.

Source: OpenAI's Responses API. Fields of unsupported features are rejected by name, unless their value has no
effect.
"""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trimtab_engine.api.http.errors import WrongField
from trimtab_engine.api.openai.protocol import (
    MAX_INT64,
    MAX_MESSAGES,
    MAX_NAME_CHARACTERS,
    MAX_PARTS,
    ChatRequest,
    Finite,
    check_fields,
)

Json = dict[str, Any]
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "max_tool_calls": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "service_tier": (None, "auto", "default"),
    "top_logprobs": (None, 0),
}
"""Field: values without effect, which are accepted."""
WITHOUT_EFFECT = ("stream_options",)
LOGPROBS = "message.output_text.logprobs"
ROLES = {"developer": "system"}
MAX_ITEMS = MAX_MESSAGES
Name = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Item(_Strict):
    """An item of the input. Clients return items of earlier responses with their IDs and states."""

    id: Name | None = None
    status: str | None = None
    created_by: str | None = None
    phase: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _drop_empty(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


class TextPart(_Strict):
    type: Literal["input_text", "output_text", "text", "summary_text", "reasoning_text"]
    text: str
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None
    prompt_cache_breakpoint: Any = None


class ImagePart(_Strict):
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


class RefusalPart(_Strict):
    type: Literal["refusal"]
    refusal: str


Part = Annotated[TextPart | ImagePart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[Part], Field(max_length=MAX_PARTS)]
Texts = Annotated[list[TextPart], Field(max_length=MAX_PARTS)]


class MessageItem(_Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Parts


class FunctionCallItem(_Item):
    type: Literal["function_call"]
    call_id: Name
    name: Name
    arguments: str
    namespace: str | None = None


class FunctionCallOutputItem(_Item):
    type: Literal["function_call_output"]
    call_id: Name
    output: str | Parts


class ReasoningItem(_Item):
    type: Literal["reasoning"]
    summary: Texts = []
    content: Texts | None = None
    encrypted_content: str | None = None

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content or self.summary)


InputItem = MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem
ITEM_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class FunctionTool(_Strict):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class NamedFunction(_Strict):
    type: Literal["function"]
    name: str


class TextFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextConfig(_Strict):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    """No effect."""


class Reasoning(_Strict):
    effort: Name | None = None
    summary: str | None = None
    generate_summary: str | None = None
    """No effect: the reasoning itself is returned."""


class ResponsesRequest(_Strict):
    """Body of POST /v1/responses."""

    model: Name | None = None
    input: str | Annotated[list[InputItem], Field(max_length=MAX_ITEMS, fail_fast=True)]
    instructions: str | None = None
    max_output_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    stream: bool = False
    store: bool = True
    previous_response_id: Name | None = None
    tools: list[FunctionTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    truncation: Literal["disabled", "auto"] | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: Any = None

    @model_validator(mode="before")
    @classmethod
    def _check_fields(cls, data: Any) -> Any:
        if isinstance(data, dict):
            _check_items(data.get("input"))
            _check_tools(data.get("tools"))
            if LOGPROBS in (data.get("include") or ()):
                raise WrongField("include", f"{LOGPROBS} is not supported; use /v1/chat/completions with logprobs")
            kept = ("metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")
            own = {name: data[name] for name in kept if data.get(name) is not None}
            checked = check_fields(cls, {k: v for k, v in data.items() if k not in WITHOUT_EFFECT}, UNSUPPORTED)
            return {**checked, **own}
        return data

    def new_messages(self) -> list[Json]:
        """Return the input as chat messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return list(_merged(map(_for_chat, self.input)))

    def chat_request(self, earlier: list[Json], *, has_reasoning_parser: bool) -> ChatRequest:
        """Return the chat request. `earlier` is the conversation up to the previous response, without instructions.

        Raises:
            ValidationError: The chat request is invalid.
        """
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields: Json = {
            "model": self.model,
            "messages": list(_merged(iter([*system, *earlier, *self.new_messages()]))),
            "max_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "stream": self.stream,
            "parallel_tool_calls": self.parallel_tool_calls,
        }
        if self.reasoning is not None and self.reasoning.effort is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if self.tools:
            fields["tools"] = [
                {"type": "function", "function": tool.model_dump(exclude={"type", "defer_loading"}, exclude_none=True)}
                for tool in self.tools
            ]
            choice = self.tool_choice
            chosen = (
                {"type": "function", "function": {"name": choice.name}} if isinstance(choice, NamedFunction) else {}
            )
            fields["tool_choice"] = chosen or choice
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _response_format(self.text.format)
        if has_reasoning_parser:
            fields["include_reasoning"] = True
        if self.truncation == "auto":
            fields["truncate_prompt_tokens"] = -1
        return ChatRequest.model_validate({key: value for key, value in fields.items() if value is not None})


def _check_items(items: Any) -> None:
    """Raise WrongField for an item whose type is not supported, before pydantic tries every type."""
    for index, item in enumerate(items if isinstance(items, list) else ()):
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if kind not in ITEM_TYPES:
            raise WrongField(
                f"input.{index}", f"items of type {str(kind)[:50]} are not supported; send {', '.join(ITEM_TYPES)}"
            )


def _check_tools(tools: Any) -> None:
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise WrongField(f"tools.{index}", f"tools of type {str(kind)[:50]} are not supported; use type function")


def _response_format(given: TextFormat) -> Json:
    if given.type != "json_schema":
        return {"type": given.type}
    schema = {"name": given.name or "", "description": given.description, "schema": given.schema_ or {}}
    return {"type": "json_schema", "json_schema": {key: value for key, value in schema.items() if value is not None}}


def _for_chat(item: InputItem) -> Json:
    """Return one item as a chat message; parts of one assistant turn are merged afterwards."""
    if isinstance(item, FunctionCallItem):
        function = {"name": item.name, "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if isinstance(item, FunctionCallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": _plain_text(item.output)}
    if isinstance(item, ReasoningItem):
        return {"role": "assistant", "content": None, "reasoning": item.text}
    return {"role": ROLES.get(item.role, item.role), "content": _content(item.content)}


def _plain_text(content: str | Parts) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text for part in content if isinstance(part, TextPart))


def _content(content: str | Parts) -> str | list[Json]:
    if isinstance(content, str) or not any(isinstance(part, ImagePart) for part in content):
        return _plain_text(content)
    return [
        {"type": "image_url", "image_url": {"url": part.image_url}}
        if isinstance(part, ImagePart)
        else {"type": "text", "text": part.refusal if isinstance(part, RefusalPart) else part.text}
        for part in content
    ]


def _merged(messages: Iterator[Json]) -> Iterator[Json]:
    """Join reasoning, text and calls of one assistant turn, which are separate items, into one message."""
    turn: Json | None = None
    for message in messages:
        if turn is not None and _continues(turn, message):
            turn = {
                "role": "assistant",
                "content": message["content"] if turn["content"] is None else turn["content"],
                "reasoning": (turn.get("reasoning") or "") + (message.get("reasoning") or "") or None,
                "tool_calls": [*(turn.get("tool_calls") or ()), *(message.get("tool_calls") or ())] or None,
            }
            continue
        if turn is not None:
            yield _without_nothing(turn)
        turn = message
    if turn is not None:
        yield _without_nothing(turn)


def _continues(turn: Json, message: Json) -> bool:
    both_assistant = turn["role"] == message["role"] == "assistant"
    return (
        both_assistant
        and (turn["content"] is None or message["content"] is None)
        and not (turn.get("tool_calls") and not message.get("tool_calls"))
    )


def _without_nothing(message: Json) -> Json:
    return {key: value for key, value in message.items() if value is not None or key == "content"}

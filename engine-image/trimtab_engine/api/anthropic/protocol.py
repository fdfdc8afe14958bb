"""Body of POST /v1/messages, and its conversion to a chat request.

Source: Anthropic's Messages API, version 2023-06-01. Fields without effect are accepted: caching is automatic, and
`budget_tokens` and `effort` do not limit the reasoning.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trimtab_engine.api.http.errors import WrongField
from trimtab_engine.api.openai.protocol import MAX_INT64, MAX_MESSAGES, MAX_NAME_CHARACTERS, MAX_PARTS, ChatRequest

Json = dict[str, Any]
WITHOUT_EFFECT = frozenset(
    {
        "cache_control",
        "citations",
        "metadata",
        "service_tier",
        "inference_geo",
        "context_management",
        "betas",
        "caller",
        "eager_input_streaming",
        "defer_loading",
        "allowed_callers",
        "input_examples",
        "strict",
    }
)
"""Fields that do not change the answer, at any place."""
MAX_STOP_SEQUENCES = 16


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_fields_without_effect(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in WITHOUT_EFFECT}


class TextBlock(_Strict):
    type: Literal["text"]
    text: str


class ImageSource(_Strict):
    type: Literal["base64", "url"]
    media_type: str | None = None
    data: str | None = None
    url: str | None = None

    @property
    def as_url(self) -> str:
        return self.url or f"data:{self.media_type};base64,{self.data}"


class ImageBlock(_Strict):
    type: Literal["image"]
    source: ImageSource


class ToolResultBlock(_Strict):
    type: Literal["tool_result"]
    tool_use_id: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    content: str | Annotated[list[TextBlock | ImageBlock], Field(max_length=MAX_PARTS)] | None = None
    is_error: bool | None = None


class ToolUseBlock(_Strict):
    type: Literal["tool_use"]
    id: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    name: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    input: Json


class ThinkingBlock(_Strict):
    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class RedactedThinkingBlock(_Strict):
    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ImageBlock | ToolResultBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
    Field(discriminator="type"),
]


class Message(_Strict):
    role: Literal["user", "assistant"]
    content: str | Annotated[list[Block], Field(max_length=MAX_PARTS)]

    def for_chat(self) -> Iterator[Json]:
        """Yield the chat messages: results of tools come first, each as a message of its own."""
        if isinstance(self.content, str):
            yield {"role": self.role, "content": self.content}
            return
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": _result_text(block)}
        yield from self._without_results(self.content)

    def _without_results(self, blocks: Sequence[Block]) -> Iterator[Json]:
        message: Json = {"role": self.role}
        parts: list[Json] = []
        for block in blocks:
            if isinstance(block, TextBlock):
                parts.append({"type": "text", "text": block.text})
            elif isinstance(block, ImageBlock):
                parts.append({"type": "image_url", "image_url": {"url": block.source.as_url}})
            elif isinstance(block, ToolResultBlock):
                parts += _result_images(block)
            elif isinstance(block, ThinkingBlock):
                message["reasoning"] = message.get("reasoning", "") + block.thinking
            elif isinstance(block, ToolUseBlock):
                function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
                message.setdefault("tool_calls", []).append({"id": block.id, "type": "function", "function": function})
        if all(part["type"] == "text" for part in parts):
            text = "\n".join(part["text"] for part in parts)
            content: Any = text if parts else None
        else:
            content = parts
        if content is not None or len(message) > 1:
            yield message | {"content": content}


def _result_text(block: ToolResultBlock) -> str:
    if block.content is None or isinstance(block.content, str):
        return block.content or ""
    return "\n".join(part.text for part in block.content if isinstance(part, TextBlock))


def _result_images(block: ToolResultBlock) -> list[Json]:
    """Return the images of a result, which chat templates only take from users."""
    images = [part for part in block.content or () if isinstance(part, ImageBlock)]
    return [{"type": "image_url", "image_url": {"url": image.source.as_url}} for image in images]


class Tool(_Strict):
    """A tool that the client runs. Anthropic's own tools have another type and are rejected."""

    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: Json

    @model_validator(mode="before")
    @classmethod
    def _reject_server_tools(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if kind not in (None, "custom"):
            raise WrongField(
                "type", f"the tool {str(kind)[:50]} runs on Anthropic's servers; define it as a custom tool"
            )
        return data


class ToolChoice(_Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None

    @model_validator(mode="after")
    def _check_name(self) -> "ToolChoice":
        if (self.type == "tool") != (self.name is not None):
            raise WrongField("name", "name is required with type tool, and only then")
        return self


class Thinking(_Strict):
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=1)] | None = None
    display: str | None = None


class OutputConfig(_Strict):
    """`effort` has no effect. A format would constrain the answer and is not supported."""

    effort: str | None = None
    format: None = None


class CountTokensRequest(_Strict):
    """Body of POST /v1/messages/count_tokens: what determines the prompt."""

    model: Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: str | Annotated[list[TextBlock], Field(max_length=MAX_PARTS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    @property
    def shows_thinking(self) -> bool:
        return self.thinking is not None and self.thinking.type != "disabled"

    def chat_messages(self) -> list[Json]:
        """Return the conversation of a chat request."""
        texts = [self.system] if isinstance(self.system, str) else [block.text for block in self.system or ()]
        system = "\n".join(text for text in texts if text)
        first = [{"role": "system", "content": system}] if system else []
        return first + [chat for message in self.messages for chat in message.for_chat()]

    def chat_fields(self) -> Json:
        """Return the fields of a chat request with the same prompt."""
        fields: Json = {"model": self.model, "messages": self.chat_messages()}
        if self.messages[-1].role == "assistant":  # the answer continues this text
            fields |= {"continue_final_message": True, "add_generation_prompt": False}
        if self.tools:
            fields["tools"] = [
                {
                    "type": "function",
                    "function": {"name": tool.name, "parameters": tool.input_schema}
                    | ({"description": tool.description} if tool.description else {}),
                }
                for tool in self.tools
            ]
        if self.thinking is not None:
            fields["chat_template_kwargs"] = {"enable_thinking": self.shows_thinking}
        return fields


class MessagesRequest(CountTokensRequest):
    """Body of POST /v1/messages."""

    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT64)]
    stop_sequences: Annotated[list[str], Field(max_length=MAX_STOP_SEQUENCES)] | None = None
    stream: bool = False
    temperature: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    container: None = None
    mcp_servers: Annotated[list[Json], Field(max_length=0)] | None = None

    def chat_request(self, *, has_reasoning_parser: bool) -> ChatRequest:
        """Return the chat request. Raises pydantic's ValidationError for values that it rejects."""
        fields = self.chat_fields() | {
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": [text for text in self.stop_sequences or () if text] or None,
            "stream": self.stream,
        }
        if has_reasoning_parser:
            fields["include_reasoning"] = self.shows_thinking
        if self.tools and self.tool_choice is not None:
            names = {"auto": "auto", "any": "required", "none": "none"}
            chosen = {"type": "function", "function": {"name": self.tool_choice.name}}
            fields["tool_choice"] = names.get(self.tool_choice.type, chosen)
            if self.tool_choice.disable_parallel_tool_use:
                fields["parallel_tool_calls"] = False
        chat = ChatRequest.model_validate({key: value for key, value in fields.items() if value is not None})
        return chat.cut_to_context()  # clients always send max_tokens, often above what fits

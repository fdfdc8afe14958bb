"""Tool calls as clients ask for them: functions, who chooses among them, and what that makes of a request."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trimtab_engine.api.http.errors import WrongField, invalid
from trimtab_engine.api.openai.constraints import Constraint, Schema, schema_constraint
from trimtab_engine.api.openai.tool_parsers import PARSERS, ToolParser
from trimtab_engine.api.openai.tool_parsers.enforced import NamedParser, RequiredParser

MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOL_CALLS = 128  # in one message that a client sends back
MAX_ID_CHARACTERS = 512
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Function(_Strict):
    """`strict` changes nothing: with tool_choice required or a name the schema is held to, with auto it is not."""

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"]
    function: Function


class ChosenFunction(_Strict):
    name: Name


class ToolChoice(_Strict):
    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(_Strict):
    name: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]
    arguments: str = "{}"


class ToolCall(_Strict):
    """A call of an earlier answer, as the client sends it back."""

    id: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """With the arguments as an object, which is what templates write. Raises ValueError where they are none."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except (ValueError, RecursionError):
            raise ValueError(f"the arguments of tool call {self.function.name!r} are not JSON") from None
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


class OfferedTools(BaseModel):
    """The functions that a conversation's template tells of."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> "OfferedTools":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise WrongField("tools", "two tools have one name")
        for tool in self.tools or ():
            schema_constraint(tool.function.parameters or {})
        return self

    def for_template(self, *, template_knows_tools: bool) -> list[dict[str, Any]] | None:
        """ApiError 400 when the template would not tell of them."""
        if not self.tools:
            return None
        if not template_knows_tools:
            raise invalid(
                "this model's chat template knows no tools; serve it with one that does (--chat-template hermes)",
                "tools",
            )
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class ToolFields(OfferedTools):
    """The fields of a chat request about tools."""

    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_choice(self) -> "ToolFields":
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            named = self.tool_choice.function.name
            raise WrongField("tool_choice", f"tool_choice names {named!r}, which is not among the tools")
        if self.tool_choice == "required" and not names:
            raise WrongField("tool_choice", "tool_choice is required, but there are no tools")
        return self


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What tools make of one request: what the template sees, what the output must match, who reads the answer.

    `parser` None: the answer is text. `only_first`: further calls are left out (parallel_tool_calls is false).
    """

    for_template: list[dict[str, Any]] | None = None
    constraint: Constraint | None = None
    parser: Callable[[], ToolParser] | None = None
    only_first: bool = False


NO_TOOLS = ToolUse()


def tool_use_of(
    body: ToolFields, *, template_knows_tools: bool, auto_parser: str | None, is_constrained: bool
) -> ToolUse:
    """`auto_parser` is --tool-call-parser with --enable-auto-tool-choice. ApiError 400 for what cannot be."""
    tools = body.for_template(template_knows_tools=template_knows_tools)
    if not body.tools:
        return NO_TOOLS
    only_first = body.parallel_tool_calls is False
    choice = body.tool_choice or "auto"
    if choice == "none":
        return ToolUse(tools)
    if choice == "auto":
        if auto_parser is None:
            raise invalid(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set; ask for '
                "required or for one function by name",
                "tool_choice",
            )
        return ToolUse(tools, None, PARSERS[auto_parser], only_first)
    if is_constrained:
        raise invalid("tool_choice and another field constrain the output; leave out one of them", "tool_choice")
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        return ToolUse(tools, _arguments_of(body.tools, name), lambda: NamedParser(name))
    return ToolUse(tools, _calls_of(body.tools, only_first), RequiredParser, only_first)


def _arguments_of(tools: list[Tool], name: str) -> Constraint:
    """The output is the arguments of this function."""
    (tool,) = (tool for tool in tools if tool.function.name == name)
    return schema_constraint(_parameters(tool))


def _calls_of(tools: list[Tool], only_first: bool) -> Constraint:
    """The output is an array of calls (vLLM's form). Definitions of the functions' schemas move to the top."""
    definitions: Schema = {}
    options: list[Schema] = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for key in ("$defs", "definitions"):
            for name, definition in parameters.pop(key, {}).items():
                definitions.setdefault(key, {})
                if definitions[key].setdefault(name, definition) != definition:
                    raise invalid(f"two tools define {name!r} differently; give the definitions other names", "tools")
        options.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: Schema = {"type": "array", "minItems": 1, "items": {"anyOf": options}, **definitions}
    return schema_constraint(schema | ({"maxItems": 1} if only_first else {}))


def _parameters(tool: Tool) -> Schema:
    return tool.function.parameters or {"type": "object", "properties": {}}

"""Tools of a request: functions, tool_choice, and their effect on the prompt, the output constraint and the parser."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from trimtab_engine.api.http.errors import WrongField, invalid
from trimtab_engine.api.openai.constraints import Constraint, Schema, schema_constraint
from trimtab_engine.api.openai.tool_parsers import PARSERS, ToolParser
from trimtab_engine.api.openai.tool_parsers.enforced import NamedParser, RequiredParser

MAX_TOOLS = 128  # OpenAI's limit
MAX_TOOL_CALLS = 128  # in one message returned by a client
MAX_ID_CHARACTERS = 512
RAW_ARGUMENTS = "raw_arguments"
"""Name under which templates see the arguments of an earlier call that are not a JSON object."""
Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.\-]{1,64}$")]


class _StrictModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class Function(_StrictModel):
    """Function definition. `strict` has no effect: tool_choice required or a name enforces the schema, auto does
    not.
    """

    name: Name
    description: str | None = None
    parameters: Schema | None = None
    strict: bool | None = None


class Tool(_StrictModel):
    type: Literal["function"]
    function: Function


class ChosenFunction(_StrictModel):
    name: Name


class ToolChoice(_StrictModel):
    type: Literal["function"]
    function: ChosenFunction


class CalledFunction(_StrictModel):
    name: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)]
    arguments: str = "{}"


class ToolCall(_StrictModel):
    """A call of an earlier response, returned by the client."""

    id: Annotated[str, Field(max_length=MAX_ID_CHARACTERS)] | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """Return the call with its arguments as an object, which templates expect. Other text, such as arguments that
        max_tokens truncated, is one argument: later turns must not fail because of it.
        """
        text = self.function.arguments
        try:
            arguments = json.loads(text) if text.strip() else None
        except (ValueError, RecursionError):
            arguments = text
        if arguments is None:
            arguments = {}
        elif not isinstance(arguments, dict):
            arguments = {RAW_ARGUMENTS: text}
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


ToolCalls = Annotated[list[ToolCall], Field(max_length=MAX_TOOL_CALLS, fail_fast=True)]


class ToolList(BaseModel):
    """Functions listed in a conversation's template."""

    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None

    @model_validator(mode="after")
    def _check_tools(self) -> "ToolList":
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise WrongField("tools", "two tools have the same name")
        for tool in self.tools or ():
            schema_constraint(tool.function.parameters or {})
        return self

    def for_template(self, *, template_knows_tools: bool) -> list[dict[str, Any]] | None:
        """Return the tools for the template. Raises ApiError 400 if the template does not support tools."""
        if not self.tools:
            return None
        if not template_knows_tools:
            raise invalid(
                "this model's chat template does not support tools; start the engine with --chat-template hermes",
                "tools",
            )
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class ToolFields(ToolList):
    """Tool fields of a chat request."""

    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @model_validator(mode="after")
    def _check_choice(self) -> "ToolFields":
        names = [tool.function.name for tool in self.tools or ()]
        if isinstance(self.tool_choice, ToolChoice) and self.tool_choice.function.name not in names:
            named = self.tool_choice.function.name
            raise WrongField("tool_choice", f"tool_choice: {named!r} is not one of the tools")
        if self.tool_choice == "required" and not names:
            raise WrongField("tool_choice", "tool_choice is required, but there are no tools")
        return self


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Effect of tools on one request: tools for the template, output constraint, and parser of the response.

    `parser` None: the response is text. `only_first`: further calls are dropped (parallel_tool_calls is false).
    """

    for_template: list[dict[str, Any]] | None = None
    constraint: Constraint | None = None
    parser: Callable[[], ToolParser] | None = None
    only_first: bool = False


NO_TOOLS = ToolUse()


def build_tool_use(
    body: ToolFields, *, template_knows_tools: bool, auto_parser: str | None, is_constrained: bool
) -> ToolUse:
    """Return the tool use of a request. `auto_parser` is --tool-call-parser with --enable-auto-tool-choice. Raises
    ApiError 400 for conflicts.
    """
    tools = body.for_template(template_knows_tools=template_knows_tools)
    if not body.tools:
        return NO_TOOLS
    only_first = body.parallel_tool_calls is False
    choice = body.tool_choice or "auto"
    if choice == "none":
        return ToolUse(tools)
    if choice == "auto":
        names = frozenset(tool.function.name for tool in body.tools)
        if auto_parser is None:
            raise invalid(
                '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set; use '
                "tool_choice required, or one function by name",
                "tool_choice",
            )
        return ToolUse(tools, None, partial(PARSERS[auto_parser], names), only_first)
    if is_constrained:
        raise invalid("tool_choice and another field constrain the output; remove one of them", "tool_choice")
    if isinstance(choice, ToolChoice):
        name = choice.function.name
        return ToolUse(tools, _arguments_constraint(body.tools, name), lambda: NamedParser(name))
    return ToolUse(tools, _calls_constraint(body.tools, only_first), RequiredParser, only_first)


def _arguments_constraint(tools: list[Tool], name: str) -> Constraint:
    """Return the constraint: the output is the arguments of this function."""
    (tool,) = (tool for tool in tools if tool.function.name == name)
    return schema_constraint(_parameters(tool))


def _calls_constraint(tools: list[Tool], only_first: bool) -> Constraint:
    """Return the constraint: the output is an array of calls (vLLM's form). Schema definitions move to the top
    level.
    """
    definitions: Schema = {}
    options: list[Schema] = []
    for tool in tools:
        parameters = dict(_parameters(tool))
        for key in ("$defs", "definitions"):
            for name, definition in parameters.pop(key, {}).items():
                definitions.setdefault(key, {})
                if definitions[key].setdefault(name, definition) != definition:
                    raise invalid(f"two tools define {name!r} differently; rename one definition", "tools")
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

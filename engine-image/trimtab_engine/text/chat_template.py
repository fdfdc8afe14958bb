"""Chat templates: Jinja in a sandbox, with transformers' extensions.

No transformers and no torch: the server's rendering process (chat_worker.py) is started often, and killed if a template
does not end. Tests compare it with transformers' renderer.
"""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab_engine.errors import InvalidRequest, ModelError

MAX_TEMPLATE_CHARACTERS = 1 << 20  # ten times the largest known template
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that a request cannot override."""
END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' marker: the template treats it like the end of the last message."""
CHECK_MESSAGES = ({"role": "user", "content": "Hello"},)
CHECK_PARTS = ("Alpha", "Beta")
"""Texts of the parts of a message that determines how a template takes content."""
CHECK_TOOLS = (
    {
        "type": "function",
        "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
    },
)

Message = Mapping[str, Any]
Json = dict[str, Any]
ContentForm = Literal["text", "any", "parts"]
"""Content that a template renders for a role: text, text or a list of parts, or only a list of parts."""
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's templates by name (usually only `default`; some have one for tools), and the names of its special
    tokens, which templates use.
    """

    by_name: dict[str, str]
    special_tokens: dict[str, str]
    where: str = ""
    """Origin for error messages: a folder, a file, or a flag."""

    def text(self, *, with_tools: bool) -> str | None:
        """Return the template, chosen as in transformers, or None if there is none."""
        if with_tools and "tool_use" in self.by_name:
            return self.by_name["tool_use"]
        return self.by_name.get("default")

    def name(self, *, with_tools: bool) -> str:
        """Return the template's name for error messages."""
        kind = " for tools" if with_tools and "tool_use" in self.by_name else ""
        return f"the chat template{kind}" + (f" of {self.where}" if self.where else "")

    def check_sizes(self) -> None:
        """Raise ModelError if a template is too long."""
        if any(len(text) > MAX_TEMPLATE_CHARACTERS for text in self.by_name.values()):
            raise ModelError(f"{self.name(with_tools=False)} has more than {MAX_TEMPLATE_CHARACTERS} characters")


class ChatTemplate:
    """One compiled template; `name` is used in error messages. Raises ModelError for invalid Jinja."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], name: str = "the chat template") -> None:
        environment = _environment()
        self._name = name
        try:
            self._template = environment.from_string(text)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"{name}: invalid Jinja in line {error.lineno}: {error.message}") from None
        self._special_tokens = dict(special_tokens)
        self.uses_tools = "tools" in variables

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        max_characters: int | None = None,
    ) -> str:
        """Return the rendered text.

        With `continue_final_message` the text ends at the end of the last message, without the template's suffix.

        Raises:
            InvalidRequest: The template rejects the messages or the text exceeds `max_characters`.
        """
        if continue_final_message:
            messages = _mark_end(messages)
        values = {**self._special_tokens, **{k: v for k, v in (variables or {}).items() if k not in RESERVED}}
        values |= {"messages": list(messages), "tools": None if tools is None else list(tools), "documents": None}
        parts: list[str] = []
        num_characters = 0
        try:
            for part in self._template.generate(**values, add_generation_prompt=add_generation_prompt):
                parts.append(part)
                num_characters += len(part)
                if max_characters is not None and num_characters > max_characters:
                    break
        except Exception as error:  # Jinja's errors, and any error that the template's expressions raise
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template rejects these messages: {reason}") from error
        if max_characters is not None and num_characters > max_characters:
            raise InvalidRequest(
                f"the rendered messages exceed {max_characters} characters, more than the model's context can "
                f"hold; shorten the messages"
            )
        return _cut_at_mark("".join(parts)) if continue_final_message else "".join(parts)

    def content_forms(self) -> dict[str, ContentForm]:
        """Return the content that the template renders, by role. Some templates take parts from users only."""
        return {role: self._content_form(role) for role in ROLES}

    def _content_form(self, role: str) -> ContentForm:
        parts = [{"type": "text", "text": text} for text in CHECK_PARTS]
        if not self._renders(role, parts):
            return "text"
        return "any" if self._renders(role, "".join(CHECK_PARTS)) else "parts"

    def _renders(self, role: str, content: str | list[dict[str, str]]) -> bool:
        """Return True if a message with this content shows all texts, and not the parts as Python or JSON objects."""
        message: Json = {"role": role, "content": content}
        user = message if role == "user" else {"role": "user", "content": "Hello"}
        call = {"id": "call00001", "type": "function", "function": {"name": "now", "arguments": {}}}
        conversation = {
            "system": [message, user],
            "user": [user],
            "assistant": [user, message, user],
            "tool": [
                user,
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {**message, "tool_call_id": "call00001", "name": "now"},
            ],
        }[role]
        try:
            text = self.render(conversation, tools=CHECK_TOOLS if role == "tool" else None)
        except InvalidRequest:
            return False
        return all(part in text for part in CHECK_PARTS) and not any(
            key in text for key in ("'type': 'text'", '"type": "text"')
        )

    def check(self, tools: Sequence[Json] | None = None) -> None:
        """Render one short conversation. Raises ModelError for a template error; a rejection through raise_exception is
        not one.
        """
        try:
            self.render(CHECK_MESSAGES, tools=tools)
        except InvalidRequest as error:
            if not isinstance(error.__cause__, jinja2.TemplateError) or isinstance(
                error.__cause__, jinja2.UndefinedError | jinja2.TemplateNotFound | jinja2.TemplateAssertionError
            ):
                line, reason = _line_of(error.__cause__), str(error.__cause__) or type(error.__cause__).__name__
                place = "" if line is None else f" line {line}:"
                what = "one user message" if tools is None else "one user message and a tool"
                raise ModelError(f"{self._name}:{place} cannot render {what}: {reason}") from None


def _mark_end(messages: Sequence[Message]) -> list[Message]:
    """Return the messages with END_OF_MESSAGE appended to the last one, as transformers does to find its end."""
    *before, last = messages
    if not last.get("content"):
        raise InvalidRequest("continue_final_message requires a last message with content")
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": content + END_OF_MESSAGE}]
    *parts, end = content
    if "text" not in end:
        raise InvalidRequest("continue_final_message requires a last message that ends with text")
    return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + END_OF_MESSAGE}]}]


def _cut_at_mark(text: str) -> str:
    """Return the text before the marker. A template that trims messages has trimmed the marker too, so trailing blanks
    are lost.
    """
    place = text.rfind(END_OF_MESSAGE.rstrip())
    if place < 0:
        raise InvalidRequest("continue_final_message: the chat template does not render the last message")
    return text[:place] if text.startswith(END_OF_MESSAGE, place) else text[:place].rstrip()


def _line_of(error: BaseException | None) -> int | None:
    """Return the template line that raised the error: Jinja adds template frames to the traceback."""
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)


# --- transformers' template extensions ------------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's text for training; no effect here."""

    tags = {"generation"}  # noqa: RUF012  # required by jinja

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """`dict` without its attributes."""

    def __call__(self, *args: Any, **kwargs: Any) -> Json:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> Json:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that rejects names with underscores, through which a template could reach Python internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace does not allow names with underscores: {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    own: dict[str, Callable[..., Any] | _Dict] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005  # the server's date is intended
        "dict": _Dict(),
        "namespace": _Namespace,
    }
    environment.globals.update(own)
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

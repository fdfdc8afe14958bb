"""A conversation as the model's template writes it: Jinja in a sandbox, with what transformers gives templates.

No transformers and no torch: the process that renders for the server (chat_worker.py) is started often and killed
when a template does not end. tests hold it to what transformers' own renderer gives.
"""

import json
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trimtab_engine.errors import InvalidRequest, ModelError

MAX_TEMPLATE_CHARACTERS = 1 << 20  # the largest known are a tenth of it
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Variables that a request's own cannot take the place of."""
END_OF_MESSAGE = "CONTINUE_FINAL_MESSAGE_TAG "
"""transformers' own mark: what a template does to the end of a message it does to this."""
TRIAL_MESSAGES = ({"role": "user", "content": "Hello"},)
TRIAL_TOOLS = (
    {
        "type": "function",
        "function": {"name": "now", "description": "The time", "parameters": {"type": "object", "properties": {}}},
    },
)

Message = Mapping[str, Any]
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ChatTemplates:
    """A model's templates by name (most have `default` alone; some one for tools besides), and the names of its special
    tokens, which templates write."""

    by_name: dict[str, str]
    special_tokens: dict[str, str]
    where: str = ""
    """Where they come from, for messages: a folder, a file, a flag."""

    def text(self, *, with_tools: bool) -> str | None:
        """The template to use, as transformers chooses it; None when there is none."""
        if with_tools and "tool_use" in self.by_name:
            return self.by_name["tool_use"]
        return self.by_name.get("default")

    def name(self, *, with_tools: bool) -> str:
        """What messages call the template to use."""
        kind = " for tools" if with_tools and "tool_use" in self.by_name else ""
        return f"the chat template{kind}" + (f" of {self.where}" if self.where else "")

    def check_sizes(self) -> None:
        """Raises ModelError for one that is too long."""
        if any(len(text) > MAX_TEMPLATE_CHARACTERS for text in self.by_name.values()):
            raise ModelError(f"{self.name(with_tools=False)} has more than {MAX_TEMPLATE_CHARACTERS} characters")


class ChatTemplate:
    """One compiled template; `name` is what messages call it. Raises ModelError when it is no Jinja."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], name: str = "the chat template") -> None:
        environment = _environment()
        self._name = name
        try:
            self._template = environment.from_string(text)
            variables = jinja2.meta.find_undeclared_variables(environment.parse(text))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"{name} is broken: line {error.lineno}: {error.message}") from None
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
        """With `continue_final_message` the text ends where the last message does, without what the template writes
        behind it. Raises InvalidRequest when the template refuses the messages or writes more than `max_characters`."""
        if continue_final_message:
            messages = _marked(messages)
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
        except Exception as error:  # jinja's errors, and whatever a template makes of what it is given
            reason = str(error) or type(error).__name__
            raise InvalidRequest(f"the chat template refuses these messages: {reason}") from error
        if max_characters is not None and num_characters > max_characters:
            raise InvalidRequest(
                f"the chat template writes more than {max_characters} characters, which the model's context cannot "
                f"hold; shorten the messages"
            )
        return _up_to_mark("".join(parts)) if continue_final_message else "".join(parts)

    def check(self, tools: Sequence[Json] | None = None) -> None:
        """Render one short conversation. Raises ModelError when the template itself is at fault; one that refuses the
        conversation by raise_exception is not."""
        try:
            self.render(TRIAL_MESSAGES, tools=tools)
        except InvalidRequest as error:
            if not isinstance(error.__cause__, jinja2.TemplateError) or isinstance(
                error.__cause__, jinja2.UndefinedError | jinja2.TemplateNotFound | jinja2.TemplateAssertionError
            ):
                line, reason = _line_of(error.__cause__), str(error.__cause__) or type(error.__cause__).__name__
                place = "" if line is None else f" line {line}:"
                what = "one user message" if tools is None else "one user message beside a tool"
                raise ModelError(f"{self._name} is broken:{place} it cannot write {what}: {reason}") from None


def _marked(messages: Sequence[Message]) -> list[Message]:
    """With END_OF_MESSAGE behind the last message's text, as transformers finds where it ends."""
    *before, last = messages
    if not last.get("content"):
        raise InvalidRequest("continue_final_message needs a last message with content to go on with")
    content = last["content"]
    if isinstance(content, str):
        return [*before, {**last, "content": content + END_OF_MESSAGE}]
    *parts, end = content
    if "text" not in end:
        raise InvalidRequest("continue_final_message needs a last message that ends with text to go on with")
    return [*before, {**last, "content": [*parts, {**end, "text": end["text"] + END_OF_MESSAGE}]}]


def _up_to_mark(text: str) -> str:
    """What stands before the mark; a template that trims messages has trimmed the mark, and so loses their blanks."""
    place = text.rfind(END_OF_MESSAGE.rstrip())
    if place < 0:
        raise InvalidRequest("continue_final_message: the chat template does not write the last message")
    return text[:place] if text.startswith(END_OF_MESSAGE, place) else text[:place].rstrip()


def _line_of(error: BaseException | None) -> int | None:
    """The template's line that raised it: jinja puts the template's own frames into the traceback."""
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    return next((frame.lineno for frame in reversed(frames) if frame.filename == "<template>"), None)


# --- what transformers gives templates ----------------------------------------------------------------------------


class _Generation(jinja2.ext.Extension):
    """{% generation %}…{% endgeneration %} marks the assistant's words for training; here it marks nothing."""

    tags = {"generation"}  # noqa: RUF012  # jinja's own declaration

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
    """`namespace` that keeps no names with underscores, by which a template could reach into Python."""

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
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name with an underscore: {name!r}")


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    own: dict[str, Callable[..., Any] | _Dict] = {
        "raise_exception": _raise_exception,
        "strftime_now": lambda form: datetime.now().strftime(form),  # noqa: DTZ005  # the server's date is meant
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
    """Jinja's own would write HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

"""Chat template rendering in a killable process: `-m trimtab_engine.text.chat_worker`.

A template is the model author's program, and its input comes from clients: together they may not terminate, or exhaust
memory.
"""

from collections.abc import Callable
from typing import Any

from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.ipc.frames import serve_frames
from trimtab_engine.text.chat_template import CHECK_TOOLS, ChatTemplate, ChatTemplates, ContentForm

MAX_ADDRESS_BYTES = 1 << 30
Json = dict[str, Any]


class Rendering:
    """Templates of one model, compiled at first use."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._templates = templates
        self._compiled: dict[str, ChatTemplate] = {}

    def answer(self, request: Json) -> Json:
        """Answer one request: {"check": True} → {"uses_tools": …, "forms": …}; a conversation → {"text": …};
        {"refused": reason} for both.
        """
        try:
            if request.get("check"):
                return {"uses_tools": self._check(), "forms": self._content_forms()}
            template = self._template(with_tools=request["tools"] is not None)
            text = template.render(
                request["messages"],
                tools=request["tools"],
                add_generation_prompt=request["add_generation_prompt"],
                continue_final_message=request["continue_final_message"],
                variables=request["variables"],
                max_characters=request["max_characters"],
            )
        except (InvalidRequest, ModelError) as error:
            return {"refused": str(error)}
        return {"text": text}

    def _check(self) -> bool:
        """Return True if a template uses tools. Raises ModelError if a template is invalid."""
        plain, for_tools = (self._template(with_tools=with_tools) for with_tools in (False, True))
        plain.check()
        if for_tools.uses_tools:
            for_tools.check(CHECK_TOOLS)
        elif for_tools is not plain:
            for_tools.check()
        return for_tools.uses_tools

    def _content_forms(self) -> dict[str, ContentForm]:
        """Return the content that all templates render, by role."""
        plain, for_tools = (self._template(with_tools=with_tools).content_forms() for with_tools in (False, True))
        return {role: form if form == for_tools[role] else "text" for role, form in plain.items()}

    def _template(self, *, with_tools: bool) -> ChatTemplate:
        text = self._templates.text(with_tools=with_tools)
        assert text is not None  # checked by the caller
        if text not in self._compiled:
            self._compiled[text] = ChatTemplate(
                text, self._templates.special_tokens, self._templates.name(with_tools=with_tools)
            )
        return self._compiled[text]


def start(settings: Json) -> Callable[[Json], Json]:
    return Rendering(ChatTemplates(**settings)).answer


if __name__ == "__main__":
    serve_frames(start, max_address_bytes=MAX_ADDRESS_BYTES)

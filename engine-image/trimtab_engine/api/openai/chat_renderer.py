"""Chat template rendering for the server, in subprocesses with a time limit so that no template blocks other
requests.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.errors import ModelError
from trimtab_engine.ipc.bounded_worker import (
    InvalidText,
    WorkerError,
    WorkerLimits,
    WorkerPool,
    WorkersBusy,
    WorkerTimeout,
)
from trimtab_engine.text.chat_template import ChatTemplates, ContentForm
from trimtab_engine.text.tokenizer import well_formed

LIMITS = WorkerLimits(seconds=2.0, max_workers=4, max_waiting=4096)
"""A conversation of a hundred messages usually takes a millisecond. Four workers: three stuck renderings leave one
free."""
MODULE = "trimtab_engine.text.chat_worker"
RETRY_SECONDS = 2
Json = dict[str, Any]


class ChatRenderer:
    """Renderer of a model's chat templates with a time limit. `uses_tools` and `content_forms` are set by check()."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._pool = WorkerPool(MODULE, asdict(templates), LIMITS) if templates.text(with_tools=False) else None
        self._name = templates.name(with_tools=False)
        self.uses_tools = False
        self.content_forms: dict[str, ContentForm] = {}
        """Content that the templates render, by role; text if a role is missing."""

    async def check(self) -> None:
        """Render once at startup.

        Raises:
            ModelError: A template is invalid or exceeds the time limit.
        """
        if self._pool is None:
            return
        try:
            answer = await self._pool.call({"check": True})
        except WorkerTimeout:
            raise ModelError(
                f"{self._name} rendering one user message exceeds {LIMITS.seconds:g} s; use another one with "
                "--chat-template"
            ) from None
        except WorkerError as error:
            raise ModelError(f"{self._name} cannot be used: {error}; use another one with --chat-template") from None
        if "uses_tools" not in answer:
            raise ModelError(f"{_reason(answer)}; use another one with --chat-template")
        self.uses_tools = answer["uses_tools"]
        self.content_forms = answer["forms"]

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        max_characters: int,
        tools: Sequence[Json] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the conversation as text.

        Raises:
            ApiError: 400 if the template rejects it or exceeds the time limit, 503 if too many renderings wait.
        """
        if self._pool is None:
            raise invalid(
                "this model has no chat template; use /v1/completions, or start the engine with --chat-template",
                "messages",
            )
        request = {
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": variables,
            "max_characters": max_characters,
        }
        try:
            try:
                answer = await self._pool.call(request)
            except InvalidText:
                answer = await self._pool.call(json.loads(well_formed(json.dumps(request, ensure_ascii=False))))
        except WorkersBusy:
            raise ApiError(
                503, "too many conversations are waiting to be rendered; retry later", retry_after=RETRY_SECONDS
            ) from None
        except WorkerError as error:
            raise invalid(f"the chat template failed on these messages: {error}", "messages") from None
        if "text" not in answer:
            raise invalid(_reason(answer), "messages")
        text: str = answer["text"]
        return text

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


def _reason(answer: Json) -> str:
    return str(answer.get("refused") or answer.get("failed") or "the chat template returned no text")

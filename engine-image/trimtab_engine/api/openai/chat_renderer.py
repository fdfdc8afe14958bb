"""Chat templates for the server: rendered in processes that can be killed, so that none holds up other requests."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.errors import ModelError
from trimtab_engine.ipc.bounded_worker import AllBusy, NotText, TookTooLong, WorkerError, WorkerLimits, WorkerPool
from trimtab_engine.text.chat_template import ChatTemplates
from trimtab_engine.text.tokenizer import well_formed

LIMITS = WorkerLimits(seconds=2.0, max_workers=4, max_waiting=4096)
"""Usual is a millisecond for a conversation of a hundred messages. Four, so that three that do not end leave one."""
MODULE = "trimtab_engine.text.chat_worker"
RETRY_SECONDS = 2
Json = dict[str, Any]


class ChatRenderer:
    """A model's templates behind a time limit. `uses_tools` is known after check()."""

    def __init__(self, templates: ChatTemplates) -> None:
        self._pool = WorkerPool(MODULE, asdict(templates), LIMITS) if templates.text(with_tools=False) else None
        self._name = templates.name(with_tools=False)
        self.uses_tools = False

    async def check(self) -> None:
        """Render once, before anybody waits for it. Raises ModelError when a template is broken or does not end."""
        if self._pool is None:
            return
        try:
            answer = await self._pool.call({"check": True})
        except TookTooLong:
            raise ModelError(
                f"{self._name} is broken: one user message was not written within {LIMITS.seconds:g} s; "
                f"give another one with --chat-template"
            ) from None
        except WorkerError as error:
            raise ModelError(f"{self._name} cannot be used: {error}; give another with --chat-template") from None
        if "uses_tools" not in answer:
            raise ModelError(f"{_reason(answer)}; give another one with --chat-template")
        self.uses_tools = answer["uses_tools"]

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
        """The conversation as text. ApiError 400 when the template refuses it, or does not end."""
        if self._pool is None:
            raise invalid("this model has no chat template; use /v1/completions, or --chat-template", "messages")
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
            except NotText:
                answer = await self._pool.call(json.loads(well_formed(json.dumps(request, ensure_ascii=False))))
        except AllBusy:
            raise ApiError(503, "too many conversations wait to be rendered", retry_after=RETRY_SECONDS) from None
        except WorkerError as error:
            raise invalid(f"the chat template did not end well on these messages: {error}", "messages") from None
        if "text" not in answer:
            raise invalid(_reason(answer), "messages")
        text: str = answer["text"]
        return text

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()


def _reason(answer: Json) -> str:
    return str(answer.get("refused") or answer.get("failed") or "the chat template gave no text")

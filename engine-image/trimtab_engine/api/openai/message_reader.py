"""One assistant message of a chat request, read as it is generated: reasoning, content and tool calls.

The Anthropic and Responses APIs are formats of these messages.
"""

from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import dataclass, field, replace

from trimtab_engine.api.openai.generation import GenerationPlan, Piece
from trimtab_engine.api.openai.preparation import PreparedRequest
from trimtab_engine.api.openai.read_ahead import ReadAhead
from trimtab_engine.api.openai.respond import admit, count_prompt
from trimtab_engine.api.openai.response_builders import ChatResponseBuilder, Usage
from trimtab_engine.api.openai.state import ServerState, Serving
from trimtab_engine.api.openai.tool_parsers.parsed import Parsed


@dataclass(slots=True)
class MessageDelta:
    """Output that became certain with one piece. The last delta of a message has a finish reason."""

    parsed: Parsed
    finish_reason: str | None = None
    """stop, length or tool_calls."""
    stop_reason: str | int | None = None
    """The stop string or token that ended the message."""


@dataclass(slots=True)
class MessageReader:
    """Reads the message of an admitted plan. `usage` is complete once the deltas have ended."""

    builder: ChatResponseBuilder
    plan: GenerationPlan
    usage: Usage
    _pieces: ReadAhead
    num_reasoning_tokens: int = 0
    """Tokens whose text was reasoning, counted by pieces."""
    _has_calls: bool = field(default=False, init=False)
    _has_started: bool = field(default=False, init=False)

    @classmethod
    def start(
        cls, state: ServerState, serving: Serving, prepared: PreparedRequest, until: ExitStack
    ) -> "MessageReader":
        """Admit the request and start it.

        Raises:
            QueueFull: A queue limit is reached.
        """
        builder = prepared.builder
        assert isinstance(builder, ChatResponseBuilder)
        plan = replace(prepared.plan, ticket=admit(state, prepared.plan, until))
        pieces = ReadAhead(serving.generator.run(plan), builder.request_id, keeps_ids=False)
        return cls(builder, plan, Usage(plan.num_prompt_tokens), pieces)

    def read_ahead(self) -> None:
        """Continue generating although the client does not read."""
        self._pieces.begin()

    async def deltas(self) -> AsyncGenerator[MessageDelta, None]:
        """Yield what becomes certain. Closing the iterator aborts the request."""
        reader = self.builder.reader()
        async with aclosing(self._pieces) as pieces:
            async for piece in pieces:
                if not self._has_started:
                    count_prompt(self.usage, self.plan, piece)
                    self._has_started = True
                self.usage.num_completion_tokens += piece.num_tokens
                parsed = reader.push(piece.text)
                if piece.finish_reason is not None:
                    parsed = parsed.plus(reader.flush())
                parsed.calls = self.builder.select_calls(parsed.calls)
                self._has_calls = self._has_calls or bool(parsed.calls)
                if parsed.reasoning and not parsed.content and not parsed.calls:
                    self.num_reasoning_tokens += piece.num_tokens
                if parsed.content or parsed.reasoning or parsed.calls or piece.finish_reason is not None:
                    yield MessageDelta(parsed, self._finish_reason(piece), piece.stop_reason)

    def _finish_reason(self, piece: Piece) -> str | None:
        return "tool_calls" if piece.finish_reason == "stop" and self._has_calls else piece.finish_reason

    async def whole(self) -> MessageDelta:
        """Return the complete message."""
        joined = MessageDelta(Parsed())
        async for delta in self.deltas():
            joined.parsed = joined.parsed.plus(delta.parsed)
            joined.finish_reason, joined.stop_reason = delta.finish_reason, delta.stop_reason
        return joined

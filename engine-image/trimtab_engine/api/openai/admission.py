"""Whether the queue takes one more request: --max-num-queued-reqs and --max-num-queued-tokens, both live.

A request that would only wait for longer than its client does is better refused at once: 503 with Retry-After, so that
another replica may take it. Requests count while they wait in the core's queue, but for late ones (`deadline`), behind
which nobody stands; tokens while their request has no first token yet. Each API server judges by what it knows: the
core's counts as last reported, and its own requests.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.messages import EngineState

Reason = Literal["max_num_queued_reqs", "max_num_queued_tokens"]
RETRY_SECONDS = 1  # in Retry-After: a queue moves with every step


class QueueFull(ApiError):
    """503: the queue is as long as it may be."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(503, message, code="queue_full", retry_after=RETRY_SECONDS)
        self.reason = reason


class Ticket:
    """One admitted HTTP request: the prompt tokens of its choices that have no first token yet."""

    def __init__(self, num_tokens: Sequence[int], sent: float, on_change: "Callable[[Ticket, int], None]") -> None:
        self.sent = sent
        self._waiting = dict(enumerate(num_tokens))
        self._on_change = on_change

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def started(self, index: int) -> None:
        """This choice got its first token."""
        self._on_change(self, -self._waiting.pop(index, 0))

    def close(self) -> None:
        """The request has ended, however."""
        num_tokens = sum(self._waiting.values())
        self._waiting.clear()
        self._on_change(self, -num_tokens)


class Admission:
    """One API server's view of the queue. `state` gives what the core last reported.

    With several servers each takes its share of the token limit, as it knows its own tokens only.
    """

    def __init__(
        self, state: Callable[[], EngineState], num_servers: int = 1, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._state, self._num_servers, self._now = state, num_servers, now
        self._tickets: set[Ticket] = set()
        self.num_tokens = 0
        """Prompt tokens of this server's sequences that have no first token yet."""

    def admit(self, num_tokens: Sequence[int]) -> Ticket:
        """Let a request in, given the prompt tokens of each of its choices, or raise QueueFull. A queue that is empty
        takes any one request."""
        state = self._state()
        if state.max_num_queued_reqs:
            self._check_requests(state, len(num_tokens))
        if state.max_num_queued_tokens:
            self._check_tokens(state, sum(num_tokens))
        ticket = Ticket(num_tokens, self._now(), self._change)
        self._tickets.add(ticket)
        self.num_tokens += sum(num_tokens)
        return ticket

    def _change(self, ticket: Ticket, num_tokens: int) -> None:
        self.num_tokens += num_tokens
        if not ticket.num_waiting:
            self._tickets.discard(ticket)

    def num_queued(self, state: EngineState) -> int:
        """Sequences in the core's queue that go before one that comes now, and of those that it has not seen yet the
        ones that will find no seat."""
        unseen = sum(ticket.num_waiting for ticket in self._tickets if ticket.sent > state.time)
        seats = max(0, state.max_num_seqs - state.num_running) if state.num_waiting == 0 else 0
        return state.num_waiting - state.num_waiting_late + max(0, unseen - seats)

    def _check_requests(self, state: EngineState, num_sequences: int) -> None:
        queued, limit = self.num_queued(state), state.max_num_queued_reqs
        if queued and queued + num_sequences > limit:
            raise QueueFull(
                "max_num_queued_reqs",
                f"{queued} requests wait, and max_num_queued_reqs is {limit}; try again later, or on another replica",
            )

    def _check_tokens(self, state: EngineState, num_tokens: int) -> None:
        limit = max(1, state.max_num_queued_tokens // self._num_servers)
        if self.num_tokens and self.num_tokens + num_tokens > limit:
            raise QueueFull(
                "max_num_queued_tokens",
                f"{self.num_tokens} prompt tokens wait for their first output, this request has {num_tokens}, and "
                f"max_num_queued_tokens is {state.max_num_queued_tokens}; try again later, or on another replica",
            )

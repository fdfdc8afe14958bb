"""Admission control: --max-num-queued-reqs and --max-num-queued-tokens, both live.

A request that would wait longer than its client is rejected at once with 503 and Retry-After, so that another replica
can take it. Requests count while they wait in the core's queue, except late ones (`deadline`), which do not block
others; tokens count until their request has its first token. Each API server uses the counts that the core last
reported and its own requests.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.messages.admin import EngineState

Reason = Literal["max_num_queued_reqs", "max_num_queued_tokens"]
RETRY_SECONDS = 1  # for Retry-After; a queue changes with every step


class QueueFull(ApiError):
    """503: the queue has reached its limit."""

    def __init__(self, reason: Reason, message: str) -> None:
        super().__init__(503, message, code="queue_full", retry_after=RETRY_SECONDS)
        self.reason = reason


class Ticket:
    """One admitted HTTP request, with the prompt tokens of its choices that have no first token yet."""

    def __init__(self, num_tokens: Sequence[int], sent: float, on_change: "Callable[[Ticket, int], None]") -> None:
        self.sent = sent
        self._waiting = dict(enumerate(num_tokens))
        self._on_change = on_change

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def started(self, index: int) -> None:
        """Record the first token of a choice."""
        self._on_change(self, -self._waiting.pop(index, 0))

    def close(self) -> None:
        """Release the request's share of the queue, for any outcome."""
        num_tokens = sum(self._waiting.values())
        self._waiting.clear()
        self._on_change(self, -num_tokens)


class Admission:
    """One API server's admission control. `state` returns the state that the core last reported.

    Each of several servers gets an equal share of the token limit, because it only knows its own tokens.
    """

    def __init__(
        self, state: Callable[[], EngineState], num_servers: int = 1, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._state, self._num_servers, self._now = state, num_servers, now
        self._tickets: set[Ticket] = set()
        self.num_tokens = 0
        """Prompt tokens of this server's sequences that have no first token yet."""

    def admit(self, num_tokens: Sequence[int]) -> Ticket:
        """Admit a request, given the prompt tokens of each of its choices. An empty queue accepts any single request.

        Raises:
            QueueFull: A limit is reached.
        """
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
        """Return the number of sequences ahead of a new one: those in the core's queue, and those not yet received by
        the core that will find no free sequence slot.
        """
        unseen = sum(ticket.num_waiting for ticket in self._tickets if ticket.sent > state.time)
        seats = max(0, state.max_num_seqs - state.num_running) if state.num_waiting == 0 else 0
        return state.num_waiting - state.num_waiting_late + max(0, unseen - seats)

    def _check_requests(self, state: EngineState, num_sequences: int) -> None:
        queued, limit = self.num_queued(state), state.max_num_queued_reqs
        if queued and queued + num_sequences > limit:
            raise QueueFull(
                "max_num_queued_reqs",
                f"{queued} requests are waiting and max_num_queued_reqs is {limit}; retry later or on another replica",
            )

    def _check_tokens(self, state: EngineState, num_tokens: int) -> None:
        limit = max(1, state.max_num_queued_tokens // self._num_servers)
        if self.num_tokens and self.num_tokens + num_tokens > limit:
            raise QueueFull(
                "max_num_queued_tokens",
                f"{self.num_tokens} prompt tokens are waiting, this request has {num_tokens}, and "
                f"max_num_queued_tokens is {state.max_num_queued_tokens}; retry later or on another replica",
            )

"""The sequences that wait, in two lines: those whose first token may still come in time, and behind them the late ones.

Without an allowance nobody is late, and all of it is one line by arrival. Who has had its turn is late no more. The
rules are those of the engine's queue order `deadline` (docs/concepts/scheduling.md); a property test compares.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from trimtab_operator.tuner.engine_model.sequence import Sequence

LATEST_START = 0.75
"""Part of its allowance that a sequence may wait, before any step has shown how long computing its prompt takes."""
EARLIEST_LATE = 0.5
"""Part of an allowance before which nobody is late, however long a step has taken."""
REMEMBERED = 0.9
"""What a step that computes a prompt leaves of the longest before it."""
LATE_SHARE = 10
"""While late ones wait, one of so many admissions is theirs."""

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Allowance:
    """How long a first token may take, in seconds: a prompt of n tokens is given `seconds` + n × the other."""

    seconds: float
    seconds_per_prompt_token: float = 0.0


class WaitingLines:
    """`count` is how many wait in both lines. `num_cached` tells how many tokens of a prompt need not be computed."""

    __slots__ = (
        "_allowance",
        "_budget",
        "_fresh",
        "_late",
        "_num_cached",
        "_preempted",
        "_step_seconds",
        "_streak",
        "count",
    )

    def __init__(self, allowance: Allowance | None, budget: int, num_cached: Callable[[Sequence], int]) -> None:
        self.count = 0
        self._num_cached = num_cached
        self._budget = budget
        self._step_seconds = 0.0  # how long steps that compute prompts took lately, at most
        self._allowance = allowance
        self._fresh: deque[Sequence] = deque()  # in time, never admitted, by order
        self._preempted: list[Sequence] = []  # in time, by order
        self._late: deque[Sequence] = deque()  # never admitted, by order
        self._streak = 0  # admissions in a row that passed late ones over

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, self._fresh, self._late)

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest sequence arrived; None: nobody waits."""
        heads = [line[0].arrival for line in (self._preempted, self._fresh, self._late) if line]
        return min(heads) if heads else None

    @property
    def is_headed_by_late(self) -> bool:
        """Whether only late ones wait: whoever comes goes before them."""
        return bool(self._late) and not self._fresh and not self._preempted

    def add(self, sequence: Sequence) -> None:
        """A new one, younger than all others."""
        self._fresh.append(sequence)
        self.count += 1

    def put_back(self, sequence: Sequence) -> None:
        """One that ran."""
        insort(self._preempted, sequence, key=_order)
        self.count += 1

    def head(self, now: float) -> Sequence:
        """Who is admitted next. Somebody must wait."""
        if self._allowance is not None:
            self._tell_late(now)
        return self._line[0]

    def pop_head(self) -> None:
        """Admit the one that head() gave."""
        line = self._line
        if line is self._late:
            self._streak = 0
        elif self._late:
            self._streak += 1
        del line[0]
        self.count -= 1

    def next_change(self) -> float:
        """When the head of those in time becomes late, at the earliest; infinity: it does not."""
        if self._allowance is None or not self._fresh or self._in_time is not self._fresh:
            return math.inf
        sequence = self._fresh[0]
        return sequence.arrival + self._longest_wait(sequence, sequence.num_prompt)

    def note_step(self, seconds: float) -> None:
        """A step has computed prompts, and took so long."""
        self._step_seconds = max(seconds, REMEMBERED * self._step_seconds)

    def set_policy(self, allowance: Allowance | None, budget: int) -> None:
        """Others from now on: who is late is judged anew, and without an allowance nobody is."""
        if (self._allowance is None) != (allowance is None):
            self._streak = 0
        self._allowance, self._budget = allowance, budget
        if self._late:
            self._fresh = deque(sorted([*self._late, *self._fresh], key=_order))
            self._late.clear()

    @property
    def _in_time(self) -> deque[Sequence] | list[Sequence]:
        """Whoever of those in time came first stands at its head."""
        preempted, fresh = self._preempted, self._fresh
        return preempted if preempted and not (fresh and fresh[0].order < preempted[0].order) else fresh

    @property
    def _line(self) -> deque[Sequence] | list[Sequence]:
        in_time = self._in_time
        return self._late if self._late and (not in_time or self._streak >= LATE_SHARE - 1) else in_time

    def _tell_late(self, now: float) -> None:
        """Send those from the head of the line in time to the other that have waited too long."""
        fresh, late = self._fresh, self._late
        while fresh and self._in_time is fresh and self._is_too_late(fresh[0], now):
            sequence = fresh.popleft()
            sequence.was_late = True
            if late and late[-1].order > sequence.order:
                insort(late, sequence, key=_order)
            else:
                late.append(sequence)

    def _is_too_late(self, sequence: Sequence, now: float) -> bool:
        """What the prompt would find in the prefix cache is looked up only where that decides."""
        waited, num_tokens = now - sequence.arrival, sequence.num_prompt
        if waited <= self._longest_wait(sequence, num_tokens):
            return False
        if num_tokens <= self._budget or waited > self._longest_wait(sequence, 1):
            return True
        return waited > self._longest_wait(sequence, num_tokens - self._num_cached(sequence))

    def _longest_wait(self, sequence: Sequence, num_tokens: int) -> float:
        """How long it may wait if so many tokens of its prompt are to be computed."""
        allowance = self._allowance
        assert allowance is not None
        seconds = allowance.seconds + allowance.seconds_per_prompt_token * sequence.num_prompt
        if not self._step_seconds:
            return LATEST_START * seconds
        num_steps = -(-num_tokens // self._budget)
        return max(EARLIEST_LATE * seconds, seconds - num_steps * self._step_seconds)

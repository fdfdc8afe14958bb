"""The sequences that wait, in two lines: those whose first token may still come in time, and behind them the late ones.

Without an allowance nobody is late, and all of it is one line by arrival. The rules are those of the engine's queue
order `deadline` (docs/scheduling.md); a property test compares.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter

from trimtab_operator.tuner.twin.sequence import Sequence

LATEST_START = 0.75
"""Part of its allowance that a sequence may wait, before any step has shown how long computing its prompt takes."""
EARLIEST_LATE = 0.5
"""Part of an allowance before which nobody is late, however long a step has taken."""
REMEMBERED = 0.9
"""What a step that computes a prompt leaves of the longest before it."""
LATE_SHARE = 10
"""While late ones wait, one of so many admissions is theirs."""
LATE = 1 << 40
"""What the order of a late sequence is raised by: it is served after all others, and preempted before them."""

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Allowance:
    """How long a first token may take, in seconds: a prompt of n tokens is given `seconds` + n × the other."""

    seconds: float
    seconds_per_prompt_token: float = 0.0


class WaitingLines:
    """`count` is how many wait in both lines."""

    __slots__ = ("_allowance", "_budget", "_fresh", "_late", "_preempted", "_step_seconds", "_streak", "count")

    def __init__(self, allowance: Allowance | None, budget: int) -> None:
        self.count = 0
        self._budget = budget
        self._step_seconds = 0.0  # how long steps that compute prompts took lately, at most
        self._allowance = allowance
        self._fresh: deque[Sequence] = deque()  # in time, never admitted; all younger than those preempted
        self._preempted: list[Sequence] = []  # in time, older than those, by order
        self._late: list[Sequence] = []  # by order
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
        insort(self._late if sequence.order >= LATE else self._preempted, sequence, key=_order)
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
        if line is self._fresh:
            self._fresh.popleft()
        else:
            del line[0]
        self.count -= 1

    def next_change(self) -> float:
        """When the head of those in time becomes late; infinity: it does not."""
        if self._allowance is None:
            return math.inf
        line = self._preempted or self._fresh
        if not line or line[0].num_generated:
            return math.inf
        return line[0].arrival + self._longest_wait(line[0])

    def note_step(self, seconds: float) -> None:
        """A step has computed prompts, and took so long."""
        self._step_seconds = max(seconds, REMEMBERED * self._step_seconds)

    def set_policy(self, allowance: Allowance | None, budget: int) -> None:
        """Others from now on. Without an allowance, nobody who waits is late any more."""
        self._allowance, self._budget = allowance, budget
        if allowance is None and self._late:
            self._streak = 0
            everybody, self._late = [*self], []
            for sequence in everybody:
                sequence.order %= LATE
            self._preempted, self._fresh = sorted(everybody, key=_order), deque()

    @property
    def _line(self) -> deque[Sequence] | list[Sequence]:
        in_time = self._preempted or self._fresh
        return self._late if self._late and (not in_time or self._streak >= LATE_SHARE - 1) else in_time

    def _tell_late(self, now: float) -> None:
        """Send those from the head of the line in time to the other that have waited too long."""
        while line := self._preempted or self._fresh:
            sequence = line[0]
            if sequence.num_generated or now - sequence.arrival <= self._longest_wait(sequence):
                return
            del line[0]
            sequence.order += LATE
            insort(self._late, sequence, key=_order)

    def _longest_wait(self, sequence: Sequence) -> float:
        allowance = self._allowance
        assert allowance is not None
        seconds = allowance.seconds + allowance.seconds_per_prompt_token * sequence.num_prompt
        if not self._step_seconds:
            return LATEST_START * seconds
        num_steps = -(-sequence.num_prompt // self._budget)
        return max(EARLIEST_LATE * seconds, seconds - num_steps * self._step_seconds)

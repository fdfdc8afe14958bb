"""Queue with two lines: sequences whose first token may still be in time, and after them the late ones.

Without an allowance no sequence is late, and the queue is in order of arrival. An admitted sequence is never late
again. The rules are those of the engine's queue order `deadline` (docs/concepts/scheduling.md); a property test
compares both.
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
"""Share of its allowance that a sequence may wait before any step has shown how long its prompt takes."""
EARLIEST_LATE = 0.5
"""Share of the allowance before which no sequence is late, however long steps take."""
REMEMBERED = 0.9
"""Decay per prefill step of the longest observed prefill step."""
LATE_SHARE = 10
"""While late sequences wait, one of this many admissions is theirs."""

_order = attrgetter("order")


@dataclass(frozen=True, slots=True)
class Allowance:
    """TTFT allowance in seconds: `seconds` + `seconds_per_prompt_token` × prompt tokens."""

    seconds: float
    seconds_per_prompt_token: float = 0.0


class WaitingLines:
    """The queue. `count` is the number of sequences in both lines; `num_cached` returns the cached tokens of a
    prompt.
    """

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
        self._step_seconds = 0.0  # longest recent step that computed prompts
        self._allowance = allowance
        self._fresh: deque[Sequence] = deque()  # in time, never admitted, by order
        self._preempted: list[Sequence] = []  # in time, by order
        self._late: deque[Sequence] = deque()  # never admitted, by order
        self._streak = 0  # consecutive admissions that passed over late sequences

    def __iter__(self) -> Iterator[Sequence]:
        return chain(self._preempted, self._fresh, self._late)

    @property
    def oldest_arrival(self) -> float | None:
        """Arrival time of the oldest sequence; None if the queue is empty."""
        heads = [line[0].arrival for line in (self._preempted, self._fresh, self._late) if line]
        return min(heads) if heads else None

    @property
    def is_headed_by_late(self) -> bool:
        """True if only late sequences wait: new ones go ahead of them."""
        return bool(self._late) and not self._fresh and not self._preempted

    def add(self, sequence: Sequence) -> None:
        """Add a new sequence, younger than all others."""
        self._fresh.append(sequence)
        self.count += 1

    def requeue(self, sequence: Sequence) -> None:
        """Add a preempted sequence."""
        insort(self._preempted, sequence, key=_order)
        self.count += 1

    def head(self, now: float) -> Sequence:
        """Return the next sequence to admit. The queue must not be empty."""
        if self._allowance is not None:
            self._move_late(now)
        return self._line[0]

    def pop_head(self) -> None:
        """Remove the sequence that head() returned."""
        line = self._line
        if line is self._late:
            self._streak = 0
        elif self._late:
            self._streak += 1
        del line[0]
        self.count -= 1

    def next_change(self) -> float:
        """Return the earliest time at which the head of the line in time becomes late; infinity if it does not."""
        if self._allowance is None or not self._fresh or self._in_time is not self._fresh:
            return math.inf
        sequence = self._fresh[0]
        return sequence.arrival + self._longest_wait(sequence, sequence.num_prompt)

    def record_step(self, seconds: float) -> None:
        """Record the duration of a step that computed prompts."""
        self._step_seconds = max(seconds, REMEMBERED * self._step_seconds)

    def set_policy(self, allowance: Allowance | None, budget: int) -> None:
        """Change allowance and budget; lateness is evaluated again, and without an allowance no sequence is late."""
        if (self._allowance is None) != (allowance is None):
            self._streak = 0
        self._allowance, self._budget = allowance, budget
        if self._late:
            self._fresh = deque(sorted([*self._late, *self._fresh], key=_order))
            self._late.clear()

    @property
    def _in_time(self) -> deque[Sequence] | list[Sequence]:
        """The line in time whose head arrived first."""
        preempted, fresh = self._preempted, self._fresh
        return preempted if preempted and not (fresh and fresh[0].order < preempted[0].order) else fresh

    @property
    def _line(self) -> deque[Sequence] | list[Sequence]:
        in_time = self._in_time
        return self._late if self._late and (not in_time or self._streak >= LATE_SHARE - 1) else in_time

    def _move_late(self, now: float) -> None:
        """Move sequences that have waited too long from the head of the line in time to the late one."""
        fresh, late = self._fresh, self._late
        while fresh and self._in_time is fresh and self._is_too_late(fresh[0], now):
            sequence = fresh.popleft()
            sequence.was_late = True
            if late and late[-1].order > sequence.order:
                insort(late, sequence, key=_order)
            else:
                late.append(sequence)

    def _is_too_late(self, sequence: Sequence, now: float) -> bool:
        """Return True if it has waited too long. The prefix cache is only looked up if it decides."""
        waited, num_tokens = now - sequence.arrival, sequence.num_prompt
        if waited <= self._longest_wait(sequence, num_tokens):
            return False
        if num_tokens <= self._budget or waited > self._longest_wait(sequence, 1):
            return True
        return waited > self._longest_wait(sequence, num_tokens - self._num_cached(sequence))

    def _longest_wait(self, sequence: Sequence, num_tokens: int) -> float:
        """Return how long it may wait with this many prompt tokens to compute."""
        allowance = self._allowance
        assert allowance is not None
        seconds = allowance.seconds + allowance.seconds_per_prompt_token * sequence.num_prompt
        if not self._step_seconds:
            return LATEST_START * seconds
        num_steps = -(-num_tokens // self._budget)
        return max(EARLIEST_LATE * seconds, seconds - num_steps * self._step_seconds)

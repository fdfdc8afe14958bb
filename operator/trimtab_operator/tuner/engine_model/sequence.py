"""One request in the engine model: lengths instead of tokens."""

from __future__ import annotations

from typing import Any


class Sequence:
    """A request with a prompt and an output of known lengths, in tokens. Times are seconds of the engine's clock.

    While it decodes, its progress follows from `finish_step`: the engine counts steps, not tokens of each sequence.
    """

    __slots__ = (
        "arrival",
        "finish_step",
        "finished_at",
        "first_token_at",
        "kept",
        "keys",
        "last_token_at",
        "num_blocks",
        "num_cached",
        "num_computed",
        "num_ever_computed",
        "num_generated",
        "num_hit",
        "num_output",
        "num_preemptions",
        "num_prompt",
        "num_shared",
        "num_slow_gaps",
        "order",
        "phase",
        "slow_base",
        "was_late",
    )

    def __init__(
        self, arrival: float, num_prompt: int, num_output: int, keys: tuple[int, ...] = (), *, num_hit: int = 0
    ) -> None:
        self.arrival = arrival
        self.num_prompt = num_prompt
        self.num_output = num_output
        self.keys = keys
        """Ids of the prompt's leading full KV blocks: equal ids mean equal prefixes. Empty: no shared prefix."""
        self.num_hit = num_hit
        """Prompt tokens that the prefix cache is assumed to hold when it is first admitted; for KvBlocks, which does
        not know prefixes."""
        self.num_shared = 0  # blocks that other requests hold too; for KvBlocks
        self.order = -1  # of arrival at the engine; set there
        self.was_late = False  # it has waited in the late queue
        self.num_generated = 0  # output tokens; while it decodes, as of when that began
        self.num_computed = 0  # likewise
        self.num_ever_computed = 0  # the most that was computed before a preemption
        self.num_cached = 0  # prompt tokens in the prefix cache when it was first admitted
        self.num_blocks = 0  # while its prompt is being computed
        self.num_preemptions = 0
        self.num_slow_gaps = 0  # gaps between two tokens that were longer than the engine's slow_gap
        self.slow_base = 0
        self.finish_step = 0
        self.phase = 0  # in which steps, modulo the block size, it needs another block
        self.first_token_at: float | None = None
        self.last_token_at = 0.0  # while it is preempted
        self.finished_at: float | None = None
        self.kept: Any = None  # state of the KV blocks while it is preempted

    @property
    def num_tokens(self) -> int:
        """Tokens to compute before the next one can be sampled, while it waits."""
        return self.num_prompt + self.num_generated

    @property
    def ttft(self) -> float | None:
        """Seconds from arrival to the first token; None before that."""
        return None if self.first_token_at is None else self.first_token_at - self.arrival

    @property
    def mean_gap(self) -> float | None:
        """Mean seconds between two tokens; None with fewer than two, or before it has finished."""
        if self.num_output < 2 or self.finished_at is None or self.first_token_at is None:
            return None
        return (self.finished_at - self.first_token_at) / (self.num_output - 1)

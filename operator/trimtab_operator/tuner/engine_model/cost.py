"""Step time: linear in what a step computes and reads; and the sums from which it is fitted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepCost:
    """seconds = per_step + per_token·tokens + per_sequence·sequences + per_context·context + per_attended·attended

    `context` is the total length of the step's sequences after it, which attention reads. `attended` counts pairs of a
    computed token and a token that it attends to; for decodes both are equal.
    """

    per_step: float
    per_token: float
    per_sequence: float
    per_context: float
    per_attended: float = 0.0
    per_prefill_step: float = 0.0
    """Extra cost of a step with prefill: it replays no whole graph."""

    def seconds(self, tokens: int, sequences: int, context: int, attended: int) -> float:
        """Return the time of one step."""
        return (
            self.per_step
            + self.per_token * tokens
            + self.per_sequence * sequences
            + self.per_context * context
            + self.per_attended * attended
        )


@dataclass(slots=True)
class StepSums:
    """Sums over all steps of one kind, as exported by the engine."""

    steps: int = 0
    tokens: int = 0
    sequences: int = 0
    context: int = 0
    attended: int = 0
    seconds: float = 0.0

    def add(self, steps: int, tokens: int, sequences: int, context: int, attended: int, seconds: float) -> None:
        """Add these steps."""
        self.steps += steps
        self.tokens += tokens
        self.sequences += sequences
        self.context += context
        self.attended += attended
        self.seconds += seconds

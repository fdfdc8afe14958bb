"""One step's work, as the scheduler hands it to the model runner: plain values, no policy, no tensor."""

from dataclasses import dataclass

from trimtab_engine.request import Request


@dataclass(slots=True)
class ScheduledSequence:
    """Tokens [start, start + num_tokens) of a request, to be computed in this step.

    ```
    token_ids   |---- computed ----|==== this step ====|-- later --|
                0                start       start + num_tokens   len(token_ids)
    ```
    `samples` is true when the newest token is among them: then the step also yields the next one.
    """

    request: Request
    start: int
    num_tokens: int
    samples: bool


@dataclass(slots=True)
class Batch:
    """What one step computes. Requests that were preempted to make room are named for statistics."""

    step: int
    sequences: list[ScheduledSequence]
    num_tokens: int
    preempted: list[Request]

    @property
    def kind(self) -> str:
        """prefill, decode or mixed: by whether sequences compute more than their newest token; idle when empty."""
        if not self.sequences:
            return "idle"
        num_prefills = sum(1 for s in self.sequences if s.num_tokens > 1 or not s.samples)
        if num_prefills == 0:
            return "decode"
        return "prefill" if num_prefills == len(self.sequences) else "mixed"

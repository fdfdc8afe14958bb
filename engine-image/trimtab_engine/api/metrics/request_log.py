"""The newest requests in numbers, for whoever wants to know lengths and latencies together: GET /admin/v1/requests.

Histograms say how long prompts are and how long answers are, not which answer belongs to which prompt. Here are
lengths and times of single sequences, without text, id or client. Bounded: who asks too seldom is told what it missed.
"""

from collections import deque
from typing import Any

from trimtab_engine.api.metrics.observations import FinishedSequence

KEEP = 4096  # sequences: at 100 a second 40 s, about 250 KB of JSON
FINISHED_COLUMNS = (
    "age_seconds",
    "e2e_seconds",
    "prompt_tokens",
    "cached_tokens",
    "output_tokens",
    "ttft_seconds",
    "decode_seconds",
    "preemptions",
    "reason",
)
UNFINISHED_COLUMNS = ("age_seconds", "prompt_tokens", "cached_tokens", "output_tokens")


class RequestLog:
    """Finished sequences of one engine, numbered from 1 in the order in which they ended."""

    def __init__(self, keep: int = KEEP) -> None:
        self._lives: deque[FinishedSequence] = deque(maxlen=keep)
        self._count = 0

    def add(self, life: FinishedSequence) -> None:
        self._lives.append(life)
        self._count += 1

    def since(self, after: int, now: float) -> dict[str, Any]:
        """What ended after number `after`: rows of FINISHED_COLUMNS. Ages are seconds before `now` of the arrival, so
        that clocks of two machines need not agree. `missed` ended too long ago to be here still; a number from before
        a restart, beyond the newest, is taken as 0."""
        known = after if after <= self._count else 0
        new = self._count - known
        lives = list(self._lives)[-new:] if new else []
        return {
            "columns": {"finished": FINISHED_COLUMNS, "unfinished": UNFINISHED_COLUMNS},
            "next": self._count,
            "missed": new - len(lives),
            "finished": [_row(life, now) for life in lives],
        }


def _row(life: FinishedSequence, now: float) -> list[Any]:
    ttft = None if life.first_token is None else life.first_token - life.arrival
    decode = None if life.first_token is None or life.last_token is None else life.last_token - life.first_token
    return [
        now - life.arrival,
        life.end - life.arrival,
        life.num_prompt_tokens,
        life.num_cached_tokens,
        life.num_generation_tokens,
        ttft,
        decode,
        life.num_preemptions,
        life.reason,
    ]

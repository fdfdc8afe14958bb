"""Numbers of recent requests, for analysis of lengths together with latencies: GET /admin/v1/requests.

Histograms do not relate prompt lengths to output lengths. This log has lengths and times of single sequences, without
text, ID or client. It is bounded: clients that poll too rarely are told how many entries they missed.
"""

from collections import deque
from typing import Any

from trimtab_engine.api.metrics.observations import FinishedSequence

KEEP = 4096  # sequences: 40 s at 100 per second, about 250 KB of JSON
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
    """Finished sequences of one engine, numbered from 1 in order of completion."""

    def __init__(self, keep: int = KEEP) -> None:
        self._lives: deque[FinishedSequence] = deque(maxlen=keep)
        self._count = 0

    def add(self, sequence: FinishedSequence) -> None:
        self._lives.append(sequence)
        self._count += 1

    def since(self, after: int, now: float) -> dict[str, Any]:
        """Return sequences finished after number `after`, as rows of FINISHED_COLUMNS. Ages are seconds from arrival to
        `now`, so that clocks of two machines need not agree. `missed` counts sequences already dropped; a number beyond
        the newest (from before a restart) is treated as 0.
        """
        known = after if after <= self._count else 0
        new = self._count - known
        lives = list(self._lives)[-new:] if new else []
        return {
            "columns": {"finished": FINISHED_COLUMNS, "unfinished": UNFINISHED_COLUMNS},
            "next": self._count,
            "missed": new - len(lives),
            "finished": [_row(sequence, now) for sequence in lives],
        }


def _row(sequence: FinishedSequence, now: float) -> list[Any]:
    ttft = None if sequence.first_token is None else sequence.first_token - sequence.arrival
    decode = (
        None
        if sequence.first_token is None or sequence.last_token is None
        else sequence.last_token - sequence.first_token
    )
    return [
        now - sequence.arrival,
        sequence.end - sequence.arrival,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        sequence.num_generation_tokens,
        ttft,
        decode,
        sequence.num_preemptions,
        sequence.reason,
    ]

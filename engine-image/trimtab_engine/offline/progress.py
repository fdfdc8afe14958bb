"""Progress display of the offline LLM class, and its handling of Ctrl-C."""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from trimtab_engine.api.metrics.stats_line import StatisticsLine
from trimtab_engine.messages.requests import StepStats
from trimtab_engine.offline.embeddings import PendingEmbedding
from trimtab_engine.offline.prompts import PendingPrompt

OnStep = Callable[[StepStats], None]
STATS_INTERVAL_SECONDS = 10.0

logger = logging.getLogger("trimtab_engine.offline.llm")


class Rates:
    """Tokens per second so far, for the progress bar."""

    def __init__(self, started: float) -> None:
        self._started = started
        self._input = self._output = 0

    def note(self, one: PendingPrompt | PendingEmbedding) -> str:
        self._input += len(one.prompt_token_ids)
        self._output += sum(len(choice.token_ids) for choice in one.choices)
        seconds = max(time.monotonic() - self._started, 1e-9)
        return f"input {self._input / seconds:.1f} toks/s, output {self._output / seconds:.1f} toks/s"


class Statistics:
    """Forwards each step's statistics and optionally logs the server's statistics line."""

    def __init__(self, on_step: OnStep | None, *, log: bool, device: str) -> None:
        self._on_step = on_step
        self._line = StatisticsLine(device=device) if log else None
        self._logged = time.monotonic()

    def note(self, stats: StepStats) -> None:
        if self._on_step is not None:
            self._on_step(stats)
        if self._line is None:
            return
        self._line.add(stats)
        now = time.monotonic()
        if now - self._logged >= STATS_INTERVAL_SECONDS:
            for text in self._line.take(now - self._logged)[0]:
                logger.info("%s", text)
            self._logged = now


@contextmanager
def interrupt_event() -> Iterator[threading.Event]:
    """Set the event on Ctrl-C instead of interrupting a step; a second Ctrl-C stops at once."""
    interrupted = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return

    def on_signal(_: int, __: FrameType | None) -> None:
        interrupted.set()
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, on_signal)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)

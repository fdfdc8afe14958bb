"""Seconds of each stage of this engine's start, from the creation of its process to the first token.

Stages of the core are those of LoadProgress. The time before the container's process starts belongs to Kubernetes: the
operator measures it.
"""

from collections.abc import Callable, Mapping

from trimtab_engine.ipc.process_age import PROGRAM_AGE_SECONDS, process_age

PROCESS, DOWNLOAD, IMPORTS, FIRST_TOKEN = "process", "download", "imports", "first_token"


class StartClock:
    """Stage durations. `age` returns the seconds since the process was created; `program_age` is its value when the
    program began, `download_seconds` the part before imports in which the model was downloaded.
    """

    def __init__(
        self,
        *,
        program_age: float = PROGRAM_AGE_SECONDS,
        download_seconds: float = 0.0,
        age: Callable[[], float] = process_age,
    ) -> None:
        self._age = age
        self._stage: str | None = IMPORTS
        self._since = program_age + download_seconds
        self._seconds = {PROCESS: program_age}
        if download_seconds:
            self._seconds[DOWNLOAD] = download_seconds

    @property
    def seconds(self) -> Mapping[str, float]:
        """Seconds of each stage, in order; of the current stage, those until now."""
        if self._stage is None:
            return self._seconds
        return {**self._seconds, self._stage: self._elapsed}

    def enter(self, stage: str) -> None:
        """Begin a stage. Nothing happens in the current stage, or after the end of the start."""
        if self._stage is not None and stage != self._stage:
            self._close()
            self._stage = stage

    def finish(self) -> None:
        """End the last stage: the server accepts requests."""
        if self._stage is not None:
            self._close()
            self._stage = None

    def first_token(self, seconds: float) -> None:
        """Record the time to the first token of the first request, in seconds."""
        self._seconds.setdefault(FIRST_TOKEN, seconds)

    @property
    def _elapsed(self) -> float:
        return max(0.0, self._age() - self._since)

    def _close(self) -> None:
        assert self._stage is not None
        elapsed = self._elapsed
        self._seconds[self._stage] = self._seconds.get(self._stage, 0.0) + elapsed
        self._since += elapsed


def format_stages(seconds: Mapping[str, float]) -> str:
    """Return the stages as "imports 1.20 s, weights 0.80 s, 2.00 s in all"."""
    stages = [f"{stage} {duration:.2f} s" for stage, duration in seconds.items()]
    return ", ".join([*stages, f"{sum(seconds.values()):.2f} s in all"])

"""Liveness of engine cores by the time of their last message. Pure: time is a parameter.

A serving core sends a message with every step, and about once a second when idle. Steps may be long, especially on a
CPU, so three times the longest reported step is allowed; before a longer operation, such as reloading weights, a core
announces it.
"""

from dataclasses import dataclass

STEPS_OF_SILENCE = 3  # multiple of the longest step so far


@dataclass(frozen=True, slots=True)
class Silence:
    """A silent core. `is_long`: True after twice the allowed silence."""

    core: int
    seconds: float
    is_long: bool

    def __str__(self) -> str:
        return f"engine core {self.core} has been silent for {self.seconds:.0f} s"


class LivenessTracker:
    """Tracks last messages. `limit_seconds`: allowed silence; 0: unlimited."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._last_message: dict[int, float] = {}
        self._silence_allowed_until: dict[int, float] = {}
        """Until when each core announced to be silent."""
        self._longest_step: dict[int, float] = {}

    def start(self, core: int, now: float) -> None:
        """Start tracking a serving core."""
        self._last_message[core] = now

    def record_message(self, core: int, now: float) -> None:
        if core in self._last_message:
            self._last_message[core] = now
            self._silence_allowed_until.pop(core, None)

    def allow_silence_until(self, core: int, until: float) -> None:
        """Allow silence until then, or until the next message."""
        self._silence_allowed_until[core] = until

    def note_longest_step(self, core: int, seconds: float) -> None:
        self._longest_step[core] = seconds

    def stop(self, core: int) -> None:
        """Stop tracking the core."""
        for known in (self._last_message, self._silence_allowed_until, self._longest_step):
            known.pop(core, None)

    def seconds(self, now: float) -> dict[int, float]:
        """Return the seconds of silence of each core."""
        return {core: max(0.0, now - record_message) for core, record_message in self._last_message.items()}

    def silence(self, now: float) -> Silence | None:
        """Return the core with the longest excessive silence. None if there is none."""
        found = [self._of(core, seconds, now) for core, seconds in self.seconds(now).items()]
        return max((silence for silence in found if silence is not None), key=lambda s: s.seconds, default=None)

    def _of(self, core: int, seconds: float, now: float) -> Silence | None:
        allowed = max(self._limit, STEPS_OF_SILENCE * self._longest_step.get(core, 0.0))
        if not self._limit or seconds < allowed or now < self._silence_allowed_until.get(core, now):
            return None
        return Silence(core, seconds, seconds >= 2 * allowed)

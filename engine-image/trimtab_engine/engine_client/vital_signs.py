"""When each engine core was last heard, and from when on its silence says that it hangs. Pure: time is a parameter.

A core that serves says something with every step, and idle about once a second. Steps may be long, on a CPU above all,
so three times the longest one that a core has told of is allowed too; and a core says beforehand when it begins
something that takes longer, such as reading weights again.
"""

from dataclasses import dataclass

STEPS_OF_SILENCE = 3  # of the longest step so far


@dataclass(frozen=True, slots=True)
class Silence:
    """A core that says nothing. `is_long`: for twice as long as it may."""

    core: int
    seconds: float
    is_long: bool

    def __str__(self) -> str:
        return f"engine core {self.core} has said nothing for {self.seconds:.0f} s"


class VitalSigns:
    """`limit_seconds` of silence are too long; 0: no silence is."""

    def __init__(self, limit_seconds: float) -> None:
        self._limit = limit_seconds
        self._heard: dict[int, float] = {}
        self._excused: dict[int, float] = {}
        """Until when a core has said that nothing will come from it."""
        self._longest_step: dict[int, float] = {}

    def begins(self, core: int, now: float) -> None:
        """It serves from now on: its silence counts."""
        self._heard[core] = now

    def heard(self, core: int, now: float) -> None:
        if core in self._heard:
            self._heard[core] = now
            self._excused.pop(core, None)

    def excuse_until(self, core: int, until: float) -> None:
        """Nothing need come from it before then, unless something does."""
        self._excused[core] = until

    def note_longest_step(self, core: int, seconds: float) -> None:
        self._longest_step[core] = seconds

    def ends(self, core: int) -> None:
        """It serves no more."""
        for known in (self._heard, self._excused, self._longest_step):
            known.pop(core, None)

    def seconds(self, now: float) -> dict[int, float]:
        """Seconds for which each core has been silent, by core."""
        return {core: max(0.0, now - heard) for core, heard in self._heard.items()}

    def silence(self, now: float) -> Silence | None:
        """The core that has been silent for longest, of those for which that is too long."""
        found = [self._of(core, seconds, now) for core, seconds in self.seconds(now).items()]
        return max((silence for silence in found if silence is not None), key=lambda s: s.seconds, default=None)

    def _of(self, core: int, seconds: float, now: float) -> Silence | None:
        allowed = max(self._limit, STEPS_OF_SILENCE * self._longest_step.get(core, 0.0))
        if not self._limit or seconds < allowed or now < self._excused.get(core, now):
            return None
        return Silence(core, seconds, seconds >= 2 * allowed)

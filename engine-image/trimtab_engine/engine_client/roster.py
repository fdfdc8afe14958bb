"""Which engine cores there are and what each is at, as one client knows it. Pure.

```
 (start)  loading ─────────────► serving ──► retiring ──► absent
                                    ▲                        │
                     joining ───────┘ ◄──────────────────────┘
```
A core that loads at the engine's start is needed: its end is the engine's. One that joins later is so once it serves.
"""

from typing import Literal

Phase = Literal["absent", "loading", "joining", "serving", "retiring"]


class CoreRoster:
    """Which cores take requests. The first `num_initial` of `num_cores` places are taken when the engine starts."""

    def __init__(self, num_cores: int, num_initial: int) -> None:
        self._phases: list[Phase] = ["loading" if core < num_initial else "absent" for core in range(num_cores)]

    def __getitem__(self, core: int) -> Phase:
        return self._phases[core]

    def cores(self, *phases: Phase) -> list[int]:
        return [core for core, phase in enumerate(self._phases) if phase in phases]

    @property
    def serving(self) -> list[int]:
        """The cores that take requests."""
        return self.cores("serving")

    @property
    def present(self) -> list[int]:
        """The cores that have a process."""
        return [core for core, phase in enumerate(self._phases) if phase != "absent"]

    @property
    def has_loaded(self) -> bool:
        """Whether all cores of the start are ready."""
        return "loading" not in self._phases

    def is_needed(self, core: int) -> bool:
        """Whether its end is the end of the engine."""
        return self._phases[core] in ("loading", "serving", "retiring")

    def joins(self, core: int) -> None:
        """It is being started beside those that serve."""
        self._phases[core] = "joining"

    def loads(self, core: int) -> None:
        """It says that it loads: one that had retired has been started again."""
        if self._phases[core] in ("absent", "retiring"):
            self._phases[core] = "joining"

    def serves(self, core: int) -> None:
        """It takes requests from now on."""
        self._phases[core] = "serving"

    def retires(self, core: int) -> None:
        """It takes nothing new."""
        self._phases[core] = "retiring"

    def leaves(self, core: int) -> None:
        """It has no process any more."""
        self._phases[core] = "absent"

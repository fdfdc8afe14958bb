"""Engine cores and their phases, from one client's view. Pure.

```
 (start)  loading ─────────────► serving ──► retiring ──► absent
                                    ▲                        │
                     joining ───────┘ ◄──────────────────────┘
```
A core started with the engine is required: if it ends, the engine fails. A joining core is required once it serves.
"""

from typing import Literal

Phase = Literal["absent", "loading", "joining", "serving", "retiring"]


class CoreRegistry:
    """Phases of the engine cores. The first `num_initial` of `num_cores` start with the engine."""

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
        """True if all initial cores are ready."""
        return "loading" not in self._phases

    def is_needed(self, core: int) -> bool:
        """Return True if the engine fails when this core ends."""
        return self._phases[core] in ("loading", "serving", "retiring")

    def mark_joining(self, core: int) -> None:
        """Mark the core as joining: it is started while others serve."""
        self._phases[core] = "joining"

    def mark_loading(self, core: int) -> None:
        """Mark an absent or retired core as joining: it reported that it loads."""
        if self._phases[core] in ("absent", "retiring"):
            self._phases[core] = "joining"

    def mark_serving(self, core: int) -> None:
        """Mark the core as serving."""
        self._phases[core] = "serving"

    def mark_retiring(self, core: int) -> None:
        """Mark the core as retiring: it takes no new requests."""
        self._phases[core] = "retiring"

    def mark_absent(self, core: int) -> None:
        """Mark the core as absent: it has no process."""
        self._phases[core] = "absent"

"""torch.profiler around running steps: started and stopped on request, one Chrome trace per recording.

Recording costs time and memory with each operator, so it ends after MAX_STEPS steps; the trace is then written on
request. Open it in chrome://tracing or https://ui.perfetto.dev.
"""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trimtab_engine.errors import ConfigError

MAX_STEPS = 500  # some 300,000 operators of a small model, 100 MB while they are held
PROFILER_DIR_HINT = "profiling is off; start with --profiler-dir DIR, where its traces go"

logger = logging.getLogger("trimtab_engine.core")


def check_profiler_dir(folder: Path) -> None:
    """Make the folder. Raises ConfigError where none can be made or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot write to --profiler-dir {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"cannot write to --profiler-dir {folder}: Permission denied")


class Profiler:
    """Records the engine process's steps. `folder` None means profiling is disabled, and starting it is rejected."""

    def __init__(self, folder: str | None) -> None:
        self._folder = None if folder is None else Path(folder)
        self._profile: Any = None
        self._recording = False
        self._num_steps = 0

    def answer(self, action: Callable[[], dict[str, Any]]) -> tuple[int, dict[str, Any]]:
        """Carry out `start` or `stop`: HTTP status and body."""
        try:
            return 200, action()
        except ConfigError as error:
            return 400, {"message": str(error)}

    def start(self) -> dict[str, Any]:
        """Begin recording. Raises ConfigError when profiling is off, runs already or cannot write."""
        if self._folder is None:
            raise ConfigError(PROFILER_DIR_HINT)
        if self._profile is not None:
            raise ConfigError("a profile is being recorded; stop it first")
        check_profiler_dir(self._folder)
        self._profile = _new_profile()
        self._profile.start()
        self._recording, self._num_steps = True, 0
        return {"profiler_dir": str(self._folder), "max_steps": MAX_STEPS}

    def on_step(self) -> None:
        """Count a step; call after each step of the engine."""
        if self._recording:
            self._num_steps += 1
            if self._num_steps >= MAX_STEPS:
                logger.warning("the profile has its %d steps; it ends here, before it was stopped", MAX_STEPS)
                self._end()

    def stop(self) -> dict[str, Any]:
        """End recording and write the trace, which takes seconds. Raises ConfigError when none was begun."""
        if self._folder is None:
            raise ConfigError(PROFILER_DIR_HINT)
        if self._profile is None:
            raise ConfigError("no profile is being recorded; start one first")
        self._end()
        path = self._folder / f"trace-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns()}.json.gz"
        profile, self._profile = self._profile, None
        try:
            profile.export_chrome_trace(str(path))
        except (OSError, RuntimeError) as error:
            raise ConfigError(f"cannot write the trace {path}: {error}") from None
        return {"trace": str(path), "num_steps": self._num_steps}

    def _end(self) -> None:
        if self._recording:
            self._recording = False
            self._profile.stop()


def _new_profile() -> Any:
    """Return a profile of all threads: the model may run in a separate one."""
    from torch import profiler
    from torch._C._profiler import _ExperimentalConfig

    kinds = profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch has it without types
    return profiler.profile(
        activities=list(kinds),
        record_shapes=True,
        experimental_config=_ExperimentalConfig(profile_all_threads=True),
    )

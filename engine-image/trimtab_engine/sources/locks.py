"""File locks (flock) in a folder that several engines share: the kernel releases a lock when its process ends in any
way.

Filesystems that are shared by nodes must carry flock to each other (NFSv4 and CephFS do). One that only pretends to
costs bandwidth, not correctness: what two wrote at once does not pass its checksum.
"""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from trimtab_engine.errors import ConfigError

LOOK_SECONDS = 0.5  # polling interval of waiting processes


class FolderLock:
    """One lock, held until close(). Raises ConfigError where the folder cannot be written."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file: int | None = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise ConfigError(
                f"the cache {path.parent} cannot be written: {error.strerror}; give --download-dir a folder that this "
                f"user may write"
            ) from None

    def take(self, *, shared: bool = False) -> bool:
        """Try to take the lock, exclusive or shared. Return False if it is held elsewhere."""
        assert self._file is not None
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def wait(self, waiting: Callable[[], None], *, shared: bool = False) -> None:
        """Wait for the lock; `waiting` is called at each poll until then."""
        while not self.take(shared=shared):
            waiting()
            time.sleep(LOOK_SECONDS)

    def close(self) -> None:
        """Let go of it. Calling it again does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

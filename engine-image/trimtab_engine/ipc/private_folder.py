"""A private folder for one process's sockets and rendezvous files, removed by a later process after a crash.

The process holds a lock on a file in the folder for its lifetime; a process that gets the lock may remove the folder.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "trimtab-"
LOCK_NAME = "lock"


class PrivateFolder:
    """A folder accessible only to this user (mode 0700). Creating one removes folders of crashed processes."""

    def __init__(self, parent: Path | None = None) -> None:
        parent = parent or Path(tempfile.gettempdir())
        remove_abandoned(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
            self._lock: int | None = os.open(self.path / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            if self.path.exists():  # else another process's clean-up was faster than the lock
                return
            os.close(self._lock)

    def remove(self) -> None:
        """Remove the folder. Safe to call again."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(parent: Path) -> None:
    """Remove the folders in `parent` whose processes ended without removing them."""
    for lock_file in parent.glob(f"{PREFIX}*/{LOCK_NAME}"):
        try:
            lock = os.open(lock_file, os.O_RDWR)
        except OSError:  # another user's, or just removed
            continue
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_file.parent, ignore_errors=True)
        except BlockingIOError:
            pass  # its process is alive
        finally:
            os.close(lock)

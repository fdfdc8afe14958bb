"""Parallel scenarios: the order of files, and which of them need exclusive use of the cluster.

Scenarios mostly wait for pods to start or drain, so they run in lanes, which are pytest-xdist workers (`make e2e` has
three; without `--numprocesses` there is one). Some scenarios need exclusive use of the cluster: they measure latency
under load, take a node away, or kill, replace or reconfigure the operator.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from xdist.scheduler import LoadScopeScheduling

# The longest parallel files first, so that the lanes end at about the same time.
FIRST = ("test_layouts.py", "test_rollback.py", "test_hub.py")
# Files with exclusive use of the cluster, in this order: those that keep the chart's values, those that install it with
# other values, and those that install and remove it.
LAST = (
    "test_autoscaling.py", "test_zero_downtime.py", "test_router.py", "test_tuning.py", "test_node_loss.py",
    "test_operator.py", "test_prometheus.py", "test_gpu_budget.py", "test_without_webhook.py",
    "test_pages.py", "test_readme.py",
)  # fmt: skip


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the scenarios in the order in which lanes run them, file by file."""

    def place(item: pytest.Item) -> int:
        name = item.path.name
        if needs_exclusive_cluster(item):
            return len(FIRST) + 1 + LAST.index(name)
        return FIRST.index(name) if name in FIRST else len(FIRST)

    return sorted(items, key=place)


def needs_exclusive_cluster(item: pytest.Item) -> bool:
    """Return True if the scenario needs exclusive use of the cluster."""
    return item.path.name in LAST


def lane() -> int | None:
    """Return the number of this process's lane, from 1, or None without pytest-xdist."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return int(worker.removeprefix("gw")) + 1 if worker else None


class LaneScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not typed
    """A scheduler that assigns whole files to lanes, and all files of `LAST` to one lane at the end."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # keep the order of in_order()
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "exclusive" if Path(file).name in LAST else file


@dataclass(frozen=True, slots=True)
class Lanes:
    """Coordination of the lanes of one run: a folder with file locks, which are released when their process ends."""

    folder: Path

    @contextmanager
    def use_cluster(self, *, exclusive: bool) -> Iterator[None]:
        """Use the cluster in parallel to other lanes, or exclusively after they have finished."""
        with self._file("cluster") as cluster:
            fcntl.flock(cluster, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
            yield

    def use_namespace(self, name: str) -> None:
        """Record a namespace created by a lane. Appending one line is atomic."""
        with (self.folder / "namespaces").open("a") as file:
            file.write(f"{name}\n")

    def namespaces(self) -> list[str]:
        """Return the namespaces of all lanes."""
        file = self.folder / "namespaces"
        return file.read_text().split() if file.exists() else []

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        with self._file(name) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def installed(self, install: Callable[[], None], uninstall: Callable[[], None]) -> Iterator[None]:
        """Share an installation: the first lane installs it while others wait, and the last one removes it."""
        done = self.folder / "installed"
        with self._file("users") as users:
            with self.locked("installing"):
                fcntl.flock(users, fcntl.LOCK_SH)
                if not done.exists():
                    install()
                    done.touch()
            yield
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another lane still uses it
                return
            uninstall()
            done.unlink()

    def _file(self, name: str) -> IO[str]:
        return (self.folder / name).open("w")

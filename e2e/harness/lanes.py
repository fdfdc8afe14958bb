"""Three stories at once where none disturbs the others: who may run beside whom, and in which order they are taken.

Most of a story is waiting: for a pod to start, to drain, to be noticed. So stories run in lanes, which are workers of
pytest-xdist (`make e2e` has three; without `--numprocesses` there is one). Some stories have the cluster to
themselves: they measure what users feel under load, take a node away, or kill, replace or reconfigure the operator.
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

# The longest of those that run beside others, so that the lanes end at about the same time.
FIRST = ("test_layouts.py", "test_rollback.py", "test_hub.py")
# Those that have the cluster for themselves, in this order: what leaves the chart as it is, what installs it with
# values of its own, and what installs and removes it as a page says.
LAST = (
    "test_autoscaling.py", "test_zero_downtime.py", "test_tuning.py", "test_node_loss.py",
    "test_operator.py", "test_prometheus.py", "test_gpu_budget.py", "test_without_webhook.py",
    "test_pages.py", "test_readme.py",
)  # fmt: skip


def in_order(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """The stories as lanes take them, file by file."""

    def place(item: pytest.Item) -> int:
        name = item.path.name
        if is_alone(item):
            return len(FIRST) + 1 + LAST.index(name)
        return FIRST.index(name) if name in FIRST else len(FIRST)

    return sorted(items, key=place)


def is_alone(item: pytest.Item) -> bool:
    """Whether it has the cluster for itself."""
    return item.path.name in LAST


def lane() -> int | None:
    """Which lane this process is, from 1; None where all stories run in this process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    return int(worker.removeprefix("gw")) + 1 if worker else None


class LaneScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist is not typed
    """One lane takes a whole file, as its stories share fixtures, and one lane all files of `LAST`, at the end."""

    def __init__(self, config: pytest.Config, log: object) -> None:
        config.option.loadscopereorder = False  # the order is the stories'
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return "alone" if Path(file).name in LAST else file


@dataclass(frozen=True, slots=True)
class Lanes:
    """What the lanes of one run share: a folder of locks, each of which ends with the process that holds it."""

    folder: Path

    @contextmanager
    def turn(self, *, is_alone: bool) -> Iterator[None]:
        """Run beside other lanes, or alone once they have come to their end."""
        with self._file("room") as room:
            fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
            yield

    def use_namespace(self, name: str) -> None:
        """Write down a namespace that some lane has made; an appended line is written at once, or not at all."""
        with (self.folder / "namespaces").open("a") as file:
            file.write(f"{name}\n")

    def namespaces(self) -> list[str]:
        """Those of all lanes."""
        file = self.folder / "namespaces"
        return file.read_text().split() if file.exists() else []

    @contextmanager
    def one_at_a_time(self, what: str) -> Iterator[None]:
        with self._file(what) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    @contextmanager
    def installed(self, install: Callable[[], None], uninstall: Callable[[], None]) -> Iterator[None]:
        """What all lanes use: the first installs it while the others wait, the last one to leave removes it."""
        done = self.folder / "installed"
        with self._file("users") as users:
            with self.one_at_a_time("installing"):
                fcntl.flock(users, fcntl.LOCK_SH)
                if not done.exists():
                    install()
                    done.touch()
            yield
            try:
                fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another lane goes on
                return
            uninstall()
            done.unlink()

    def _file(self, name: str) -> IO[str]:
        return (self.folder / name).open("w")

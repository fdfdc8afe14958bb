"""Parallel scenarios: exclusive use of the cluster, one shared installation, and whole files per lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness.lanes import FIRST, LAST, Lanes, LaneScheduling

SCENARIOS = Path(__file__).parents[2] / "e2e"
DEADLINE_SECONDS = 120.0


class Lane:
    """A lane: a thread that enters a context manager and leaves it on request."""

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self.entered, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(enter,))
        self._thread.start()

    def _run(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        with enter():
            self.entered.set()
            self._leave.wait(DEADLINE_SECONDS)

    def assert_enters(self) -> None:
        assert self.entered.wait(DEADLINE_SECONDS)

    def assert_waits(self) -> None:
        assert not self.entered.wait(0.2)

    def leave(self) -> None:
        self._leave.set()
        self._thread.join(DEADLINE_SECONDS)


@pytest.fixture
def lanes(tmp_path: Path) -> Lanes:
    return Lanes(tmp_path)


@pytest.fixture
def lane() -> Iterator[Callable[[Callable[[], AbstractContextManager[None]]], Lane]]:
    made: list[Lane] = []

    def make(enter: Callable[[], AbstractContextManager[None]]) -> Lane:
        made.append(Lane(enter))
        return made[-1]

    yield make
    for each in made:
        each.leave()


Make = Callable[[Callable[[], AbstractContextManager[None]]], Lane]


def test_shared_use_runs_in_parallel(lanes: Lanes, lane: Make) -> None:
    for _ in range(2):
        lane(lambda: lanes.use_cluster(exclusive=False)).assert_enters()


def test_exclusive_use_waits_for_others_and_blocks_them(lanes: Lanes, lane: Make) -> None:
    shared = lane(lambda: lanes.use_cluster(exclusive=False))
    shared.assert_enters()
    exclusive = lane(lambda: lanes.use_cluster(exclusive=True))
    exclusive.assert_waits()
    shared.leave()
    exclusive.assert_enters()
    late = lane(lambda: lanes.use_cluster(exclusive=False))
    late.assert_waits()
    exclusive.leave()
    late.assert_enters()


def test_first_lane_installs_and_last_lane_removes(lanes: Lanes, lane: Make) -> None:
    done: list[str] = []

    def install() -> None:
        time.sleep(0.1)
        done.append("installed")

    def use() -> AbstractContextManager[None]:
        return lanes.installed(install, lambda: done.append("removed"))

    first, second = lane(use), lane(use)
    first.assert_enters()
    second.assert_enters()
    first.leave()
    assert done == ["installed"]
    second.leave()
    assert done == ["installed", "removed"]
    lane(use).assert_enters()
    assert done == ["installed", "removed", "installed"]


def test_failed_installation_is_retried_by_next_lane(lanes: Lanes) -> None:
    def fails() -> None:
        raise RuntimeError("no chart")

    with pytest.raises(RuntimeError, match="no chart"), lanes.installed(fails, fails):
        pass
    done: list[str] = []
    with lanes.installed(lambda: done.append("installed"), lambda: None):
        assert done == ["installed"]


def test_namespaces_of_all_lanes_are_known(lanes: Lanes) -> None:
    assert lanes.namespaces() == []
    for name in ("trimtab-e2e-a", "trimtab-e2e-b"):
        Lanes(lanes.folder).use_namespace(name)
    assert lanes.namespaces() == ["trimtab-e2e-a", "trimtab-e2e-b"]


def test_lane_takes_whole_files_and_one_lane_exclusive_files() -> None:
    scope_of = LaneScheduling._split_scope
    scheduling = LaneScheduling.__new__(LaneScheduling)
    assert scope_of(scheduling, "e2e/test_scale.py::test_a[x::y]") == "e2e/test_scale.py"
    assert {scope_of(scheduling, f"e2e/{name}::test_b") for name in LAST} == {"exclusive"}


@pytest.mark.parametrize("name", FIRST + LAST)
def test_ordered_files_exist(name: str) -> None:
    assert (SCENARIOS / name).is_file()

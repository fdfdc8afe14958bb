"""Stories at once: who is alone is alone, what all use is installed once, and a file belongs to one lane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from harness.lanes import FIRST, LAST, Lanes, LaneScheduling

STORIES = Path(__file__).parents[2] / "e2e"
DEADLINE_SECONDS = 120.0


class Lane:
    """Another lane, a thread that enters something and leaves it when told."""

    def __init__(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        self.is_in, self._leave = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, args=(enter,))
        self._thread.start()

    def _run(self, enter: Callable[[], AbstractContextManager[None]]) -> None:
        with enter():
            self.is_in.set()
            self._leave.wait(DEADLINE_SECONDS)

    def enters(self) -> None:
        assert self.is_in.wait(DEADLINE_SECONDS)

    def stays_out(self) -> None:
        assert not self.is_in.wait(0.2)

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


def test_stories_run_beside_each_other(lanes: Lanes, lane: Make) -> None:
    for _ in range(2):
        lane(lambda: lanes.turn(is_alone=False)).enters()


def test_who_is_alone_waits_for_those_that_run_and_they_for_him(lanes: Lanes, lane: Make) -> None:
    beside = lane(lambda: lanes.turn(is_alone=False))
    beside.enters()
    alone = lane(lambda: lanes.turn(is_alone=True))
    alone.stays_out()
    beside.leave()
    alone.enters()
    late = lane(lambda: lanes.turn(is_alone=False))
    late.stays_out()
    alone.leave()
    late.enters()


def test_what_all_use_is_installed_by_the_first_and_removed_by_the_last(lanes: Lanes, lane: Make) -> None:
    done: list[str] = []

    def install() -> None:
        time.sleep(0.1)
        done.append("installed")

    def use() -> AbstractContextManager[None]:
        return lanes.installed(install, lambda: done.append("removed"))

    first, second = lane(use), lane(use)
    first.enters()
    second.enters()
    first.leave()
    assert done == ["installed"]
    second.leave()
    assert done == ["installed", "removed"]
    lane(use).enters()
    assert done == ["installed", "removed", "installed"]


def test_an_installation_that_fails_is_tried_again_by_the_next_lane(lanes: Lanes) -> None:
    def fails() -> None:
        raise RuntimeError("no chart")

    with pytest.raises(RuntimeError, match="no chart"), lanes.installed(fails, fails):
        pass
    done: list[str] = []
    with lanes.installed(lambda: done.append("installed"), lambda: None):
        assert done == ["installed"]


def test_whoever_leaves_last_knows_every_lanes_namespaces(lanes: Lanes) -> None:
    assert lanes.namespaces() == []
    for name in ("trimtab-e2e-a", "trimtab-e2e-b"):
        Lanes(lanes.folder).use_namespace(name)
    assert lanes.namespaces() == ["trimtab-e2e-a", "trimtab-e2e-b"]


def test_a_lane_takes_whole_files_and_one_lane_all_that_are_alone() -> None:
    scope_of = LaneScheduling._split_scope
    scheduling = LaneScheduling.__new__(LaneScheduling)
    assert scope_of(scheduling, "e2e/test_scale.py::test_a[x::y]") == "e2e/test_scale.py"
    assert {scope_of(scheduling, f"e2e/{name}::test_b") for name in LAST} == {"alone"}


@pytest.mark.parametrize("name", FIRST + LAST)
def test_what_is_ordered_is_there(name: str) -> None:
    assert (STORIES / name).is_file()

"""Waves: all cores step together from the first request on until none has one."""

import random
import threading
from functools import partial
from typing import Any

import pytest
import torch
from trimtab_engine.parallel.wave import ANY, ITEMS, MIXED, Wave, agreed_shape
from trimtab_engine.scheduling.step_inputs import StepShape

DEADLINE_SECONDS = 120.0


class Meeting:
    """A group of one thread per core that gathers all rows."""

    device = "cpu"

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=DEADLINE_SECONDS)
        self._rows: list[torch.Tensor] = []
        self._lock = threading.Lock()
        self._gathered = torch.empty(0)

    def all_gather(self, rows: torch.Tensor) -> torch.Tensor:
        with self._lock:
            self._rows.append(rows)
        if self._barrier.wait() == 0:
            self._gathered, self._rows = torch.cat(self._rows), []
        self._barrier.wait()
        return self._gathered


def tokens(count: int) -> StepShape:
    """Return the shape of `count` decodes."""
    return StepShape(count, 1 if count else None)


def waves(size: int) -> list[Wave]:
    """Return waves of cores that receive each other's announcements immediately."""
    meeting: Any = Meeting(size)
    made = [Wave(meeting) for _ in range(size)]
    for own in made:
        own.announce = partial(_tell, [other for other in made if other is not own])
    return made


def _tell(others: list[Wave], number: int) -> None:
    for other in others:
        other.join(number)


def test_wave_is_announced_once_and_ends_together() -> None:
    (wave,) = waves(1)
    announced: list[int] = []
    wave.announce = announced.append
    assert not wave.is_on
    assert [wave.agree(tokens(count)).num_tokens for count in (8, 4, 0)] == [8, 4, 0]
    assert not wave.is_on
    wave.agree(tokens(2))
    assert announced == [0, 1]


def test_early_announcement_is_joined_and_stale_one_ignored() -> None:
    (wave,) = waves(1)
    wave.agree(tokens(8))
    wave.join(1)  # another core has finished wave 0 and begun the next one already
    wave.agree(tokens(0))
    assert wave.is_on
    wave.agree(tokens(0))
    wave.join(1)  # on its way for long
    assert not wave.is_on


@pytest.mark.parametrize(
    ("said", "agreed"),
    [
        ([[3, 1, 0], [5, 1, 0]], StepShape(5, 1)),
        ([[3, 1, 0], [0, ANY, 0]], StepShape(3, 1)),  # a core without work computes padding of that kind
        ([[0, ANY, 0], [8, 4, 0]], StepShape(8, 4)),
        ([[3, 1, 0], [8, 4, 0]], StepShape(8, None)),  # decodes there, drafts to be verified here
        ([[3, 1, 0], [30, MIXED, 0]], StepShape(30, None)),
        ([[3, 1, 0], [0, MIXED, 0]], StepShape(3, None)),  # a core that sleeps
        ([[0, ANY, 0], [0, ANY, 0]], StepShape(0, None)),
        (
            [[3, 1, 0], [30, ITEMS, 0]],
            StepShape(30, None, has_items=True),
        ),  # images there, so that no core replays a graph
        ([[4, ITEMS, 0], [0, ANY, 0], [9, MIXED, 0]], StepShape(9, None, has_items=True)),
        ([[3, 1, 0], [5, 1, 1]], StepShape(5, 1, has_adapters=True)),  # adapters there, so that both take one graph
        ([[0, ANY, 0], [8, MIXED, 1]], StepShape(8, None, has_adapters=True)),
    ],
)
def test_a_step_is_uniform_when_every_core_s_tokens_are(said: list[list[int]], agreed: StepShape) -> None:
    assert agreed_shape(said) == agreed


def test_core_agrees_on_its_step_shape() -> None:
    (wave,) = waves(1)
    assert wave.agree(StepShape(6, 3)) == StepShape(6, 3)
    assert wave.agree(StepShape(6, None)) == StepShape(6, None)
    assert wave.agree(StepShape(6, 3), can_be_uniform=False) == StepShape(6, None)
    assert wave.agree(StepShape(0, None)) == StepShape(0, None)
    assert wave.agree(StepShape(6, 3, has_adapters=True)) == StepShape(6, 3, has_adapters=True)


def test_cores_that_get_requests_at_random_times_never_wait_for_ever() -> None:
    """Each thread is a core's loop: it steps while it has requests or takes part in a wave."""
    num_cores, num_requests = 3, 60
    made = waves(num_cores)
    left = [num_requests] * num_cores
    work = [0] * num_cores
    steps: list[list[int]] = [[] for _ in range(num_cores)]
    idle = threading.Event()

    def loop(core: int) -> None:
        dice = random.Random(core)
        while not idle.wait(0.0005 * dice.random()):
            if work[core] == 0 and left[core] and dice.random() < 0.3:
                work[core] = dice.randint(1, 4)
                left[core] -= 1
            if work[core] or made[core].is_on:
                steps[core].append(made[core].agree(tokens(8 if work[core] else 0)).num_tokens)
                work[core] = max(0, work[core] - 1)
            elif not any(left) and not any(work) and not any(wave.is_on for wave in made):
                idle.set()

    threads = [threading.Thread(target=loop, args=(core,)) for core in range(num_cores)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert steps[0] == steps[1] == steps[2], "all have made the same steps"
    assert steps[0].count(0) > 1, "there were several waves"


@pytest.mark.parametrize("can_be_uniform", [True, False])
def test_core_agrees_on_images(can_be_uniform: bool) -> None:
    (wave,) = waves(1)
    shape = StepShape(7, None, has_items=True)
    assert wave.agree(shape, can_be_uniform=can_be_uniform) == shape

"""Clock of the API server: steps of the local clock have no effect, and steps of the server's are followed slowly."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest
from trimtab_operator.kube.server_clock import MAX_SLEW, SAMPLE_SECONDS, ServerClock

START = 1_767_268_800.0


class Machine:
    """Clocks of the operator's node and of the API server."""

    def __init__(self, *, local: float = START, server: float = START) -> None:
        self.elapsed, self.local, self.server = 1000.0, local, server
        self.clock = ServerClock(monotonic=lambda: self.elapsed, wall=lambda: self.local)
        self.clock.observe(self.date)

    @property
    def date(self) -> str:
        return formatdate(self.server, usegmt=True)

    def run(self, seconds: float, *, samples: bool = True) -> None:
        for _ in range(int(seconds / SAMPLE_SECONDS)):
            self.elapsed += SAMPLE_SECONDS
            self.local += SAMPLE_SECONDS
            self.server += SAMPLE_SECONDS
            if samples:
                self.clock.observe(self.date)


@pytest.mark.parametrize("ahead", [-3600.0, 40.0, 2400.0])
def test_clock_starts_at_the_servers_time(ahead: float) -> None:
    machine = Machine(local=START + ahead)
    assert abs(machine.clock() - START) <= 1.0
    assert machine.clock.skew_seconds == pytest.approx(ahead, abs=1.0)


@pytest.mark.parametrize("step", [-3600.0, 61.0, 2400.0])
def test_step_of_the_local_clock_changes_nothing(step: float) -> None:
    machine = Machine()
    machine.run(60.0)
    before = machine.clock()
    machine.local += step
    assert machine.clock() == before
    machine.run(600.0)
    assert machine.clock() - before == pytest.approx(600.0, abs=1.0)
    assert machine.clock.skew_seconds == pytest.approx(step, abs=1.0)


@pytest.mark.parametrize("step", [-3600.0, 2400.0])
def test_step_of_the_servers_clock_is_followed_slowly(step: float) -> None:
    machine = Machine()
    machine.run(60.0)
    machine.server += step
    before = machine.clock()
    machine.run(600.0)
    assert abs(machine.clock() - before - 600.0) <= MAX_SLEW * 600.0 + 1.0
    machine.run(abs(step) / MAX_SLEW + 120.0)
    assert machine.clock() == pytest.approx(machine.server, abs=2.5)


def test_deviating_clock_of_an_api_server_is_ignored() -> None:
    machine, chance = Machine(), random.Random(0)
    for _ in range(300):
        machine.run(SAMPLE_SECONDS, samples=False)
        machine.clock.observe(formatdate(machine.server + chance.choice([0.0, 0.0, 900.0]), usegmt=True))
        assert machine.clock() == pytest.approx(machine.server, abs=30.0)


@pytest.mark.parametrize("date", [None, "", "yesterday", "Thu, 99 Jan 2026 00:00:00 GMT"])
def test_answer_without_a_date_is_ignored(date: str | None) -> None:
    machine = Machine()
    machine.run(SAMPLE_SECONDS, samples=False)
    machine.clock.observe(date)
    assert machine.clock() == pytest.approx(machine.server, abs=1.0)

"""One client cannot fill the log with warnings."""

import logging

import pytest
from trimtab_engine.api.http.log_limit import MAX_WARNINGS_PER_PERIOD, PERIOD_SECONDS, RepeatedWarnings

LOGGER = logging.getLogger("tests.log_limit")


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr("trimtab_engine.api.http.log_limit.time.monotonic", lambda: now[0])
    LOGGER.filters = [RepeatedWarnings()]
    return now


def test_repeated_warnings_are_limited_and_counted(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    for port in range(600):
        LOGGER.warning("invalid request from %s", port)
    assert len(caplog.messages) == MAX_WARNINGS_PER_PERIOD
    clock[0] += PERIOD_SECONDS
    LOGGER.warning("invalid request from %s", 7)
    assert caplog.messages[-1] == "invalid request from 7 (595 more since the last such line)"


def test_other_messages_and_levels_are_not_limited(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(MAX_WARNINGS_PER_PERIOD + 1):
        LOGGER.warning("a")
        LOGGER.error("b")
    LOGGER.warning("c")
    assert caplog.messages.count("a") == MAX_WARNINGS_PER_PERIOD
    assert caplog.messages.count("b") == MAX_WARNINGS_PER_PERIOD + 1
    assert caplog.messages.count("c") == 1

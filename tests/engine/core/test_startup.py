"""Log lines of loading."""

import logging

import pytest
from trimtab_engine.core.startup import LOG_INTERVAL_SECONDS, LoadingLog


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_loading_log_reports_stages_and_long_stage_progress(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    log = LoadingLog(clock)
    with caplog.at_level(logging.INFO, logger="trimtab_engine.core"):
        for stage, percent, seconds in [
            ("starting", 0.0, 0.0),
            ("weights", 5.0, 0.1),
            ("weights", 20.0, LOG_INTERVAL_SECONDS / 2),
            ("weights", 41.7, LOG_INTERVAL_SECONDS / 2),
            ("weights", 60.0, 0.1),
            ("profile", 80.0, 0.1),
            ("ready", 100.0, LOG_INTERVAL_SECONDS),
        ]:
            clock.now += seconds
            log.note(stage, percent)
    assert caplog.messages == ["loading: weights, 5%", "loading: weights, 42%", "loading: profile, 80%"]

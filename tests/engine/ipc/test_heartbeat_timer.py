from trimtab_engine.ipc.heartbeat_timer import HeartbeatTimer

HEARTBEAT_SECONDS, SILENCE_SECONDS = 1.0, 5.0


def test_check_on_time_may_judge() -> None:
    timer = HeartbeatTimer(100.0, every_seconds=HEARTBEAT_SECONDS)
    assert all(timer.is_on_time(100.0 + beat * HEARTBEAT_SECONDS) for beat in (1, 2, 4))


def test_late_check_does_not_judge_and_restarts_interval() -> None:
    timer = HeartbeatTimer(100.0, every_seconds=HEARTBEAT_SECONDS)
    assert not timer.is_on_time(100.0 + SILENCE_SECONDS)
    assert timer.is_on_time(100.0 + SILENCE_SECONDS + HEARTBEAT_SECONDS)

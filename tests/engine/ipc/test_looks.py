from trimtab_engine.ipc.looks import Looks

HEARTBEAT_SECONDS, SILENCE_SECONDS = 1.0, 5.0


def test_a_look_a_heartbeat_after_the_last_one_judges() -> None:
    looks = Looks(100.0, every_seconds=HEARTBEAT_SECONDS)
    assert all(looks.is_on_time(100.0 + beat * HEARTBEAT_SECONDS) for beat in (1, 2, 4))


def test_a_late_look_says_nothing_and_the_next_one_is_measured_from_it() -> None:
    looks = Looks(100.0, every_seconds=HEARTBEAT_SECONDS)
    assert not looks.is_on_time(100.0 + SILENCE_SECONDS)
    assert looks.is_on_time(100.0 + SILENCE_SECONDS + HEARTBEAT_SECONDS)

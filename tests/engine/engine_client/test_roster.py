"""What each engine core is at, as one client knows it."""

from trimtab_engine.engine_client.roster import CoreRoster


def test_the_cores_of_the_start_are_needed_and_the_engine_has_loaded_when_all_are_ready() -> None:
    roster = CoreRoster(3, 2)
    assert (roster.present, roster.serving, roster.has_loaded) == ([0, 1], [], False)
    assert roster.is_needed(0)
    roster.serves(1)
    assert (roster.serving, roster.has_loaded) == ([1], False)
    roster.serves(0)
    assert (roster.serving, roster.has_loaded) == ([0, 1], True)


def test_a_core_that_joins_is_needed_only_once_it_serves() -> None:
    roster = CoreRoster(2, 1)
    roster.serves(0)
    roster.joins(1)
    assert (roster[1], roster.is_needed(1), roster.serving) == ("joining", False, [0])
    roster.loads(1)
    assert roster[1] == "joining"
    roster.serves(1)
    assert (roster.is_needed(1), roster.serving) == (True, [0, 1])


def test_a_core_that_retires_takes_nothing_new_and_is_needed_until_it_is_gone() -> None:
    roster = CoreRoster(2, 2)
    for core in (0, 1):
        roster.serves(core)
    roster.retires(1)
    assert (roster.serving, roster.present, roster.is_needed(1)) == ([0], [0, 1], True)
    roster.leaves(1)
    assert (roster.present, roster.is_needed(1)) == ([0], False)


def test_a_client_that_is_not_told_of_the_end_takes_a_core_that_loads_again_for_one_that_joins() -> None:
    roster = CoreRoster(2, 2)
    for core in (0, 1):
        roster.serves(core)
    roster.retires(1)
    roster.loads(1)
    assert (roster[1], roster.is_needed(1)) == ("joining", False)

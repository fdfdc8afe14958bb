"""Phases of engine cores from one client's view."""

from trimtab_engine.engine_client.core_registry import CoreRegistry


def test_initial_cores_are_required_until_all_are_ready() -> None:
    roster = CoreRegistry(3, 2)
    assert (roster.present, roster.serving, roster.has_loaded) == ([0, 1], [], False)
    assert roster.is_needed(0)
    roster.serves(1)
    assert (roster.serving, roster.has_loaded) == ([1], False)
    roster.serves(0)
    assert (roster.serving, roster.has_loaded) == ([0, 1], True)


def test_a_core_that_joins_is_needed_only_once_it_serves() -> None:
    roster = CoreRegistry(2, 1)
    roster.serves(0)
    roster.joins(1)
    assert (roster[1], roster.is_needed(1), roster.serving) == ("joining", False, [0])
    roster.loads(1)
    assert roster[1] == "joining"
    roster.serves(1)
    assert (roster.is_needed(1), roster.serving) == (True, [0, 1])


def test_retiring_core_is_required_until_absent() -> None:
    roster = CoreRegistry(2, 2)
    for core in (0, 1):
        roster.serves(core)
    roster.retires(1)
    assert (roster.serving, roster.present, roster.is_needed(1)) == ([0], [0, 1], True)
    roster.leaves(1)
    assert (roster.present, roster.is_needed(1)) == ([0], False)


def test_reloading_core_without_end_counts_as_joining() -> None:
    roster = CoreRegistry(2, 2)
    for core in (0, 1):
        roster.serves(core)
    roster.retires(1)
    roster.loads(1)
    assert (roster[1], roster.is_needed(1)) == ("joining", False)

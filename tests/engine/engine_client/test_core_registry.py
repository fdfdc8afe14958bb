"""Phases of engine cores from one client's view."""

from trimtab_engine.engine_client.core_registry import CoreRegistry


def test_initial_cores_are_required_until_all_are_ready() -> None:
    core_registry = CoreRegistry(3, 2)
    assert (core_registry.present, core_registry.serving, core_registry.has_loaded) == ([0, 1], [], False)
    assert core_registry.is_needed(0)
    core_registry.mark_serving(1)
    assert (core_registry.serving, core_registry.has_loaded) == ([1], False)
    core_registry.mark_serving(0)
    assert (core_registry.serving, core_registry.has_loaded) == ([0, 1], True)


def test_a_core_that_joins_is_needed_only_once_it_serves() -> None:
    core_registry = CoreRegistry(2, 1)
    core_registry.mark_serving(0)
    core_registry.mark_joining(1)
    assert (core_registry[1], core_registry.is_needed(1), core_registry.serving) == ("joining", False, [0])
    core_registry.mark_loading(1)
    assert core_registry[1] == "joining"
    core_registry.mark_serving(1)
    assert (core_registry.is_needed(1), core_registry.serving) == (True, [0, 1])


def test_retiring_core_is_required_until_absent() -> None:
    core_registry = CoreRegistry(2, 2)
    for core in (0, 1):
        core_registry.mark_serving(core)
    core_registry.mark_retiring(1)
    assert (core_registry.serving, core_registry.present, core_registry.is_needed(1)) == ([0], [0, 1], True)
    core_registry.mark_absent(1)
    assert (core_registry.present, core_registry.is_needed(1)) == ([0], False)


def test_reloading_core_without_end_counts_as_joining() -> None:
    core_registry = CoreRegistry(2, 2)
    for core in (0, 1):
        core_registry.mark_serving(core)
    core_registry.mark_retiring(1)
    core_registry.mark_loading(1)
    assert (core_registry[1], core_registry.is_needed(1)) == ("joining", False)

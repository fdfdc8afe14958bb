"""Events of one plan are merged into as few as possible."""

from __future__ import annotations

from dataclasses import replace

from trimtab_operator.observed.actions import MAX_EVENT_MESSAGE, Event, merge_events


def created(name: str) -> Event:
    return Event("Normal", "ReplicaCreated", f"{name} was created")


def test_events_of_one_reason_are_merged() -> None:
    lost = Event("Warning", "NodeLost", "m-g1-0 was given up", "u1")
    found = merge_events([created("m-g0"), lost, created("m-g1"), replace(lost, key="u2")])
    assert [(note.reason, note.message, note.key) for note in found] == [
        ("ReplicaCreated", "m-g0 was created; m-g1 was created", ""),
        ("NodeLost", "m-g1-0 was given up; m-g1-0 was given up", "u1,u2"),
    ]


def test_merged_events_are_not_truncated() -> None:
    told = [created(f"m-g{number}") for number in range(200)]
    found = merge_events(told)
    assert 1 < len(found) < 10
    assert all(len(note.message) <= MAX_EVENT_MESSAGE for note in found)
    assert "; ".join(note.message for note in found) == "; ".join(note.message for note in told)


def test_duplicate_events_are_merged() -> None:
    assert merge_events([created("m-g0"), created("m-g0")]) == (created("m-g0"),)

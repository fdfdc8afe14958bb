"""What a turn tells is as few Events as hold the words."""

from __future__ import annotations

from dataclasses import replace

from trimtab_operator.observed.actions import MAX_EVENT_MESSAGE, Note, joined


def created(name: str) -> Note:
    return Note("Normal", "ReplicaCreated", f"{name} was created")


def test_what_is_told_of_several_replicas_for_one_reason_is_one_event() -> None:
    lost = Note("Warning", "NodeLost", "m-g1-0 was given up", "u1")
    found = joined([created("m-g0"), lost, created("m-g1"), replace(lost, key="u2")])
    assert [(note.reason, note.message, note.key) for note in found] == [
        ("ReplicaCreated", "m-g0 was created; m-g1 was created", ""),
        ("NodeLost", "m-g1-0 was given up; m-g1-0 was given up", "u1,u2"),
    ]


def test_no_word_is_cut_off_for_it() -> None:
    told = [created(f"m-g{number}") for number in range(200)]
    found = joined(told)
    assert 1 < len(found) < 10
    assert all(len(note.message) <= MAX_EVENT_MESSAGE for note in found)
    assert "; ".join(note.message for note in found) == "; ".join(note.message for note in told)


def test_the_same_word_twice_is_told_once() -> None:
    assert joined([created("m-g0"), created("m-g0")]) == (created("m-g0"),)

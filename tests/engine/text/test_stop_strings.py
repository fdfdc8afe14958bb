"""The sent text ends at the first stop string, for any split into pieces."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trimtab_engine.text.stop_strings import StopStrings

LETTERS = st.text("ab", min_size=1, max_size=4)


def sent(pieces: list[str], stop: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    watcher = StopStrings(stop, include=include)
    out = [watcher.push(piece) for piece in pieces]
    return [*out, watcher.flush()], watcher.matched


def cut(text: str, stop: list[str], *, include: bool) -> str:
    """Return the text up to the stop string that completes first; among those that complete together, the first to
    start.
    """
    for end in range(1, len(text) + 1):
        begins = [text[:end].find(s) for s in stop if s in text[:end]]
        if begins:
            at = min(begins)
            longest = max(len(s) for s in stop if text[:end].find(s) == at)
            return text[: at + longest] if include else text[:at]
    return text


@given(st.lists(st.sampled_from("ab"), max_size=20), st.lists(LETTERS, min_size=1, max_size=3), st.booleans())
def test_text_is_cut_at_first_stop_string_for_any_split(pieces: list[str], stop: list[str], include: bool) -> None:
    out, matched = sent(pieces, stop, include=include)
    assert "".join(out) == cut("".join(pieces), stop, include=include)
    assert (matched is not None) == any(s in "".join(pieces) for s in stop)


@given(st.lists(st.text("ab", max_size=3), max_size=10), st.lists(LETTERS, min_size=1, max_size=3))
def test_no_part_of_a_stop_string_is_sent(pieces: list[str], stop: list[str]) -> None:
    out, _ = sent(pieces, stop)
    assert not any(s in "".join(out) for s in stop)
    assert "".join(pieces).startswith("".join(out))


@given(st.lists(st.text("abc", max_size=3), max_size=10), st.lists(LETTERS, max_size=3))
def test_only_possible_stop_string_starts_are_held_back(pieces: list[str], stop: list[str]) -> None:
    watcher, text, out = StopStrings(stop, include=False), "", ""
    for piece in pieces:
        text, out = text + piece, out + watcher.push(piece)
        if watcher.matched is not None:
            return
        held = text.removeprefix(out)
        assert held == "" or any(s.startswith(held) for s in stop)


def test_unarmed_detector_ignores_stop_strings() -> None:
    watcher = StopStrings(["b"], include=False)
    watcher.armed = False
    assert watcher.push("abc") == "abc"
    watcher.armed = True
    assert watcher.push("abc") == "a"
    assert watcher.matched == "b"


@given(st.lists(st.text("ab", max_size=6), max_size=12), st.lists(st.text("ab", min_size=1, max_size=7), min_size=1))
def test_matches_equal_a_plain_search_of_held_text(pieces: list[str], stop: list[str]) -> None:
    """Pieces of several characters: the earliest match in held text and piece, among equal ones the longest."""
    watcher, held = StopStrings(stop, include=False), ""
    for piece in pieces:
        text, out = held + piece, watcher.push(piece)
        found = [(text.find(s), -len(s), s) for s in stop if s in text]
        if found:
            assert (watcher.matched, out) == (min(found)[2], text[: min(found)[0]])
            return
        keep = max(n for s in stop for n in range(len(s)) if text.endswith(s[:n]))
        assert out == text[: len(text) - keep]
        held = text[len(text) - keep :]


@pytest.mark.parametrize(
    "stop",
    [
        ["a" * 1023 + "!", *("b" + letter * 1023 for letter in "cdefghijklmnopq")],
        ["a" * n + "!" for n in range(900, 916)],
    ],
    ids=["long", "alike"],
)
def test_work_per_token_is_bounded_for_any_stop_strings(stop: list[str]) -> None:
    """Long stop strings that nearly match cost at most 20 times as much as short ones that never match."""

    def seconds(watcher: StopStrings) -> float:
        began = time.process_time()
        for _ in range(2000):
            watcher.push("a")
        return time.process_time() - began

    plain = min(seconds(StopStrings([f"{letter}x" for letter in "bcdefghijklmnopq"], include=False)) for _ in range(5))
    assert min(seconds(StopStrings(stop, include=False)) for _ in range(5)) < 20 * plain

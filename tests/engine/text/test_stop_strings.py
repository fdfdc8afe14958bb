"""Whatever the pieces, what is sent is the text up to the first stop string."""

from hypothesis import given
from hypothesis import strategies as st
from trimtab_engine.text.stop_strings import StopStrings

LETTERS = st.text("ab", min_size=1, max_size=4)


def sent(pieces: list[str], stop: list[str], *, include: bool = False) -> tuple[list[str], str | None]:
    watcher = StopStrings(stop, include=include)
    out = [watcher.push(piece) for piece in pieces]
    return [*out, watcher.flush()], watcher.matched


def cut(text: str, stop: list[str], *, include: bool) -> str:
    """The text up to the stop string that is complete first; of those complete together, the first to begin."""
    for end in range(1, len(text) + 1):
        begins = [text[:end].find(s) for s in stop if s in text[:end]]
        if begins:
            at = min(begins)
            longest = max(len(s) for s in stop if text[:end].find(s) == at)
            return text[: at + longest] if include else text[:at]
    return text


@given(st.lists(st.sampled_from("ab"), max_size=20), st.lists(LETTERS, min_size=1, max_size=3), st.booleans())
def test_character_by_character_the_text_is_cut_at_the_first_stop_string(
    pieces: list[str], stop: list[str], include: bool
) -> None:
    out, matched = sent(pieces, stop, include=include)
    assert "".join(out) == cut("".join(pieces), stop, include=include)
    assert (matched is not None) == any(s in "".join(pieces) for s in stop)


@given(st.lists(st.text("ab", max_size=3), max_size=10), st.lists(LETTERS, min_size=1, max_size=3))
def test_nothing_of_a_stop_string_is_ever_sent(pieces: list[str], stop: list[str]) -> None:
    out, _ = sent(pieces, stop)
    assert not any(s in "".join(out) for s in stop)
    assert "".join(pieces).startswith("".join(out))


@given(st.lists(st.text("abc", max_size=3), max_size=10), st.lists(LETTERS, max_size=3))
def test_only_what_could_become_a_stop_string_is_held_back(pieces: list[str], stop: list[str]) -> None:
    watcher, text, out = StopStrings(stop, include=False), "", ""
    for piece in pieces:
        text, out = text + piece, out + watcher.push(piece)
        if watcher.matched is not None:
            return
        held = text.removeprefix(out)
        assert held == "" or any(s.startswith(held) for s in stop)


def test_an_unarmed_watcher_lets_stop_strings_pass() -> None:
    watcher = StopStrings(["b"], include=False)
    watcher.armed = False
    assert watcher.push("abc") == "abc"
    watcher.armed = True
    assert watcher.push("abc") == "a"
    assert watcher.matched == "b"

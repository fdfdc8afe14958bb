"""A request's position in its grammar, with the byte-level tokenizer: token IDs are bytes, 256 ends a sequence."""

from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from trimtab_engine.structured import matcher as under_test
from trimtab_engine.structured.matcher import GrammarMatcher
from trimtab_engine.structured.vocabulary import read_vocabulary

END = 256


@pytest.fixture(scope="module")
def tokenizer(tokenizer_folder: Path) -> LLTokenizer:
    return read_vocabulary(str(tokenizer_folder), 258, (END,)).build()


def make_matcher(tokenizer: LLTokenizer, regex: str) -> GrammarMatcher:
    return GrammarMatcher.of(tokenizer, LLMatcher.grammar_from_regex(regex))


def masks(matcher: GrammarMatcher, drafts: str = "") -> list[set[int]]:
    """Return the tokens that each mask allows."""
    rows = np.zeros((1 + len(drafts), matcher.num_words), dtype=np.int32)
    matcher.fill_with_drafts(drafts.encode(), rows.ctypes.data, matcher.num_words * 4)
    return [set(np.nonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[0].tolist()) for row in rows]


def test_mask_allows_next_tokens_of_the_grammar(tokenizer: LLTokenizer) -> None:
    matcher = make_matcher(tokenizer, "a[xy]")
    assert masks(matcher) == [{ord("a")}]
    matcher.accept(b"a")
    assert masks(matcher) == [{ord("x"), ord("y")}]


def test_end_of_sequence_is_allowed_at_possible_ends(tokenizer: LLTokenizer) -> None:
    matcher = make_matcher(tokenizer, "ab?")
    matcher.accept(b"a")
    assert masks(matcher) == [{ord("b"), END}]
    assert not matcher.is_complete
    matcher.accept([END])
    assert matcher.is_complete
    assert matcher.error is None


def test_finished_grammar_is_complete_and_only_allows_the_end(tokenizer: LLTokenizer) -> None:
    matcher = make_matcher(tokenizer, "ab")
    matcher.accept(b"ab")
    assert matcher.is_complete
    assert matcher.error is None
    assert masks(matcher) == [{END}]


def test_disallowed_token_is_an_error(tokenizer: LLTokenizer) -> None:
    matcher = make_matcher(tokenizer, "ab")
    matcher.accept(b"x")
    assert "doesn't satisfy the grammar" in (matcher.error or "")


def test_invalid_grammar_is_an_error(tokenizer: LLTokenizer) -> None:
    assert make_matcher(tokenizer, "(a").error == "unclosed group, at character 1"


def test_drafts_get_masks_without_changing_the_matcher(tokenizer: LLTokenizer) -> None:
    matcher = make_matcher(tokenizer, "a[xy]?z")
    assert masks(matcher, "ax") == [{ord("a")}, {ord("x"), ord("y"), ord("z")}, {ord("z")}]
    assert masks(matcher) == [{ord("a")}]
    assert matcher.num_acceptable(b"axz") == 3
    assert matcher.num_acceptable(b"aaz") == 1


def test_disallowed_draft_token_does_not_fail(tokenizer: LLTokenizer) -> None:
    matcher = make_matcher(tokenizer, "abc")
    assert masks(matcher, "axc") == [{ord("a")}, {ord("b")}, {ord("b")}, {ord("b")}]
    assert matcher.error is None
    assert masks(matcher, "abcc")[3:] == [{END}, {END}]
    matcher.accept(b"abc")
    assert matcher.is_complete


def test_copy_is_independent(tokenizer: LLTokenizer) -> None:
    matcher = make_matcher(tokenizer, "a[xy]")
    other = matcher.copy()
    other.accept(b"ax")
    assert masks(matcher) == [{ord("a")}]


def test_slow_mask_is_an_error(tokenizer: LLTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(under_test, "MAX_MASK_SECONDS", 0.0)
    matcher = make_matcher(tokenizer, "ab")
    masks(matcher)
    assert "one mask took" in (matcher.error or "")


def test_tokenizer_larger_than_logits_works(tokenizer_folder: Path) -> None:
    tokenizer = read_vocabulary(str(tokenizer_folder), 97, (96,)).build()
    assert tokenizer.vocab_size == 258


def test_tokens_beyond_tokenizer_are_never_allowed(tokenizer_folder: Path) -> None:
    tokenizer = read_vocabulary(str(tokenizer_folder), 320, (END,)).build()
    assert max(masks(make_matcher(tokenizer, "(?s:.)*"))[0]) <= END

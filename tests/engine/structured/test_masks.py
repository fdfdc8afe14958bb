"""Token masks of a step, as rows for the sampler."""

from pathlib import Path

from llguidance import LLMatcher
from trimtab_engine.structured.masks import MaskedRows, MaskMaker
from trimtab_engine.structured.matcher import GrammarMatcher
from trimtab_engine.structured.vocabulary import read_vocabulary


def test_sequence_gets_rows_for_newest_token_and_each_draft(tokenizer_folder: Path) -> None:
    tokenizer = read_vocabulary(str(tokenizer_folder), 258, (256,)).build()
    first, second = (GrammarMatcher.of(tokenizer, LLMatcher.grammar_from_regex(regex)) for regex in ("ab", "[cd]"))
    future = MaskMaker().begin([MaskedRows(0, first, b"a"), MaskedRows(5, second)])
    assert future is not None
    masks = future.result()
    assert masks.rows == [0, 1, 5]
    assert masks.bitmask.shape == (3, 9)
    a_to_d = [[bool(row[3] >> bit & 1) for bit in range(1, 5)] for row in masks.bitmask.tolist()]  # 97 = 3 * 32 + 1
    assert a_to_d == [[True, False, False, False], [False, True, False, False], [False, False, True, True]]


def test_no_grammar_computes_nothing() -> None:
    assert MaskMaker().begin([]) is None

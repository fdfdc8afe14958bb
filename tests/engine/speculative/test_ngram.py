"""Prompt lookup: the longest end of the text that occurs earlier, its earliest place, what followed there."""

import engine_builders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.scheduling.request import Request
from trimtab_engine.speculative.ngram import NgramProposer, propose_ngram


def propose(text: list[int], *, min_n: int = 1, max_n: int = 3, k: int = 3) -> list[int]:
    return propose_ngram(np.array(text, dtype=np.int64), min_n=min_n, max_n=max_n, num_tokens=k)


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        ([1, 2, 3, 4, 9, 1, 2], [3, 4, 9]),  # "1 2" occurred before
        ([7, 2, 5, 1, 2, 6, 1, 2], [6, 1, 2]),  # the longer match wins over the earlier, shorter one
        ([1, 2, 5, 1, 2, 6, 1, 2], [5, 1, 2]),  # of two equally long matches the earliest
        ([1, 2, 3], []),  # nothing occurs twice
        ([4, 4], [4]),  # an occurrence may overlap the end; only what there is is proposed
        ([3, 8, 3], [8, 3]),
        ([5], []),
        ([], []),
    ],
)
def test_ngram_proposes_continuation_of_longest_match(text: list[int], drafts: list[int]) -> None:
    assert propose(text) == drafts


def test_a_match_shorter_than_the_minimum_proposes_nothing() -> None:
    assert propose([9, 2, 3, 1, 2], min_n=2) == []
    assert propose([9, 2, 3, 1, 2], min_n=1) == [3, 1, 2]


def test_a_match_is_cut_at_the_maximum_so_an_earlier_shorter_one_counts() -> None:
    text = [1, 2, 5, 0, 1, 2, 6, 0, 1, 2]
    assert propose(text, max_n=2) == [5, 0, 1]
    assert propose(text, max_n=3) == [6, 0, 1], "0 1 2 is longer, and only later"


def by_definition(text: list[int], min_n: int, max_n: int, k: int) -> list[int]:
    for n in range(min(max_n, len(text) - 1), min_n - 1, -1):
        for start in range(len(text) - n):
            if text[start : start + n] == text[-n:]:
                return text[start + n : start + n + k]
    return []


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 4), st.integers(0, 4), st.integers(0, 5))
def test_ngram_equals_its_definition(text: list[int], min_n: int, more: int, k: int) -> None:
    expected = by_definition(text, min_n, min_n + more, k)
    assert propose(text, min_n=min_n, max_n=min_n + more, k=k) == expected


def a_request(tokens: list[int], *, max_num_tokens: int = 100) -> Request:
    request = engine_builders.a_request(tokens)
    request.max_num_tokens = max_num_tokens
    return request


CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=1, prompt_lookup_max=3)


def test_a_requests_text_grows_from_step_to_step() -> None:
    proposer = NgramProposer(CONFIG)
    request = a_request([1, 2, 3, 1])
    for token, drafts in ((2, [3, 1, 2]), (3, [1, 2, 3]), (7, []), (1, [2, 3, 1, 2])):
        request.token_ids.append(token)
        proposer.prepare([request], depth=4)
        assert request.draft_token_ids == drafts


def test_a_request_of_the_same_id_starts_afresh() -> None:
    proposer = NgramProposer(CONFIG)
    first, second = a_request([1, 2, 3, 1]), a_request([1, 5, 6, 1])
    proposer.prepare([first], depth=4)
    proposer.prepare([second], depth=4)
    assert second.draft_token_ids == [5, 6, 1]


def test_depth_and_the_requests_end_limit_the_drafts() -> None:
    proposer = NgramProposer(CONFIG)
    request = a_request([1, 2, 3, 4, 5, 1], max_num_tokens=9)
    proposer.prepare([request], depth=4)
    assert request.draft_token_ids == [2, 3], "with all of them accepted the step yields 3 tokens, to 9 in all"
    proposer.prepare([request], depth=1)
    assert request.draft_token_ids == [2]
    proposer.prepare([request], depth=0)
    assert request.draft_token_ids == []

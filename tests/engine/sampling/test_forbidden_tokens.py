"""Forbidden tokens of a request, with its newest token known and unknown."""

from typing import Any

import pytest
from trimtab_engine.sampling.forbidden_tokens import Ban, bans_of
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling


def bans(output: tuple[int, ...], *, is_unknown: bool = False, **params: Any) -> list[Ban]:
    request = Request.of("r", [1, 2], Sampling(**params), arrival_time=0.0)
    request.token_ids += output
    return list(bans_of(request, eos_token_ids=(9,), vocab_size=50, has_unknown_token=is_unknown))


@pytest.mark.parametrize(
    ("params", "output", "is_unknown", "expected"),
    [
        ({"min_tokens": 2}, (3,), False, [(9, None)]),
        ({"min_tokens": 2}, (3,), True, []),  # the unknown token is the second
        ({"min_tokens": 2}, (3, 4), False, []),
        ({"min_tokens": 2, "stop_token_ids": (5, 50)}, (), True, [(5, None), (9, None)]),  # there is no token 50
        ({"min_tokens": 2, "stop_token_ids": (5,), "ignore_eos": True}, (), False, [(5, None)]),
    ],
)
def test_below_min_tokens_nothing_may_end_a_request(
    params: dict[str, Any], output: tuple[int, ...], is_unknown: bool, expected: list[Ban]
) -> None:
    assert bans(output, is_unknown=is_unknown, **params) == expected


@pytest.mark.parametrize(
    ("word", "output", "expected"),
    [
        ((7,), (), [(7, None)]),
        ((3, 7), (5, 3), [(7, None)]),
        ((3, 7), (3, 5), []),
        ((2, 7), (), []),  # 2 is of the prompt
        ((4, 3, 7), (4, 3), [(7, None)]),
        ((4, 3, 7), (3,), []),
        ((4, 50), (4,), []),  # there are 50 tokens
    ],
)
def test_a_word_is_not_completed(word: tuple[int, ...], output: tuple[int, ...], expected: list[Ban]) -> None:
    assert bans(output, bad_words=(word,)) == expected


@pytest.mark.parametrize(
    ("word", "output", "expected"),
    [
        ((7,), (), [(7, None)]),
        ((3, 7), (), [(7, 3)]),
        ((4, 3, 7), (4,), [(7, 3)]),
        ((4, 3, 7), (3,), []),
        ((4, 3, 7), (), []),  # it would need two tokens of output
    ],
)
def test_bad_word_ban_depends_on_unknown_token(
    word: tuple[int, ...], output: tuple[int, ...], expected: list[Ban]
) -> None:
    assert bans(output, is_unknown=True, bad_words=(word,)) == expected

"""Single requests, as engines tell of them."""

from typing import Any

import pytest
from trimtab_operator.tuner.samples import Finished, Unfinished
from trimtab_operator.tuner.samples.requests import request_news
from trimtab_operator.tuner.samples.series import Unreadable

COLUMNS = {
    "finished": [
        *("age_seconds", "e2e_seconds", "prompt_tokens", "cached_tokens", "output_tokens"),
        *("ttft_seconds", "decode_seconds", "preemptions", "reason"),
    ],
    "unfinished": ["age_seconds", "prompt_tokens", "cached_tokens", "output_tokens"],
}


def a_body(**changes: Any) -> dict[str, Any]:
    body = {
        "columns": COLUMNS,
        "next": 8,
        "missed": 1,
        "finished": [[30.0, 5.0, 100, 16, 11, 0.5, 2.0, 1, "stop"]],
        "unfinished": [[4.0, 200, 0, 7]],
    }
    return {**body, **changes}


def test_ages_become_times_of_our_clock() -> None:
    news, after = request_news(a_body(), at=1000.0)
    assert after == 8
    assert news.missed == 1
    assert news.finished == (Finished(970.0, 975.0, 100, 11, 0.5, 2.0, 16, 1, "stop"),)
    assert news.finished[0].mean_gap == pytest.approx(0.2)
    assert news.unfinished == (Unfinished(996.0, 200, 7),)


def test_a_newer_engine_may_say_more() -> None:
    columns = {**COLUMNS, "unfinished": ["mood", *COLUMNS["unfinished"]]}
    news, _ = request_news(a_body(columns=columns, unfinished=[["fine", 4.0, 200, 0, 7]]), at=1000.0)
    assert news.unfinished == (Unfinished(996.0, 200, 7),)


def test_a_request_without_a_token_has_no_gaps() -> None:
    news, _ = request_news(a_body(finished=[[30.0, 5.0, 100, 0, 0, None, None, 0, "abort"]]), at=1000.0)
    assert news.finished[0].mean_gap is None


@pytest.mark.parametrize(
    "change",
    [
        {"columns": None},
        {"next": -1},
        {"next": True},
        {"missed": 1.5},
        {"finished": "all"},
        {"finished": [[30.0]]},
        {"finished": [["nan", 5.0, 100, 16, 11, 0.5, 2.0, 1, "stop"]]},
        {"finished": [[float("nan"), 5.0, 100, 16, 11, 0.5, 2.0, 1, "stop"]]},
        {"finished": [[30.0, 5.0, -100, 16, 11, 0.5, 2.0, 1, "stop"]]},
        {"unfinished": [[4.0, 2**40, 0, 7]]},
    ],
)
def test_what_the_contract_does_not_know_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(Unreadable, match="the list of requests cannot be read"):
        request_news(a_body(**change), at=1000.0)

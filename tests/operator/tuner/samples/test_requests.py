"""Parser of the engine's request list."""

from typing import Any

import pytest
from trimtab_operator.tuner.samples import Finished, Unfinished
from trimtab_operator.tuner.samples.requests import parse_request_updates
from trimtab_operator.tuner.samples.series import Unreadable

COLUMNS = {
    "finished": [
        *("age_seconds", "e2e_seconds", "prompt_tokens", "cached_tokens", "output_tokens"),
        *("ttft_seconds", "decode_seconds", "preemptions", "reason"),
    ],
    "unfinished": ["age_seconds", "prompt_tokens", "cached_tokens", "output_tokens"],
}


def make_body(**changes: Any) -> dict[str, Any]:
    body = {
        "columns": COLUMNS,
        "next": 8,
        "missed": 1,
        "finished": [[30.0, 5.0, 100, 16, 11, 0.5, 2.0, 1, "stop"]],
        "unfinished": [[4.0, 200, 0, 7]],
    }
    return {**body, **changes}


def test_ages_become_operator_clock_times() -> None:
    updates, after = parse_request_updates(make_body(), at=1000.0)
    assert after == 8
    assert updates.missed == 1
    assert updates.finished == (Finished(970.0, 975.0, 100, 11, 0.5, 2.0, 16, 1, "stop"),)
    assert updates.finished[0].mean_gap == pytest.approx(0.2)
    assert updates.unfinished == (Unfinished(996.0, 200, 7),)


def test_unknown_columns_are_ignored() -> None:
    columns = {**COLUMNS, "unfinished": ["mood", *COLUMNS["unfinished"]]}
    updates, _ = parse_request_updates(make_body(columns=columns, unfinished=[["fine", 4.0, 200, 0, 7]]), at=1000.0)
    assert updates.unfinished == (Unfinished(996.0, 200, 7),)


def test_a_request_without_a_token_has_no_gaps() -> None:
    updates, _ = parse_request_updates(make_body(finished=[[30.0, 5.0, 100, 0, 0, None, None, 0, "abort"]]), at=1000.0)
    assert updates.finished[0].mean_gap is None


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
def test_invalid_request_lists_are_rejected(change: dict[str, Any]) -> None:
    with pytest.raises(Unreadable, match="the request list is invalid"):
        parse_request_updates(make_body(**change), at=1000.0)

"""Lengths and times of single sequences in GET /admin/v1/requests."""

from typing import Any

from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.api.metrics.request_log import FINISHED_COLUMNS, RequestLog


def make_finished_sequence(**fields: Any) -> FinishedSequence:
    times = {"arrival": 10.0, "scheduled": 11.0, "first_token": 13.0, "last_token": 17.0, "end": 17.5}
    counts = {"num_prompt_tokens": 5, "num_generation_tokens": 3, "max_tokens": 8, "num_preemptions": 1}
    return FinishedSequence(**{"reason": "stop", **times, **counts, "num_cached_tokens": 2, **fields})


def test_row_has_lengths_and_ages() -> None:
    log = RequestLog()
    log.add(make_finished_sequence())
    (row,) = log.since(0, now=20.0)["finished"]
    assert dict(zip(FINISHED_COLUMNS, row, strict=True)) == {
        "age_seconds": 10.0,
        "e2e_seconds": 7.5,
        "prompt_tokens": 5,
        "cached_tokens": 2,
        "output_tokens": 3,
        "ttft_seconds": 3.0,
        "decode_seconds": 4.0,
        "preemptions": 1,
        "reason": "stop",
    }


def test_sequence_without_tokens_has_no_token_times() -> None:
    log = RequestLog()
    log.add(make_finished_sequence(first_token=None, last_token=None, reason="abort"))
    row = dict(zip(FINISHED_COLUMNS, log.since(0, now=20.0)["finished"][0], strict=True))
    assert (row["ttft_seconds"], row["decode_seconds"], row["reason"]) == (None, None, "abort")


def test_only_new_sequences_are_returned() -> None:
    log = RequestLog()
    for prompt in (1, 2, 3):
        log.add(make_finished_sequence(num_prompt_tokens=prompt))
    answer = log.since(2, now=20.0)
    assert [row[2] for row in answer["finished"]] == [3]
    assert (answer["next"], answer["missed"]) == (3, 0)
    assert log.since(3, now=20.0)["finished"] == []


def test_rare_poll_reports_missed_sequences() -> None:
    log = RequestLog(keep=2)
    for prompt in range(1, 6):
        log.add(make_finished_sequence(num_prompt_tokens=prompt))
    answer = log.since(1, now=20.0)
    assert [row[2] for row in answer["finished"]] == [4, 5]
    assert answer["missed"] == 2


def test_number_from_before_restart_returns_everything() -> None:
    log = RequestLog()
    log.add(make_finished_sequence())
    assert len(log.since(700, now=20.0)["finished"]) == 1

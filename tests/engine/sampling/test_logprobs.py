"""Log-probability reports of a row are independent of other rows."""

import torch
from trimtab_engine.sampling.logprobs import report_logprobs, report_rows, reports_of, score_rows
from trimtab_engine.scheduling.sampling import TokenLogprobs

RAW = torch.tensor([[-3.0, -1.0, -2.0, -4.0], [-0.5, -5.0, -6.0, -0.25]])


def test_a_report_names_the_chosen_token_and_the_likeliest_ones() -> None:
    first, second, third = report_rows(RAW[[0, 1, 1]], torch.tensor([0, 3, 2]), [2, 0, None])
    assert first == TokenLogprobs([0, 1, 2], [-3.0, -1.0, -2.0], rank=3)
    assert second == TokenLogprobs([3], [-0.25], rank=1)
    assert third is None


def test_device_logprobs_are_read_later() -> None:
    judged = score_rows(RAW, torch.tensor([2, 1]), 1)
    assert judged.shape == (2, 4)
    assert judged.dtype == torch.int32
    assert reports_of(judged, [2, 1], [1, None]) == [TokenLogprobs([2, 1], [-2.0, -1.0], rank=2), None]


def test_rows_of_one_request_are_all_reported() -> None:
    assert report_logprobs(RAW, torch.tensor([1, 0]), 0) == [
        TokenLogprobs([1], [-1.0], rank=1),
        TokenLogprobs([0], [-0.5], rank=2),
    ]

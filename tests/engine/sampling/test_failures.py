"""Rows without a valid token are detected, and other rows get their tokens."""

import math
from typing import Any

import pytest
import torch
from engine_builders import a_request
from trimtab_engine.sampling.device_sampler import DeviceSampler
from trimtab_engine.sampling.failures import Failure, failures_of
from trimtab_engine.sampling.sampler import sample
from trimtab_engine.sampling.token_table import DeviceRow
from trimtab_engine.scheduling.sampling import token_mask

VOCABULARY = 50


def test_the_largest_logit_of_a_row_tells_whether_it_has_failed() -> None:
    best = torch.tensor([1.0, math.nan, -math.inf, -3.4e38, math.inf])
    assert failures_of(best) == {1: Failure.NAN, 2: Failure.NOTHING_LEFT}


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 3},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 1.0, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "repetition_penalty": 1.3},
    ],
)
@pytest.mark.parametrize("num_bad", [1, VOCABULARY])
def test_a_row_that_is_no_number_fails_alone(params: dict[str, Any], num_bad: int) -> None:
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(1))
    expected = logits.argmax(dim=-1).tolist()
    logits[[3, 20], VOCABULARY - num_bad :] = math.nan
    result = sample(logits, [a_request(**params)] * 40)
    assert result.failed == {3: Failure.NAN, 20: Failure.NAN}
    if params["temperature"] == 0:
        assert [t for row, t in enumerate(result.token_ids) if row not in (3, 20)] == [
            t for row, t in enumerate(expected) if row not in (3, 20)
        ]


def test_rows_of_a_greedy_batch_are_told_by_the_logit_of_their_token() -> None:
    """The token of a row with NaN is the NaN's index, that of a row of -inf is arbitrary."""
    logits = torch.zeros(3, VOCABULARY)
    logits[1, VOCABULARY - 1] = math.nan
    logits[2] = -math.inf
    result = sample(logits, [a_request(temperature=0.0)] * 3)
    assert result.failed == {1: Failure.NAN, 2: Failure.NOTHING_LEFT}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_whose_every_token_is_forbidden_fails_alone(temperature: float) -> None:
    stuck = a_request(allowed_tokens=token_mask((2,)), min_tokens=3, temperature=temperature)
    result = sample(torch.zeros(2, VOCABULARY), [stuck, a_request(temperature=temperature)], eos_token_ids=(2,))
    assert result.failed == {0: Failure.NOTHING_LEFT}


def test_the_device_s_sampler_tells_the_same() -> None:
    sampler = DeviceSampler(VOCABULARY, (2,), max_num_seqs=64, device=torch.device("cpu"))
    stuck = a_request(allowed_tokens=token_mask((2,)), min_tokens=3, temperature=0.0, logprobs=0)
    rows = [DeviceRow(request) for request in (a_request(temperature=0.0), stuck, a_request(temperature=0.0))]
    logits = torch.zeros(3, VOCABULARY)
    logits[2] = math.nan
    chosen = sampler.sample(logits, rows, torch.zeros(64, dtype=torch.int64))
    assert failures_of(chosen.best) == {1: Failure.NOTHING_LEFT, 2: Failure.NAN}

"""Sampling on a device, and the requests left to the host."""

import weakref
from functools import partial
from typing import Any

import engine_builders
import numpy as np
import pytest
import torch
from trimtab_engine.sampling.choice_columns import PlainRows
from trimtab_engine.sampling.device_sampler import DeviceSampler
from trimtab_engine.sampling.token_table import DeviceRow
from trimtab_engine.scheduling.sampling import token_mask

VOCABULARY = 40


def a_sampler() -> DeviceSampler:
    return DeviceSampler(VOCABULARY, (2,), max_num_seqs=64, device=torch.device("cpu"))


a_request = partial(engine_builders.a_request, temperature=0.0)


def test_reports_are_of_the_logits_before_they_were_edited() -> None:
    logits = torch.randn(40, VOCABULARY, generator=torch.Generator().manual_seed(0))
    before = logits.log_softmax(dim=-1)
    best = logits.argmax(dim=-1).tolist()
    requests = [a_request(logit_bias={best[row]: -100.0}, logprobs=1) for row in range(40)]
    last_tokens = torch.zeros(64, dtype=torch.int64)
    chosen = a_sampler().sample(logits, [DeviceRow(request) for request in requests], last_tokens)
    tokens = chosen.token_ids
    found: list[Any] = [None] * 40
    for part in chosen.reports:
        part.put_into(found, tokens.tolist())
    for row, report in enumerate(found):
        assert tokens[row] != best[row]
        assert report.token_ids == [int(tokens[row]), best[row]]
        assert report.logprobs == [float(before[row, tokens[row]]), float(before[row, best[row]])]
        assert report.rank == 2


def test_a_word_that_the_token_in_flight_would_begin_is_not_completed() -> None:
    sampler, request = a_sampler(), a_request(bad_words=((5, 6),))
    logits = torch.zeros(1, VOCABULARY)
    logits[0, 6], logits[0, 7] = 3.0, 2.0
    last_tokens = torch.tensor([9, 5])
    tokens = [
        int(sampler.sample(logits.clone(), [DeviceRow(request, source)], last_tokens).token_ids)
        for source in (None, 0, 1)
    ]
    assert tokens == [6, 6, 7]


def test_sampling_inputs_are_built_once_per_request() -> None:
    sampler = DeviceSampler(VOCABULARY, (2,), max_num_seqs=2, device=torch.device("cpu"))
    requests = [a_request(temperature=0.7, seed=number) for number in range(20)]
    first = sampler._parameters_of(requests[:2])
    assert sampler._parameters_of([requests[1], requests[0]]) == [first[1], first[0]]
    assert sampler._parameters_of(requests[:1])[0] is first[0]


@pytest.mark.parametrize("sampling", [{"seed": 3}, {"presence_penalty": 1.0}, {"logit_bias": {5: 1.0}, "min_p": 0.1}])
def test_ended_requests_are_not_kept(sampling: dict[str, Any]) -> None:
    """Only the requests of the last step are referenced, and rows of the token table are used again."""
    sampler, references = a_sampler(), []
    last_tokens = torch.zeros(64, dtype=torch.int64)
    for _ in range(300):
        request = a_request(temperature=0.7, **sampling)
        sampler.sample(torch.zeros(1, VOCABULARY), [DeviceRow(request)], last_tokens)
        sampler._columns_of([request])  # as on CUDA
        references.append(weakref.ref(request))
    assert [reference() for reference in references[:-1]] == [None] * 299


def test_columns_of_choices_stay_on_the_device_while_the_requests_are_the_same() -> None:
    sampler, requests = a_sampler(), [a_request(temperature=0.7, seed=number) for number in range(3)]
    columns = sampler._columns_of(requests)
    assert sampler._columns_of(list(requests)) is columns
    assert sampler._columns_of(requests[:2]) is not columns


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_plain_rows_in_columns_are_chosen_as_any(temperature: float) -> None:
    requests = [a_request(temperature=temperature, seed=number, output=[7] * number) for number in range(3)]
    logits, last_tokens = torch.randn(3, VOCABULARY), torch.zeros(64, dtype=torch.int64)
    expected = a_sampler().sample(logits.clone(), [DeviceRow(request) for request in requests], last_tokens)
    rows = PlainRows(requests, np.array([request.num_tokens for request in requests]))
    chosen = a_sampler().sample(logits.clone(), rows, last_tokens)
    assert chosen.token_ids.tolist() == expected.token_ids.tolist()
    assert torch.equal(chosen.best, expected.best)


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 0.1},
        {"frequency_penalty": 0.1},
        {"repetition_penalty": 1.1},
        {"logprobs": 0},
        {"prompt_logprobs": 0},
        {"grammar": "x"},
        {"min_tokens": 1},
        {"bad_words": ((1,),)},
        {"logit_bias": {1: 1.0}},
        {"allowed_tokens": token_mask((1,))},
    ],
)
def test_a_request_is_plain_when_nothing_but_its_logits_decides(asked: dict[str, Any]) -> None:
    assert a_request(temperature=0.9, top_p=0.5, top_k=3, min_p=0.1, seed=4).is_plain
    assert not a_request(**asked).is_plain
    assert a_request(temperature=0.0).is_greedy
    assert not a_request(temperature=0.1).is_greedy
    assert not a_request(**asked).is_greedy

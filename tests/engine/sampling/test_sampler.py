"""The sampler: the effect of each parameter, and independence of requests in a batch."""

import math
import time
from typing import Any

import pytest
import torch
from engine_builders import a_request
from hypothesis import given
from hypothesis import strategies as st
from trimtab_engine.sampling.sampler import TokenMasks, _draw_by_kernel, sample
from trimtab_engine.scheduling.sampling import token_mask, tokens_of

VOCABULARY = 50


def logits_with(*best: int, rows: int = 1) -> torch.Tensor:
    """Logits 10, 9, 8, … for these tokens and random values below 1 for the rest."""
    logits = torch.rand(rows, VOCABULARY, generator=torch.Generator().manual_seed(0))
    for place, token in enumerate(best):
        logits[:, token] = 10.0 - place
    return logits


def draws(count: int, logits: torch.Tensor, **params: Any) -> list[int]:
    """One token for each of `count` seeds."""
    requests = [a_request(seed=seed, **params) for seed in range(count)]
    return sample(logits.repeat(count, 1), requests).token_ids


def test_temperature_zero_takes_the_best() -> None:
    result = sample(logits_with(7), [a_request(temperature=0.0)])
    assert result.token_ids == [7]
    assert result.logprobs == [None]


def test_random_choice_follows_the_distribution() -> None:
    logits = torch.full((1, VOCABULARY), -math.inf)
    logits[0, 3], logits[0, 4] = math.log(0.8), math.log(0.2)
    share = draws(2000, logits).count(3) / 2000
    assert share == pytest.approx(0.8, abs=0.04)


def test_unseeded_requests_differ_between_calls() -> None:
    logits = torch.zeros(1, VOCABULARY)
    torch.manual_seed(0)
    assert len({sample(logits.clone(), [a_request()]).token_ids[0] for _ in range(20)}) > 1


def test_top_k_top_p_and_min_p_limit_the_choice() -> None:
    logits = logits_with(7, 8, 9)
    assert set(draws(100, logits, top_k=2, temperature=5.0)) == {7, 8}
    assert set(draws(100, logits, top_p=0.5)) == {7}
    assert set(draws(200, logits, min_p=0.2)) == {7, 8}


def test_a_seed_gives_the_same_token_alone_and_in_any_batch() -> None:
    logits = torch.randn(1, VOCABULARY)
    alone = sample(logits.clone(), [a_request(seed=5)]).token_ids[0]
    others = [a_request(), a_request(temperature=0.0), a_request(seed=6, top_p=0.5)] * 11
    batch = sample(logits.repeat(34, 1), [*others, a_request(seed=5)])
    assert batch.token_ids[-1] == alone


def test_a_seed_gives_new_draws_at_each_position() -> None:
    logits = torch.zeros(1, VOCABULARY)
    tokens = [sample(logits.clone(), [a_request(output=(1,) * n, seed=5)]).token_ids[0] for n in range(20)]
    assert len(set(tokens)) > 5


def test_seeds_that_differ_only_in_their_high_bits_differ() -> None:
    logits = torch.zeros(1, VOCABULARY)
    tokens = [sample(logits.clone(), [a_request(seed=5 + (n << 32))]).token_ids[0] for n in range(20)]
    assert len(set(tokens)) > 5


def test_the_largest_seeds_are_accepted() -> None:
    for seed in (2**63 - 1, -(2**63), 2**64 - 1):
        sample(torch.zeros(1, VOCABULARY), [a_request(output=(1,) * 4000, seed=seed)])


def test_penalties_push_repeated_tokens_down() -> None:
    greedy: dict[str, Any] = {"temperature": 0.0}
    assert sample(logits_with(7, 8), [a_request(output=(7,), presence_penalty=1.5, **greedy)]).token_ids == [8]
    assert sample(logits_with(7, 8), [a_request(output=(7,), frequency_penalty=0.6, **greedy)]).token_ids == [7]
    assert sample(logits_with(7, 8), [a_request(output=(7, 7), frequency_penalty=0.6, **greedy)]).token_ids == [8]
    assert sample(logits_with(7, 8), [a_request(prompt=(7,), repetition_penalty=1.5, **greedy)]).token_ids == [8]


def test_presence_and_frequency_look_at_the_output_only() -> None:
    request = a_request(prompt=(7,), presence_penalty=2.0, frequency_penalty=2.0, temperature=0.0)
    assert sample(logits_with(7, 8), [request]).token_ids == [7]


def test_no_end_before_min_tokens() -> None:
    below = a_request(output=(1,), min_tokens=2, temperature=0.0, stop_token_ids=(8, 10**9))
    assert sample(logits_with(7, 8, 9), [below], eos_token_ids=(7,)).token_ids == [9]
    reached = a_request(output=(1, 1), min_tokens=2, temperature=0.0, stop_token_ids=(8,))
    assert sample(logits_with(7, 8, 9), [reached], eos_token_ids=(7,)).token_ids == [7]


def test_logprobs_are_those_of_the_unmodified_distribution() -> None:
    logits = logits_with(7, 8, 9)
    expected = logits.log_softmax(-1)[0]
    request = a_request(output=(7,), presence_penalty=1.5, temperature=0.0, logprobs=2)
    report = sample(logits.clone(), [request]).logprobs[0]
    assert report is not None
    assert report.token_ids == [8, 7, 8]
    assert report.logprobs == pytest.approx([expected[8].item(), expected[7].item(), expected[8].item()])
    assert report.rank == 2


def test_logprobs_zero_reports_the_chosen_token_alone() -> None:
    result = sample(
        logits_with(7, rows=3),
        [a_request(temperature=0.0, logprobs=0), a_request(temperature=0.0), a_request(temperature=0.0, logprobs=3)],
    )
    reports = result.logprobs
    assert reports[0] is not None
    assert reports[0].token_ids == [7]
    assert reports[1] is None
    assert reports[2] is not None
    assert len(reports[2].token_ids) == 4


def test_greedy_and_random_rows_mix() -> None:
    requests = [a_request(temperature=0.0), a_request(seed=1, top_k=1), a_request(temperature=0.0)]
    assert sample(logits_with(7, rows=3), requests).token_ids == [7, 7, 7]


def test_only_what_a_mask_allows_is_chosen_and_reported() -> None:
    logits = logits_with(7, 8, rows=2)
    masks = TokenMasks(torch.tensor([[1 << 8 | 1 << 9, 0]], dtype=torch.int32), [1])
    result = sample(logits, [a_request(temperature=0.0), a_request(temperature=0.0, logprobs=2)], masks=masks)
    assert result.token_ids == [7, 8]
    assert result.logprobs[1] is not None
    assert result.logprobs[1].token_ids == [8, 8, 9]
    assert result.logprobs[1].rank == 1


def test_logit_bias_moves_the_choice() -> None:
    assert sample(logits_with(7, 8), [a_request(temperature=0.0, logit_bias={8: 5.0})]).token_ids == [8]
    assert sample(logits_with(7, 8), [a_request(temperature=0.0, logit_bias={7: -100.0})]).token_ids == [8]


def test_allowed_token_ids_are_the_only_ones_chosen() -> None:
    assert set(draws(100, logits_with(7, 8), allowed_tokens=token_mask((3, 4)))) == {3, 4}
    assert sample(logits_with(7, 8), [a_request(temperature=0.0, allowed_tokens=token_mask((8, 9)))]).token_ids == [8]


def test_a_bad_word_is_never_completed() -> None:
    bad: dict[str, Any] = {"temperature": 0.0, "bad_words": ((5, 7), (8,))}
    assert sample(logits_with(7, 8, 9), [a_request(output=(4,), **bad)]).token_ids == [7]
    assert sample(logits_with(7, 8, 9), [a_request(output=(5,), **bad)]).token_ids == [9]
    assert sample(logits_with(8, 9), [a_request(output=(), **bad)]).token_ids == [9]
    assert sample(logits_with(7, 8), [a_request(prompt=(5,), **bad)]).token_ids == [7]  # the prompt does not count


def test_the_devices_draw_obeys_the_same_limits_and_seeds() -> None:
    """The Triton kernel, here in its interpreter."""
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    requests = [a_request(top_k=1), a_request(seed=5, temperature=2.0), a_request(top_p=0.01)]
    drawn = _draw_by_kernel(logits, requests)
    assert drawn[0] == logits[0].argmax()
    assert drawn[2] == logits[2].argmax()
    assert _draw_by_kernel(logits[1:2], requests[1:2])[0] == drawn[1], "a seeded draw depends on nothing else"


@given(st.sets(st.integers(0, 300)))
def test_token_mask_holds_a_set_of_tokens(token_ids: set[int]) -> None:
    assert tokens_of(token_mask(token_ids)) == sorted(token_ids)


def test_many_allowed_tokens_cost_no_more_than_few() -> None:
    """A step of 16 rows with 49,000 allowed tokens each, and with ten."""
    logits = torch.randn(16, 50_000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # waiting for other threads would count as time

    def seconds(token_ids: range) -> float:
        rows = [a_request(temperature=0.0, allowed_tokens=token_mask(token_ids)) for _ in range(16)]
        times = []
        for _ in range(9):
            copy, began = logits.clone(), time.thread_time()
            sample(copy, rows)
            times.append(time.thread_time() - began)
        return min(times)

    many, few = seconds(range(49_000)), seconds(range(49_000, 49_010))
    torch.set_num_threads(threads)
    assert many < 3 * few

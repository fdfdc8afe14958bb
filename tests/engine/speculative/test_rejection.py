"""Verification: output follows the target's distribution exactly, for any drafts."""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from trimtab_engine.sampling.rows import DraftedRequest
from trimtab_engine.sampling.sampler import draw, sample, target_probabilities
from trimtab_engine.scheduling.batch import ScheduledSequence
from trimtab_engine.scheduling.request import Request
from trimtab_engine.scheduling.sampling import Sampling
from trimtab_engine.speculative.proposer import Proposals
from trimtab_engine.speculative.rejection import Verified, drafted_rows, reject, verify

VOCABULARY = 12
CHI_SQUARE_LIMIT = 0.001
"""Least p-value: a right sampler fails one run in a thousand seeds; the seed is fixed."""


def a_sequence(drafts: list[int], *, output: tuple[int, ...] = (), **params: Any) -> ScheduledSequence:
    request = Request.of("r", [1, 2, 3], Sampling(**params), arrival_time=0.0)
    request.token_ids += output
    start = request.num_tokens - 1
    return ScheduledSequence(request, start, 1 + len(drafts), samples=True, draft_token_ids=drafts)


def some_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(seed))


def certain(logits: torch.Tensor, sequences: list[ScheduledSequence]) -> list[Verified]:
    return verify(logits, sequences, Proposals())


def p_value(counts: Counter[Any], expected: dict[Any, float]) -> float:
    """P-value of Pearson's chi-square test; outcomes expected fewer than 5 times are merged."""
    total = sum(counts.values())
    assert set(counts) <= {outcome for outcome, p in expected.items() if p > 0}, "an impossible outcome"
    rare = [outcome for outcome, p in expected.items() if p * total < 5]
    cells = [(counts[o], p * total) for o, p in expected.items() if o not in rare]
    if (rest := sum(expected[o] for o in rare) * total) > 0:
        cells.append((sum(counts[o] for o in rare), rest))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in cells)
    freedom = torch.tensor((len(cells) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, torch.tensor(statistic / 2, dtype=torch.float64)))


# --- certain drafts -----------------------------------------------------------------------------------------------


def test_greedy_drafts_stand_while_they_are_the_best_token() -> None:
    logits = some_logits(4)
    best = logits.argmax(dim=-1).tolist()
    wrong = (best[1] + 1) % VOCABULARY
    params: dict[str, Any] = {"temperature": 0.0}
    assert certain(logits.clone(), [a_sequence(best[:3], **params)])[0].token_ids == best
    assert certain(logits.clone(), [a_sequence([best[0], wrong, best[2]], **params)])[0].token_ids == best[:2]


def test_sequences_with_and_without_drafts_mix() -> None:
    logits = some_logits(6)
    best = logits.argmax(dim=-1).tolist()
    sequences = [
        a_sequence([], temperature=0.0),
        a_sequence([best[1], best[2]], temperature=0.0),
        a_sequence([(best[4] + 1) % VOCABULARY], temperature=0.0),
    ]
    assert [v.token_ids for v in certain(logits, sequences)] == [best[:1], best[1:4], best[4:5]]


def test_penalties_count_the_drafts_before_each_position() -> None:
    """The same token is always best; a frequency penalty accepts it until it is too frequent."""
    logits = torch.zeros(4, VOCABULARY)
    logits[:, 7], logits[:, 8] = 10.0, 8.5
    sequence = a_sequence([7, 7, 7], temperature=0.0, frequency_penalty=1.0)
    assert certain(logits, [sequence])[0].token_ids == [7, 7, 8]


def test_min_tokens_counts_the_drafts_before_each_position() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, 9] = 5.0  # the end of sequence
    logits[:, 4] = 3.0
    sequence = a_sequence([4, 4], temperature=0.0, min_tokens=2)
    assert verify(logits, [sequence], Proposals(), eos_token_ids=(9,))[0].token_ids == [4, 4, 9]


def test_each_accepted_token_has_its_own_logprobs() -> None:
    logits = some_logits(3)
    best = logits.argmax(dim=-1).tolist()
    expected = logits.log_softmax(dim=-1)
    [verified] = certain(logits.clone(), [a_sequence(best[:2], temperature=0.0, logprobs=2)])
    assert verified.logprobs is not None
    assert [entry.token_ids[0] for entry in verified.logprobs] == best
    for position, entry in enumerate(verified.logprobs):
        assert entry.logprobs[0] == pytest.approx(float(expected[position].max()))
        assert len(entry.token_ids) == 3


def test_a_seed_gives_the_tokens_that_it_gives_without_drafts() -> None:
    logits = some_logits(5)
    for seed in range(30):
        alone: list[int] = []
        for position in range(5):
            row = DraftedRequest(a_sequence([]).request, alone)
            request = Request.of("r", row.token_ids, Sampling(seed=seed), arrival_time=0.0)
            request.num_prompt_tokens = 3
            alone += sample(logits[position : position + 1].clone(), [request]).token_ids
        for drafts in (alone[:4], [*alone[:2], (alone[2] + 1) % VOCABULARY, 0]):
            tokens = certain(logits.clone(), [a_sequence(drafts, seed=seed)])[0].token_ids
            assert tokens == alone[: len(tokens)]
            assert len(tokens) == (5 if drafts == alone[:4] else 3)


@pytest.mark.parametrize("draft", range(VOCABULARY))
def test_a_certain_draft_is_accepted_as_often_as_the_target_draws_it(draft: int) -> None:
    torch.manual_seed(draft)
    logits = some_logits(2)
    expected = logits[0].softmax(dim=-1)
    counts: Counter[int] = Counter()
    for _ in range(20):
        sequences = [a_sequence([draft]) for _ in range(100)]
        verified = certain(logits.repeat(100, 1), sequences)
        counts.update(v.token_ids[0] for v in verified)
        assert all((len(v.token_ids) == 2) == (v.token_ids[0] == draft) for v in verified)
    assert p_value(counts, dict(enumerate(expected.tolist()))) > CHI_SQUARE_LIMIT


# --- drawn drafts -------------------------------------------------------------------------------------------------

FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "top-p": {"top_p": 0.8},
    "top-k and min-p": {"top_k": 5, "min_p": 0.05, "temperature": 1.3},
    "penalties": {"frequency_penalty": 1.2, "presence_penalty": 0.7, "repetition_penalty": 1.4},
}


def joint_distribution(logits: torch.Tensor, **params: Any) -> dict[tuple[int, ...], float]:
    """Return the joint distribution of two consecutive tokens, by enumeration. Row n is for the n-th new token."""
    first = target_probabilities(logits[:1].clone(), [a_sequence([], **params).request])[0]
    joint: dict[tuple[int, ...], float] = {}
    for token, p in enumerate(first.tolist()):
        row = DraftedRequest(a_sequence([], **params).request, [token])
        second = target_probabilities(logits[1:2].clone(), [row])[0]
        joint |= {(token, other): p * q for other, q in enumerate(second.tolist())}
    return joint


@pytest.mark.parametrize("params", FILTERS.values(), ids=FILTERS.keys())
@pytest.mark.parametrize("closeness", [0.0, 0.7, 1.0])
def test_drawn_drafts_leave_the_targets_joint_distribution(params: dict[str, Any], closeness: float) -> None:
    """Two drafts from a proposer that is unrelated to the target, near it, or equal to it."""
    torch.manual_seed(5)
    logits = some_logits(3)
    draft_logits = closeness * logits + (1 - closeness) * some_logits(3, seed=1)
    counts: Counter[tuple[int, ...]] = Counter()
    num_accepted = num_first = 0
    for _ in range(60):
        sequences, proposals = [], Proposals()
        for _ in range(50):
            sequence = a_sequence([], **params)
            for position in range(2):
                row = DraftedRequest(sequence.request, list(sequence.draft_token_ids))
                q = target_probabilities(draft_logits[position : position + 1].clone(), [row])
                sequence.draft_token_ids += draw(q).tolist()
                proposals.probabilities.setdefault(sequence.request, []).append(q[0].float())
            sequences.append(sequence)
        for sequence, verified in zip(sequences, verify(logits.repeat(50, 1), sequences, proposals), strict=True):
            tokens = verified.token_ids
            num_accepted += len(tokens) - 1
            num_first += 1
            if len(tokens) == 1:  # the second token follows in the next step, which has no drafts
                row = DraftedRequest(sequence.request, tokens)
                tokens = tokens + sample(logits[1:2].clone(), [row]).token_ids
            counts[tuple(tokens[:2])] += 1
    assert p_value(counts, joint_distribution(logits, **params)) > CHI_SQUARE_LIMIT
    if closeness == 1.0:
        assert num_accepted >= 2 * num_first * 0.999, "a draft from the target's own distribution always stands"
    else:
        assert num_accepted < 2 * num_first


def test_acceptance_is_the_overlap_of_both_distributions() -> None:
    torch.manual_seed(0)
    target, draft = some_logits(1).double().softmax(dim=-1), some_logits(1, seed=1).double().softmax(dim=-1)
    drafts = [[token] for token in draw(draft.repeat(4000, 1)).tolist()]
    tokens = reject(target.repeat(8000, 1), drafts, draft.repeat(4000, 1))
    overlap = float(torch.minimum(target, draft).sum())
    share = sum(len(own) == 2 for own in tokens) / 4000
    assert share == pytest.approx(overlap, abs=4 * math.sqrt(overlap * (1 - overlap) / 4000))


def test_a_draft_that_the_target_cannot_draw_never_stands() -> None:
    target = torch.zeros(2, VOCABULARY, dtype=torch.float64)
    target[:, 3] = 1.0
    draft = torch.full((1, VOCABULARY), 1 / VOCABULARY, dtype=torch.float64)
    for token in range(VOCABULARY):
        assert reject(target, [[token]], draft) == ([[3, 3]] if token == 3 else [[3]])


def test_logprobs_of_drawn_drafts_are_those_of_the_unmodified_logits() -> None:
    logits = some_logits(2)
    expected = logits.log_softmax(dim=-1)
    sequence = a_sequence([4], logprobs=1, temperature=0.5)
    q = torch.zeros(VOCABULARY)
    q[4] = 1.0
    [verified] = verify(logits.clone(), [sequence], Proposals({sequence.request: [q]}))
    assert verified.logprobs is not None
    assert len(verified.logprobs) == len(verified.token_ids)
    for position, (token, entry) in enumerate(zip(verified.token_ids, verified.logprobs, strict=True)):
        assert entry.token_ids[0] == token
        assert entry.logprobs[0] == pytest.approx(float(expected[position, token]))


def test_a_sequence_has_a_row_for_each_number_of_drafts() -> None:
    sequence = a_sequence([5, 6])
    assert [row.num_output_tokens for row in drafted_rows(sequence)] == [0, 1, 2]
    assert [row.token_ids for row in drafted_rows(sequence)] == [[1, 2, 3], [1, 2, 3, 5], [1, 2, 3, 5, 6]]


@pytest.mark.parametrize("is_drawn", [False, True])
def test_drafts_that_reach_a_row_without_a_token_end_before_it(is_drawn: bool) -> None:
    """As after the end of a grammar with a banned end token: the tokens before it are final."""
    logits = torch.full((3, VOCABULARY), float("-inf"))
    logits[0, 1] = logits[1, 2] = 0.0
    sequence = a_sequence([1, 2])
    own = torch.nn.functional.one_hot(torch.tensor([1, 2]), VOCABULARY).float()
    proposals = Proposals({sequence.request: [own[0], own[1]]}) if is_drawn else Proposals()
    (verified,) = verify(logits, [sequence], proposals)
    assert (verified.token_ids, verified.failure) == ([1, 2], None)
    (next_step,) = verify(logits[2:].clone(), [a_sequence([])], Proposals())
    assert next_step.failure is not None

"""The draft model: its drafts, and that it follows the target under any scheduling."""

from pathlib import Path
from typing import Any

import engine_builders
import pytest
import torch
from engine_benchmarks.parity import greedy_generator, load_runner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.scheduling.batch import Batch, ScheduledSequence
from trimtab_engine.scheduling.request import Request, RequestStatus
from trimtab_engine.speculative.draft_model import DraftModel

VOCABULARY, MAX_MODEL_LEN = 97, 256  # the model's
BLOCK_SIZE = 8
DEPTH = 3


@pytest.fixture
def runner(model: Path) -> ModelRunner:
    return load_runner(str(model), block_size=BLOCK_SIZE, num_blocks=64)


def a_request(number: int = 0, *, prompt: int = 13, room: int = 200, **sampling: Any) -> Request:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, VOCABULARY, (prompt,), generator=generator).tolist()
    request = engine_builders.a_request(tokens, request_id=f"r{number}", **{"temperature": 0.0, **sampling})
    request.max_num_tokens = prompt + room
    request.block_tables[0] = list(range(number * 8, number * 8 + 8))
    return request


def step(draft: DraftModel, requests: list[Request], depth: int = DEPTH) -> list[list[int]]:
    """One step of the engine as the draft model sees it; returns each request's drafts."""
    draft.prepare(requests, depth)
    sequences = []
    for request in requests:
        start = request.num_computed_tokens
        count = request.num_tokens - start + len(request.draft_token_ids)
        sequences.append(ScheduledSequence(request, start, count, True, draft_token_ids=request.draft_token_ids))
        request.num_computed_tokens = request.num_tokens
    if depth:
        draft.propose(Batch(1, sequences, sum(s.num_tokens for s in sequences), []))
    return [list(sequence.draft_token_ids) for sequence in sequences]


def accept(request: Request, tokens: list[int]) -> None:
    request.token_ids += tokens
    request.num_computed_tokens = request.num_tokens - 1


def greedy(runner: ModelRunner, tokens: list[int], count: int = DEPTH) -> list[int]:
    return greedy_generator(runner, block_size=BLOCK_SIZE)([tokens], count)[0]


def a_draft(model: Path, *, max_tokens_per_step: int = 512) -> DraftModel:
    own = load_runner(str(model), block_size=BLOCK_SIZE, num_blocks=64)
    return DraftModel(own, max_tokens_per_step=max_tokens_per_step, eos_token_ids=())


def test_a_prompt_is_read_without_drafting(model: Path) -> None:
    assert step(a_draft(model), [a_request()]) == [[]]


def test_drafts_equal_the_draft_model_tokens(model: Path, runner: ModelRunner) -> None:
    draft, requests = a_draft(model), [a_request(0), a_request(1, prompt=5), a_request(2, prompt=30)]
    step(draft, requests)
    for request in requests:
        accept(request, [7])
    assert step(draft, requests) == [greedy(runner, request.token_ids) for request in requests]


@pytest.mark.parametrize("num_accepted", range(DEPTH + 1))
def test_drafting_continues_after_any_acceptance(model: Path, runner: ModelRunner, num_accepted: int) -> None:
    draft, request = a_draft(model), a_request()
    step(draft, [request])
    accept(request, [7])
    for other in (11, 12, 13, 14):
        [drafts] = step(draft, [request])
        assert drafts == greedy(runner, request.token_ids)
        accept(request, [*drafts[:num_accepted], other])


def test_prompts_in_chunks_and_requests_that_come_later_are_read(model: Path, runner: ModelRunner) -> None:
    draft, first, second = a_draft(model), a_request(0, prompt=20), a_request(1, prompt=9)
    for start in (0, 8):
        draft.propose(Batch(1, [ScheduledSequence(first, start, 8, False)], 8, []))
    first.num_computed_tokens = 16
    step(draft, [first, second])
    accept(first, [3])
    accept(second, [4])
    assert step(draft, [first, second]) == [greedy(runner, r.token_ids) for r in (first, second)]


def test_a_preempted_request_is_read_again_from_its_start(model: Path, runner: ModelRunner) -> None:
    draft, request = a_draft(model), a_request()
    step(draft, [request])
    accept(request, [7, 8, 9])
    request.num_computed_tokens, request.block_tables[0] = 0, list(range(40, 48))
    step(draft, [request], depth=DEPTH)
    accept(request, [5])
    assert step(draft, [request]) == [greedy(runner, request.token_ids)]


def test_after_depth_0_it_catches_up_in_bounded_pieces_before_it_proposes(model: Path, runner: ModelRunner) -> None:
    draft, request = a_draft(model, max_tokens_per_step=11), a_request(prompt=25)
    for _ in range(3):
        assert step(draft, [request], depth=0) == [[]]
        accept(request, [7])
    seen = []
    for _ in range(4):
        seen.append(step(draft, [request])[0])
        expected = greedy(runner, request.token_ids)
        accept(request, [8])
    assert seen[:3] == [[], [], []], "27 tokens behind, 10 at a time beside the newest one"
    assert seen[3] == expected


def test_drafts_are_limited_by_depth_request_and_model_length(model: Path) -> None:
    short, near_its_end = a_request(0, room=3), a_request(1, prompt=MAX_MODEL_LEN - 4)
    near_its_end.block_tables[0] = list(range(16, 16 + 32))
    draft = a_draft(model)
    step(draft, [short, near_its_end])
    accept(short, [7])
    accept(near_its_end, [7])
    assert [len(drafts) for drafts in step(draft, [short, near_its_end], depth=5)] == [1, 3]


def test_random_drafts_come_with_their_distribution_and_seeded_ones_are_certain(model: Path) -> None:
    draft = a_draft(model)
    requests = [a_request(0, temperature=1.0), a_request(1, temperature=1.0, seed=3), a_request(2)]
    step(draft, requests)
    for request in requests:
        accept(request, [7])
    draft.prepare(requests, DEPTH)
    sequences = [ScheduledSequence(r, 13, 4, True, draft_token_ids=r.draft_token_ids) for r in requests]
    proposals = draft.propose(Batch(1, sequences, 12, []))
    assert list(proposals.probabilities) == requests[:1]
    rows = proposals.probabilities[requests[0]]
    assert [tuple(row.shape) for row in rows] == [(VOCABULARY,)] * DEPTH
    assert all(float(row.sum()) == pytest.approx(1.0) for row in rows)


def test_finished_requests_are_forgotten(model: Path) -> None:
    draft, request, other = a_draft(model), a_request(0), a_request(1)
    step(draft, [request])
    request.status = RequestStatus.FINISHED_STOPPED
    step(draft, [other])
    assert request not in draft._num_computed

"""argmax in the interpreter: the token and its logit equal torch's for any split of a row."""

from dataclasses import replace

import pytest
import torch
from trimtab_kernels import sample
from trimtab_kernels.argmax import (
    CTAS_PER_SM,
    MAX_SPLITS,
    TILE_TOKENS,
    argmax,
    argmax_reference,
    argmax_triton,
    splits_of_row,
)
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import H200

ONE_PROGRAM = replace(H200, num_sms=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [1, 1000, 3 * TILE_TOKENS + 7])
@pytest.mark.parametrize("facts", [H200, ONE_PROGRAM])
def test_argmax_matches_torch(vocab: int, dtype: torch.dtype, facts: object) -> None:
    logits = torch.randn(3, vocab + 8, generator=torch.Generator().manual_seed(vocab)).to(dtype)[:, :vocab]
    token_ids, best = argmax_triton(logits, facts=facts)  # type: ignore[arg-type]
    assert torch.equal(best, logits.float().amax(dim=1))
    firsts = [(row == row.amax()).nonzero()[0, 0] for row in logits]
    assert torch.equal(token_ids, torch.stack(firsts))
    assert not arrival_counters(logits.device, 4).any(), "the next launch counts from 0"


@pytest.mark.parametrize("place", [0, 5, TILE_TOKENS + 3, 2 * TILE_TOKENS])
def test_argmax_treats_nan_as_largest_at_any_place(place: int) -> None:
    logits = torch.zeros(2, 2 * TILE_TOKENS + 1)
    logits[0, 7] = float("inf")
    logits[0, place] = float("nan")
    token_ids, best = argmax_triton(logits)
    assert token_ids.tolist() == [place, 0]
    assert best.isnan().tolist() == [True, False]


def test_argmax_row_without_tokens_returns_cause_as_logit() -> None:
    token_ids, best = argmax_triton(torch.full((1, TILE_TOKENS + 1), float("-inf")))
    assert (token_ids.tolist(), best.tolist()) == ([0], [float("-inf")])


def test_argmax_first_of_equal_maxima_wins_over_splits_and_lanes() -> None:
    logits = torch.zeros(1, 3 * TILE_TOKENS)
    for token in (2 * TILE_TOKENS, TILE_TOKENS + 5, TILE_TOKENS - 1):
        logits[0, token] = 4.0
        assert int(argmax_triton(logits)[0]) == token


@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300, 4096])
@pytest.mark.parametrize("vocab", [1, 32000, 128256, 262144, 10**6])
@pytest.mark.parametrize("per_sm", [CTAS_PER_SM, sample.CTAS_PER_SM])
def test_splits_cover_row_and_fill_device(rows: int, vocab: int, per_sm: int) -> None:
    parts, size = splits_of_row(rows, vocab, H200, per_sm=per_sm)
    assert (parts - 1) * size < vocab <= parts * size
    assert size % TILE_TOKENS == 0
    assert parts <= MAX_SPLITS
    assert rows * parts <= max(rows, per_sm * H200.num_sms)


def test_argmax_on_cpu_uses_torch_and_rejects_wrong_shapes() -> None:
    logits = torch.randn(2, 9)
    for ours, theirs in zip(argmax(logits), argmax_reference(logits), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(ValueError, match="rows, vocab_size"):
        argmax(torch.zeros(9))
    with pytest.raises(ValueError, match="float64"):
        argmax(torch.zeros(2, 9, dtype=torch.float64))
    assert argmax_triton(torch.empty(0, 9))[0].shape == (0,)

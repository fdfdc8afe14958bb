"""edit_logits and ban_tokens in the interpreter against their references, whose penalties equal apply_penalties'."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from trimtab_kernels.apply_penalties import apply_penalties
from trimtab_kernels.edit_logits import (
    ban_tokens,
    ban_tokens_reference,
    ban_tokens_triton,
    edit_logits,
    edit_logits_reference,
    edit_logits_triton,
)

INF = float("inf")


def ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def a_table(vocab: int) -> torch.Tensor:
    """Return four rows (biases, counts, biases, counts) with forbidden tokens, seen tokens, and tokens that are
    both.
    """
    generator = torch.Generator().manual_seed(vocab)
    table = torch.zeros(4, vocab + 3, dtype=torch.int32)
    for row in (0, 2):
        bias = torch.randn(vocab, generator=generator).masked_fill_(torch.rand(vocab, generator=generator) < 0.3, -INF)
        table[row, :vocab] = bias.view(torch.int32)
    for row in (1, 3):
        table[row, :vocab] = torch.randint(0, 5, (vocab,), generator=generator, dtype=torch.int32)
    return table


@pytest.mark.parametrize("edit", [edit_logits, edit_logits_triton])
@pytest.mark.parametrize("vocab", [1, 7, 2049, 4097])
def test_edit_logits_matches_reference(edit: Callable[..., Any], vocab: int) -> None:
    logits = torch.randn(5, vocab + 3, generator=torch.Generator().manual_seed(1))[:, :vocab]
    expected = logits.clone()
    edits = (
        a_table(vocab),
        ints(4, 0, 2),
        ints(2, -1, 0),
        ints(-1, 3, 1),
        torch.tensor([0.5, 0.0, 1.5]),
        torch.tensor([0.25, -0.5, 1.0]),
        torch.tensor([1.0, 1.9, 0.7]),
    )
    edit(logits, *edits)
    edit_logits_reference(expected, *edits)
    # The device may fuse a multiplication with an addition: one rounding less.
    torch.testing.assert_close(logits, expected, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-6)


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"), [(0.0, 0.0, 1.0), (1.5, 0.0, 1.0), (0.0, -0.5, 1.0), (0.3, 0.7, 1.9)]
)
def test_edit_logits_reference_equals_apply_penalties_bitwise(
    presence: float, frequency: float, repetition: float
) -> None:
    logits = torch.randn(1, 101)
    expected = logits[0].clone()
    table = torch.zeros(1, 101, dtype=torch.int32)
    for token, count in ((3, 1), (50, 7), (100, 2)):
        table[0, token] = 2 * count
    table[0, [3, 7, 0]] += 1  # of the prompt
    edit_logits(
        logits, table, ints(0), ints(-1), ints(0), *(torch.tensor([v]) for v in (presence, frequency, repetition))
    )
    apply_penalties(
        expected,
        output_ids=torch.tensor([3, 50, 100]),
        output_counts=torch.tensor([1.0, 7.0, 2.0]),
        seen_ids=torch.tensor([3, 7, 50, 100, 0]),
        presence=presence,
        frequency=frequency,
        repetition=repetition,
    )
    assert torch.equal(logits[0], expected)


def test_forbidden_tokens_stay_forbidden_after_penalties() -> None:
    for edit in (edit_logits, edit_logits_triton):
        logits = torch.tensor([[1.0, 2.0]])
        table = torch.stack([torch.tensor([-INF, 0.0]).view(torch.int32), ints(5, 5)])
        half = torch.tensor([0.5])
        edit(logits, table, ints(0), ints(0), ints(1), half, half, half)
        assert logits[0, 0] == -INF
        assert logits[0, 1] == 2.0 / 0.5 - (2 * 0.5 + 0.5)


@pytest.mark.parametrize("ban", [ban_tokens, ban_tokens_triton, ban_tokens_reference])
def test_ban_applies_only_after_its_required_last_token(ban: Callable[..., Any]) -> None:
    logits = torch.zeros(3, 9)
    last_tokens = torch.tensor([4, 8])
    rows, tokens = ints(0, 0, 1, 2, 2), ints(5, 6, 5, 7, 7)
    ban(logits, rows, tokens, ints(-1, 0, 1, 0, 1), ints(0, 4, 4, 3, 8), last_tokens)
    banned = {(row, token) for row, token in (logits == -INF).nonzero().tolist()}
    assert banned == {(0, 5), (0, 6), (2, 7)}


def test_ban_tokens_with_more_bans_than_one_cta() -> None:
    logits = torch.zeros(2, 200)
    tokens = torch.arange(150, dtype=torch.int32)
    ban_tokens_triton(logits, torch.ones_like(tokens), tokens, -torch.ones_like(tokens), tokens, torch.zeros(1).long())
    assert logits[1].eq(-INF).nonzero().flatten().tolist() == list(range(150))
    assert not logits[0].any()


def test_edit_logits_rejects_mismatched_shapes() -> None:
    table, one = torch.zeros(1, 4, dtype=torch.int32), torch.ones(1)
    with pytest.raises(ValueError, match="vocab_size"):
        edit_logits(torch.ones(1, 5), table, ints(0), ints(0), ints(0), one, one, one)
    with pytest.raises(ValueError, match="alike"):
        edit_logits(torch.ones(1, 4), table, ints(0), ints(0, 1), ints(0), one, one, one)
    with pytest.raises(ValueError, match="alike"):
        ban_tokens(torch.ones(1, 4), ints(0), ints(0, 1), ints(0), ints(0), torch.zeros(1).long())

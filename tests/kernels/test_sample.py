"""sample, in the interpreter: the kept set is the sorted one, and draws follow the probabilities."""

import pytest
import torch
from trimtab_kernels.sample import sample_reference, sample_triton

ROWS = 3


def limits(
    rows: int = ROWS, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, vocab: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.full((rows,), temperature),
        torch.full((rows,), top_k or vocab, dtype=torch.int32),
        torch.full((rows,), top_p),
        torch.full((rows,), min_p),
    )


@pytest.mark.parametrize("vocab", [1, 1000])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.0, 0, 1.0, 0.0),
        (0.7, 1, 1.0, 0.0),
        (1.3, 5, 1.0, 0.0),
        (1.0, 0, 0.9, 0.0),
        (1.0, 0, 1.0, 0.2),
        (2.0, 40, 0.5, 0.01),
        (0.5, 3, 0.99, 0.5),
    ],
)
def test_the_kept_set_is_the_one_that_sorting_finds(
    vocab: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.randn(ROWS, vocab + 3, generator=torch.Generator().manual_seed(vocab))[:, :vocab] * 3
    chosen = limits(temperature=temperature, top_k=min(top_k, vocab), top_p=top_p, min_p=min_p, vocab=vocab)
    token_ids, thresholds = sample_triton(logits, *chosen, torch.arange(ROWS))
    kept = sample_reference(logits, *chosen)
    scaled = logits * (1 / temperature if temperature else 1.0)
    ours = scaled >= thresholds.unsqueeze(1)
    # At the edge the two sum probabilities in another order: one token may differ, by less than 1e-5 of the mass.
    differs = (ours != kept).any(dim=1)
    edge = scaled.softmax(dim=-1)[ours != kept]
    assert int(differs.sum()) <= 1, "only the edge of a set may differ"
    assert edge.numel() == 0 or float(edge.max()) < 0.05
    assert bool(ours.gather(1, token_ids.unsqueeze(1)).all()), "a token was drawn from outside the set"


def test_a_vocabulary_of_several_blocks() -> None:
    logits = torch.randn(1, 4097, generator=torch.Generator().manual_seed(1)) * 3
    logits[0, 4096] = 20.0
    chosen = limits(1, temperature=2.0, top_k=40, vocab=4097)
    _, thresholds = sample_triton(logits, *chosen, torch.tensor([3]))
    assert torch.equal(logits / 2 >= thresholds.unsqueeze(1), sample_reference(logits, *chosen))
    greedy, _ = sample_triton(logits, *limits(1, temperature=0.0, vocab=4097), torch.tensor([3]))
    assert greedy.tolist() == [4096]


def test_ties_at_the_edge_are_all_kept() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0, -1.0, float("-inf")]]).repeat(ROWS, 1)
    _, thresholds = sample_triton(logits, *limits(top_k=2, vocab=6), torch.arange(ROWS))
    assert thresholds.tolist() == [2.0] * ROWS


def test_masked_tokens_are_never_drawn() -> None:
    logits = torch.full((ROWS, 50), float("-inf"))
    logits[:, 17] = -3.0
    token_ids, _ = sample_triton(logits, *limits(top_p=0.9, vocab=50), torch.arange(ROWS))
    assert token_ids.tolist() == [17] * ROWS


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.5, 0.25, 0.15, 0.1])
    rows = 200
    token_ids, _ = sample_triton(probabilities.log().repeat(rows, 1), *limits(rows, vocab=4), torch.arange(rows) * 7919)
    counts = torch.bincount(token_ids, minlength=4)
    chi_squared = float(((counts - rows * probabilities) ** 2 / (rows * probabilities)).sum())
    assert chi_squared < 16.3, "3 degrees of freedom: exceeded by chance once in a thousand; the seeds are fixed"


def test_a_row_draws_alike_wherever_it_stands() -> None:
    logits = torch.randn(1, 300)
    alone, _ = sample_triton(logits, *limits(1, vocab=300), torch.tensor([42]))
    many, _ = sample_triton(logits.repeat(3, 1), *limits(3, vocab=300), torch.tensor([1, 42, 5]))
    assert int(many[1]) == int(alone[0])


def test_wrong_dtypes_are_refused() -> None:
    chosen = limits(vocab=10)
    with pytest.raises(ValueError, match="top_k int32"):
        sample_triton(torch.randn(ROWS, 10), chosen[0], chosen[1].long(), *chosen[2:], torch.arange(ROWS))

"""keep_likely_tokens against its definition."""

import pytest
import torch
from trimtab_kernels.keep_likely_tokens import keep_likely_tokens, keep_likely_tokens_reference

LIMITS = [
    (4097, 1.0, 0.0),
    (1, 1.0, 0.0),
    (7, 1.0, 0.0),
    (4097, 0.9, 0.0),
    (50, 0.5, 0.0),
    (4097, 1.0, 0.3),
    (20, 0.7, 0.1),
    (4097, 1e-6, 0.0),
]
"""(top_k, top_p, min_p); 4097 is the vocabulary."""


@pytest.mark.parametrize("rows", [[limit] for limit in LIMITS] + [LIMITS])
def test_keep_likely_tokens_matches_reference(rows: list[tuple[int, float, float]]) -> None:
    logits = torch.randn(len(rows), 4097) * 3
    expected = logits.clone()
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*rows, strict=True))
    keep_likely_tokens(logits, top_k=top_k, top_p=top_p, min_p=min_p)
    keep_likely_tokens_reference(expected, top_k=top_k, top_p=top_p, min_p=min_p)
    differing = (logits.isinf() != expected.isinf()).sum(dim=1)
    assert int(differing.max()) <= 1, "a cumulative sum may round to either side of p for one token"
    both = ~logits.isinf() & ~expected.isinf()
    assert torch.equal(logits[both], expected[both])


def test_most_likely_token_is_always_kept() -> None:
    logits = torch.randn(3, 100)
    best = logits.argmax(dim=-1)
    keep_likely_tokens(
        logits, top_k=torch.ones(3, dtype=torch.int64), top_p=torch.full((3,), 1e-9), min_p=torch.ones(3)
    )
    assert torch.equal(logits.argmax(dim=-1), best)
    assert int((~logits.isinf()).sum()) == 3


def test_keep_likely_tokens_rejects_wrong_lengths_and_zero_k() -> None:
    ones = torch.ones(2)
    with pytest.raises(ValueError, match="each limit must be"):
        keep_likely_tokens(torch.ones(2, 5), top_k=torch.tensor([1]), top_p=ones, min_p=ones)
    with pytest.raises(ValueError, match="k >= 1"):
        keep_likely_tokens(torch.ones(2, 5), top_k=torch.tensor([1, 0]), top_p=ones, min_p=ones)

"""apply_penalties against its definition."""

import pytest
import torch
from trimtab_kernels.apply_penalties import apply_penalties, apply_penalties_reference


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"), [(0, 0, 1), (1.5, 0, 1), (0, -0.5, 1), (0.3, 0.7, 1.9)]
)
def test_apply_penalties_matches_reference(presence: float, frequency: float, repetition: float) -> None:
    logits = torch.randn(101)
    expected = logits.clone()
    counts = {"output_ids": torch.tensor([3, 50, 100]), "output_counts": torch.tensor([1.0, 7.0, 2.0])}
    seen = torch.tensor([3, 7, 50, 100, 0])
    apply_penalties(logits, **counts, seen_ids=seen, presence=presence, frequency=frequency, repetition=repetition)
    apply_penalties_reference(
        expected, **counts, seen_ids=seen, presence=presence, frequency=frequency, repetition=repetition
    )
    torch.testing.assert_close(logits, expected)


def test_apply_penalties_rejects_mismatched_shapes() -> None:
    ids = torch.tensor([1])
    with pytest.raises(ValueError, match="must be"):
        apply_penalties(
            torch.ones(2, 4),
            output_ids=ids,
            output_counts=ids.float(),
            seen_ids=ids,
            presence=0,
            frequency=0,
            repetition=1,
        )

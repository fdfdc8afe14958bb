"""The linear layer: equal to torch's, for every number of rows, and the row sizes that keep compiled code few."""

import pytest
import torch
import trimtab_engine.layers.linear as linear_module
from trimtab_engine.layers.linear import MAX_ROWS, Linear, padded_rows, row_sizes


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("rows", [1, 2, 7, 33, 128, 129, 300])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_equals_torch(rows: int, has_bias: bool, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not packed:
        monkeypatch.setattr(linear_module, "can_pack", lambda dtype, device: False)
    weight, x = torch.randn(71, 48), torch.randn(rows, 48)
    bias = torch.randn(71) if has_bias else None
    with torch.inference_mode():
        torch.testing.assert_close(
            Linear(weight, bias)(x), torch.nn.functional.linear(x, weight, bias), atol=1e-5, rtol=1e-5
        )


def test_padding_is_little_and_sizes_are_few() -> None:
    assert len(row_sizes()) <= 19
    for rows in range(1, 1000):
        padded = padded_rows(rows)
        assert rows <= padded <= max(rows + 4, rows * 1.25 + 8)
        assert padded % MAX_ROWS in {0, *row_sizes()}
        assert padded_rows(padded) == padded

"""Fixed-address step inputs and inference mode."""

import torch
from trimtab_engine.device.inference import in_inference_mode
from trimtab_engine.device.transfer import Leading


def test_the_first_rows_are_a_view_that_is_kept_while_their_number_stays() -> None:
    whole = torch.arange(8)
    leading = Leading(whole)
    rows = leading.rows(3)
    assert rows.tolist() == [0, 1, 2]
    assert leading.rows(3) is rows
    whole[1] = 9
    assert rows.tolist() == [0, 9, 2]
    assert leading.rows(8).tolist() == [0, 9, 2, 3, 4, 5, 6, 7]
    assert leading.rows(0).tolist() == []


def test_inference_mode_is_entered_only_once() -> None:
    @in_inference_mode
    def told(value: torch.Tensor, *, factor: int) -> tuple[bool, torch.Tensor]:
        """Docstring of the function."""
        return torch.is_inference_mode_enabled(), value * factor

    value = torch.ones(2, requires_grad=True)
    is_in, product = told(value, factor=2)
    assert (is_in, product.requires_grad, torch.is_inference_mode_enabled()) == (True, False, False)
    with torch.inference_mode():
        assert told(value, factor=3)[0]
        assert torch.is_inference_mode_enabled()
    assert (told.__name__, told.__doc__) == ("told", "Docstring of the function.")

"""edit_logits over a vocabulary of 128256: penalties of every row, and with biases."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from trimtab_kernels.edit_logits import edit_logits_reference, edit_logits_triton

from kernel_benchmarks.row import Row


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    vocab, num_rows = (50, 3) if tiny else (128256, 256)
    logits = torch.randn(num_rows, vocab, device=device)
    counts = torch.randint(0, 3, (num_rows, vocab), device=device, dtype=torch.int32)
    biases = torch.randn(num_rows, vocab, device=device).view(torch.int32)
    table = torch.cat([counts, biases])
    numbers = torch.arange(num_rows, device=device, dtype=torch.int32)
    values = [torch.full((num_rows,), value, device=device) for value in (0.25, 0.5, 1.5)]
    for name, bias_rows, tensors in (
        ("penalties", torch.full_like(numbers, -1), 3),
        ("penalties and biases", numbers + num_rows, 4),
    ):
        edits = (table, numbers, bias_rows, numbers, *values)
        yield Row(
            f"edit_logits {num_rows}x{vocab}, {name}",
            "copy",
            (tensors + 2) * 4 * logits.numel(),  # each run edits a copy, and the copy is timed as well
            0.90,
            partial(_edited, edit_logits_triton, logits, edits),
            partial(_edited, edit_logits_reference, logits, edits),
            1e-5,
        )


def _edited(edit: Callable[..., None], logits: torch.Tensor, edits: tuple[torch.Tensor, ...]) -> torch.Tensor:
    copy = logits.clone()
    edit(copy, *edits)
    return copy

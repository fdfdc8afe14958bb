"""sample over a vocabulary of 128256: plain temperature, and top-k with top-p; beside it torch's sort."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from trimtab_kernels.sample import sample_reference, sample_triton

from benchmarks.row import Row


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    vocab = 50 if tiny else 128256
    for num_rows, top_k, top_p in ((2, 5, 0.9),) if tiny else ((256, vocab, 1.0), (256, 50, 0.9), (1, 50, 0.9)):
        logits = torch.randn(num_rows, vocab, device=device) * 3
        temperature = torch.full((num_rows,), 0.8, device=device)
        most = torch.full((num_rows,), top_k, dtype=torch.int32, device=device)
        mass = torch.full((num_rows,), top_p, device=device)
        least = torch.zeros(num_rows, device=device)
        seeds = torch.arange(num_rows, device=device)
        draw = partial(sample_triton, logits, temperature, most, mass, least, seeds)
        kept = partial(sample_reference, logits, temperature, most, mass, least)
        yield Row(
            f"sample {num_rows}x{vocab}, top_k {top_k}, top_p {top_p}",
            "copy",
            logits.numel() * 4,
            0.90 if top_p == 1.0 else 0.0,  # searches read the row again, from the cache: no bar is set
            partial(_tokens, draw),
            partial(_tokens_that_are_kept, draw, kept),
            0.0,
            {"torch.sort": partial(torch.sort, logits, dim=-1)},
        )


def _tokens(draw: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return draw()[0]


def _tokens_that_are_kept(
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]], kept: Callable[[], torch.Tensor]
) -> torch.Tensor:
    """The tokens drawn, and NaN where the reference does not keep one."""
    tokens = draw()[0].unsqueeze(1)
    return tokens.float().masked_fill(~kept().gather(1, tokens), float("nan")).squeeze(1)

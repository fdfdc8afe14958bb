"""Choices over a vocabulary of 128256, out of logits as the lm_head leaves them: greedy, plain temperature, top-k with
top-p, and top-p of a row so flat that its set is searched in all of it; beside it torch's argmax and sort."""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from trimtab_kernels.likeliest import likeliest_reference, likeliest_triton
from trimtab_kernels.sample import sample_reference, sample_triton

from benchmarks.row import Row

SPREAD, FLAT = 3.0, 0.5
"""Of normal logits: at 3, and 0.8 for temperature, the best of 128256 has one or two percent."""


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    vocab = 50 if tiny else 128256
    for num_rows in (2,) if tiny else (256, 1):
        yield _greedy(num_rows, vocab, device)
        for top_k, top_p, spread in ((vocab, 1.0, SPREAD), (50, 0.9, SPREAD), (vocab, 0.9, FLAT)):
            yield _random(num_rows, vocab, top_k, top_p, spread, device)


def _greedy(num_rows: int, vocab: int, device: torch.device) -> Row:
    logits = torch.randn(num_rows, vocab, device=device).to(torch.bfloat16)
    return Row(
        f"likeliest {num_rows}x{vocab}",
        "read",
        logits.numel() * logits.itemsize,
        0.90 if num_rows > 1 else 0.0,  # of one row a launch is what it costs
        lambda: likeliest_triton(logits)[1],
        lambda: likeliest_reference(logits)[1],
        0.0,
        {"torch.argmax of a float32 copy": lambda: logits.float().argmax(dim=-1)},
    )


def _random(num_rows: int, vocab: int, top_k: int, top_p: float, spread: float, device: torch.device) -> Row:
    logits = (torch.randn(num_rows, vocab, device=device) * spread).to(torch.bfloat16)
    temperature = torch.full((num_rows,), 0.8, device=device)
    most = torch.full((num_rows,), top_k, dtype=torch.int32, device=device)
    mass = torch.full((num_rows,), top_p, device=device)
    least = torch.zeros(num_rows, device=device)
    draw = partial(sample_triton, logits, temperature, most, mass, least, torch.arange(num_rows, device=device))
    flat = ", flat" if spread == FLAT else ""
    return Row(
        f"sample {num_rows}x{vocab}, top_k {top_k}, top_p {top_p}{flat}",
        "read",
        logits.numel() * logits.itemsize,
        0.0,  # instructions bind, and how many there are hangs on the logits (docs/results/kernel-notes.md)
        partial(_tokens, draw),
        partial(_tokens_that_are_kept, draw, partial(sample_reference, logits, temperature, most, mass, least)),
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

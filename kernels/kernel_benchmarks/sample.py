"""Sampling over a vocabulary of 128256 from logits of the lm_head: greedy, plain temperature, top-k with top-p, and
top-p of a row so flat that the whole row is searched; compared with torch's argmax and sort.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from trimtab_kernels.argmax import argmax_reference, argmax_triton
from trimtab_kernels.sample import sample_reference, sample_triton

from kernel_benchmarks.row import Row

SPREAD, FLAT = 3.0, 0.5
"""Standard deviation of the logits: with 3, and temperature 0.8, the best of 128256 has one or two percent."""
MASS_ERROR = 1e-4
"""Tolerance of sums of probabilities."""


def rows(device: torch.device, *, tiny: bool) -> Iterator[Row]:
    vocab = 50 if tiny else 128256
    for num_rows in (2,) if tiny else (256, 1):
        yield _greedy(num_rows, vocab, device)
        for top_k, top_p, spread in ((vocab, 1.0, SPREAD), (50, 0.9, SPREAD), (vocab, 0.9, FLAT)):
            yield _random(num_rows, vocab, top_k, top_p, spread, device)


def _greedy(num_rows: int, vocab: int, device: torch.device) -> Row:
    logits = torch.randn(num_rows, vocab, device=device).to(torch.bfloat16)
    return Row(
        f"argmax {num_rows}x{vocab}",
        "read",
        logits.numel() * logits.itemsize,
        0.90 if num_rows > 1 else 0.0,  # for one row, the cost is the launch
        lambda: argmax_triton(logits)[1],
        lambda: argmax_reference(logits)[1],
        0.0,
        {"torch.argmax of a float32 copy": lambda: logits.float().argmax(dim=-1)},
    )


def _random(num_rows: int, vocab: int, top_k: int, top_p: float, spread: float, device: torch.device) -> Row:
    logits = (torch.randn(num_rows, vocab, device=device) * spread).to(torch.bfloat16)
    temperature = torch.full((num_rows,), 0.8, device=device)
    most = torch.full((num_rows,), top_k, dtype=torch.int32, device=device)
    mass = torch.full((num_rows,), top_p, device=device)
    least = torch.zeros(num_rows, device=device)
    limits = (logits, temperature, most, mass, least)
    draw = partial(sample_triton, *limits, torch.arange(num_rows, device=device))
    flat = ", flat" if spread == FLAT else ""
    return Row(
        f"sample {num_rows}x{vocab}, top_k {top_k}, top_p {top_p}{flat}",
        "read",
        logits.numel() * logits.itemsize,
        0.0,  # bound by instructions, whose number depends on the logits (docs/results/kernel-notes.md)
        partial(_tokens, draw),
        partial(mask_invalid_tokens, draw, *limits),
        0.0,
        {"torch.sort": partial(torch.sort, logits, dim=-1)},
    )


def _tokens(draw: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    return draw()[0]


def mask_invalid_tokens(
    draw: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return the drawn tokens, with NaN for tokens that must not be drawn. Temperatures are above 0.

    The reference drops tokens that tie with a kept one by their order; the kernel keeps ties, so a token may be drawn
    if its logit is not below the smallest that the reference keeps. If the mass of all those is within MASS_ERROR of
    top_p, the next lower logit after top-k and min-p may be drawn too: the reference sums up to 128256 float32 numbers,
    the kernel integers, so they may reach top_p one logit apart.
    """
    tokens = draw()[0].unsqueeze(1)
    limits = (temperature, top_k, top_p, min_p)
    lowest = logits.masked_fill(~sample_reference(logits, *limits), float("inf")).amin(dim=-1, keepdim=True)
    left = sample_reference(logits, temperature, top_k, torch.ones_like(top_p), min_p)
    scaled = (logits.double() / temperature.unsqueeze(1)).masked_fill_(~left, float("-inf"))
    mass = scaled.softmax(dim=-1).masked_fill_(logits < lowest, 0).sum(dim=-1)
    lower = logits.masked_fill(~left | (logits >= lowest), float("-inf")).amax(dim=-1, keepdim=True)
    is_at_the_border = ((mass - top_p).abs() <= MASS_ERROR) & (lower.squeeze(1) > float("-inf"))
    least = torch.where(is_at_the_border.unsqueeze(1), lower, lowest)
    return tokens.float().masked_fill(logits.gather(1, tokens) < least, float("nan")).squeeze(1)

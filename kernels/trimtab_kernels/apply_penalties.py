"""Presence, frequency and repetition penalties on one sequence's logits, with vLLM's definitions.

logits         [vocab_size] fp32, changed in place
output_ids     [num_distinct] int64: distinct tokens of the output; output_counts [num_distinct] fp32: how often
seen_ids       [num_seen] int64: distinct tokens of prompt and output

```
repetition (seen_ids):    logit > 0 ? logit / repetition : logit * repetition     (Keskar et al. 2019, arXiv:1909.05858)
frequency (output_ids):   logit - frequency * count
presence (output_ids):    logit - presence
```
Latency-bound: a few hundred elements. Source: own.
"""

import torch


def apply_penalties_reference(
    logits: torch.Tensor,
    *,
    output_ids: torch.Tensor,
    output_counts: torch.Tensor,
    seen_ids: torch.Tensor,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """Apply one token at a time."""
    for token in seen_ids.tolist():
        logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
    for token, count in zip(output_ids.tolist(), output_counts.tolist(), strict=True):
        logits[token] -= frequency * count + presence


def apply_penalties(
    logits: torch.Tensor,
    *,
    output_ids: torch.Tensor,
    output_counts: torch.Tensor,
    seen_ids: torch.Tensor,
    presence: float,
    frequency: float,
    repetition: float,
) -> None:
    """Penalise the logits in place.

    Raises:
        ValueError: shapes do not match.
    """
    if logits.dim() != 1 or output_ids.shape != output_counts.shape:
        raise ValueError(
            f"apply_penalties: logits is {list(logits.shape)}, output_ids {list(output_ids.shape)}, output_counts "
            f"{list(output_counts.shape)}; logits must be [vocab_size], the others equal"
        )
    if repetition != 1 and seen_ids.numel():
        values = logits.index_select(0, seen_ids)
        logits.index_copy_(0, seen_ids, torch.where(values > 0, values / repetition, values * repetition))
    if output_ids.numel():
        logits.index_add_(0, output_ids, output_counts * frequency + presence, alpha=-1)

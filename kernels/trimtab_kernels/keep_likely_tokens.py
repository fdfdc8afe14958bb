"""Top-k, top-p and min-p: every token outside the kept set gets the logit -inf.

logits  [rows, vocab_size] fp32, already divided by the temperature, changed in place
top_k   [rows] int64: keep the k largest (vocab_size: all)
top_p   [rows] fp32: of those, the smallest set whose probabilities reach p (Holtzman et al. 2020, arXiv:1904.09751)
min_p   [rows] fp32: keep tokens at least min_p times as likely as the best one (Nguyen et al. 2024, arXiv:2407.01082)

As in vLLM: min-p on the whole distribution first, then top-k, then top-p on the result of top-k, renormalised. The most
likely token is always kept. Ties at the k-th value are all kept.
Bound by the sort: vocab_size * log(vocab_size) per row, avoided if every k is small. Source: own.
"""

import torch

SMALL_TOP_K = 1024  # up to here, a partial selection is faster than the full sort


def keep_likely_tokens_reference(
    logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Apply the definitions row by row."""
    for row, (k, p, m) in enumerate(zip(top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True)):
        values = logits[row]
        probabilities = values.softmax(dim=-1)
        values[probabilities < m * probabilities.max()] = float("-inf")
        values[values < values.sort(descending=True).values[k - 1]] = float("-inf")
        ordered, order = values.softmax(dim=-1).sort(descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        dropped = before >= p if p < 1 else torch.zeros_like(before, dtype=torch.bool)
        dropped[0] = False
        values[order[dropped]] = float("-inf")


def keep_likely_tokens(logits: torch.Tensor, *, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """Mask the logits in place.

    Raises:
        ValueError: shapes do not match, or k is below 1.
    """
    rows, vocab_size = logits.shape
    if any(limit.shape != (rows,) for limit in (top_k, top_p, min_p)) or bool((top_k < 1).any()):
        raise ValueError(f"keep_likely_tokens: logits is {list(logits.shape)}; each limit must be [{rows}], and k >= 1")
    minus_inf = float("-inf")
    if bool((min_p > 0).any()):
        # p_i < m * p_max  <=>  logit_i < logit_max + log(m)
        logits.masked_fill_(logits < logits.amax(dim=-1, keepdim=True) + min_p.log().unsqueeze(1), minus_inf)
    top_k = top_k.clamp(max=vocab_size)
    uses_top_p = bool((top_p < 1).any())
    largest = int(top_k.max())
    if largest > SMALL_TOP_K and not uses_top_p and bool((top_k == vocab_size).all()):
        return
    if largest <= SMALL_TOP_K:
        ordered, order = logits.topk(largest, dim=-1)
    else:
        ordered, order = logits.sort(dim=-1, descending=True)
    kth = ordered.gather(1, (top_k - 1).unsqueeze(1))
    logits.masked_fill_(logits < kth, minus_inf)
    if not uses_top_p:
        return
    ordered = ordered.masked_fill(ordered < kth, minus_inf)
    probabilities = ordered.softmax(dim=-1)
    before = probabilities.cumsum(dim=-1).sub_(probabilities)
    limits = top_p.masked_fill(top_p >= 1, float("inf")).unsqueeze(1)
    dropped = before >= limits
    dropped[:, 0] = False
    logits.scatter_(1, order, ordered.masked_fill_(dropped, minus_inf))

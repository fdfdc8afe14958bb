"""Draws one token per row from temperature, min-p, top-k and top-p, without sorting the vocabulary.

logits       [rows, vocab_size] fp32, rows may lie apart
temperature  [rows] fp32; 0 chooses the likeliest token
top_k        [rows] int32: keep the k largest (vocab_size: all)
top_p        [rows] fp32: of those, the smallest set whose probabilities reach p (1: all)
min_p        [rows] fp32: keep tokens at least min_p times as likely as the likeliest (0: all)
seeds        [rows] int64: equal seeds draw equally, whatever the rest of the batch
token_ids    [rows] int64
thresholds   [rows] fp32: a token was kept if logit / temperature >= threshold

The order and meaning are keep_likely_tokens'. There a set is cut out of a sorted row; here its smallest member is
searched. Tokens above a threshold are counted (top-k) or their probabilities summed (top-p), for three thresholds per
pass over the row, until no float32 lies between: at most 16 passes, out of the L2 cache. Tokens that tie at the
threshold are all kept.
```
keys (float32 as ordered integers)   low |----------| p1 |----------| p2 |----------| p3 |----------| high
                                     reaches the target   ......   does not reach it
```
The draw is the argmax of x - log(E), E exponential (the Gumbel-max trick, with Philox numbers of (seed, token)).
Bound by memory: rows * vocab_size * 4 bytes for plain temperature, plus the passes' L2 reads. Source: own.
"""

import torch

from trimtab_kernels.keep_likely_tokens import keep_likely_tokens_reference
from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl

BLOCK_TOKENS = 4096
"""Tokens of a step of a pass: 8 per thread at 16 warps, with six accumulators each in registers."""


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """[rows, vocab_size] bool: the tokens that may be drawn. By sorting."""
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    keep_likely_tokens_reference(scaled, top_k=top_k.long(), top_p=top_p, min_p=min_p)
    kept = scaled > float("-inf")
    kept[greedy] = logits[greedy] == logits[greedy].amax(dim=-1, keepdim=True)
    return kept


@jit
def _key(x: tl.tensor) -> tl.tensor:
    """float32 as an int32 of the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@jit
def _value(key: tl.tensor) -> tl.tensor:
    """The inverse of `_key`, which is its own."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@jit
def _search(
    row: tl.tensor,
    vocab_size: tl.tensor,
    inverse: tl.tensor,
    top: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """The largest float32 of which the tokens at or above reach the target: their number, or their mass relative to
    the likeliest token. Low (float32) reaches it."""
    # 64 bits, because the difference of two keys may not fit 32.
    reaching = _key(low).to(tl.int64)
    failing = _key(top).to(tl.int64) + 1
    while failing - reaching > 1:
        quarter = tl.maximum((failing - reaching) // 4, 1)
        first = reaching + quarter
        second = tl.minimum(first + quarter, failing)
        third = tl.minimum(second + quarter, failing)
        first_key, second_key, third_key = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        sums1 = tl.zeros([BLOCK], dtype=tl.float32)
        sums2 = tl.zeros([BLOCK], dtype=tl.float32)
        sums3 = tl.zeros([BLOCK], dtype=tl.float32)
        for start in tl.range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf")) * inverse
            key = _key(x)
            weight = tl.exp(x - top) if BY_MASS else tl.where(tokens < vocab_size, 1.0, 0.0)
            sums1 += tl.where(key >= first_key, weight, 0.0)
            sums2 += tl.where(key >= second_key, weight, 0.0)
            sums3 += tl.where(key >= third_key, weight, 0.0)
        reaches1 = tl.sum(sums1, 0) >= target
        reaches2 = (tl.sum(sums2, 0) >= target) & (second < failing)
        reaches3 = (tl.sum(sums3, 0) >= target) & (third < failing)
        new_failing = tl.where(reaches3, failing, tl.where(reaches2, third, tl.where(reaches1, second, first)))
        reaching = tl.where(reaches3, third, tl.where(reaches2, second, tl.where(reaches1, first, reaching)))
        failing = new_failing
    return _value(reaching.to(tl.int32))


@jit
def _mass_above(
    row: tl.tensor, vocab_size: tl.tensor, inverse: tl.tensor, top: tl.tensor, low: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Of the tokens at or above `low`, relative to the likeliest."""
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf")) * inverse
        sums += tl.where(x >= low, tl.exp(x - top), 0.0)
    return tl.sum(sums, 0)


@jit
def _exponential(seed: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Standard exponential numbers, precise near 0, where 1 - u would have been rounded away."""
    u = tl.maximum(tl.rand(seed, tokens), 2.3e-10)  # half of the smallest number that can be drawn
    return tl.where(u < 0.01, u * (1.0 + u * (0.5 + u * 0.33333334)), -tl.log(1.0 - u))


@kernel("vocab_size")
def _sample(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    token_ids: tl.tensor,
    thresholds: tl.tensor,
    vocab_size: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    """One program per row."""
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    heat = tl.load(temperature + index)
    inverse = 1.0 / tl.where(heat == 0.0, 1.0, heat)
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf"))
        highest = tl.maximum(highest, x)
    top = tl.max(highest, 0) * inverse
    # p >= m * p_max  <=>  x >= x_max + log(m). A smaller literal than 1e-37 would be a float64 in Triton 3.6.
    least = tl.load(min_p + index)
    threshold = tl.where(least > 0.0, top + tl.log(tl.maximum(least, 1e-37)), float("-inf"))
    threshold = tl.minimum(threshold, top)
    count = tl.load(top_k + index)
    mass = tl.load(top_p + index)
    if heat == 0.0:
        threshold = top
    else:
        if count < vocab_size:
            threshold = tl.maximum(
                threshold, _search(row, vocab_size, inverse, top, float("-inf") + top * 0.0, count, False, BLOCK)
            )
        if mass < 1.0:
            # Below this the exponential is 0 in float32: nothing there adds to the mass.
            threshold = tl.maximum(threshold, top - 104.0)
            target = mass * _mass_above(row, vocab_size, inverse, top, threshold, BLOCK)
            threshold = _search(row, vocab_size, inverse, top, threshold, target, True, BLOCK)
    seed = tl.load(seeds + index)
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_token = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        x = tl.load(row + tokens, mask=tokens < vocab_size, other=float("-inf")) * inverse
        noise = tl.where(heat == 0.0, 0.0, tl.log(_exponential(seed, tokens)))
        score = tl.where((x >= threshold) & (tokens < vocab_size), x - noise, float("-inf"))
        is_better = score > best
        best = tl.where(is_better, score, best)
        best_token = tl.where(is_better, tokens, best_token)
    # The lowest token among equal scores, as torch's argmax on the CPU.
    winner = tl.min(tl.where(best == tl.max(best, 0), best_token, 2147483647), 0)
    tl.store(token_ids + index, winner.to(tl.int64))
    tl.store(thresholds + index, threshold)


def sample_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids, thresholds). Raises ValueError where shapes or dtypes do not fit. NaN in a row makes its token 0."""
    rows, vocab_size = logits.shape
    limits = (temperature, top_k, top_p, min_p, seeds)
    wanted = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    if logits.dtype != torch.float32 or any(
        limit.shape != (rows,) or limit.dtype != dtype for limit, dtype in zip(limits, wanted, strict=True)
    ):
        raise ValueError(
            f"sample: logits is {list(logits.shape)} {logits.dtype}; temperature, top_p and min_p must be [{rows}] "
            f"float32, top_k int32, seeds int64"
        )
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        block = min(BLOCK_TOKENS, next_power_of_2(vocab_size))
        _sample[(rows,)](
            logits,
            *limits,
            token_ids,
            thresholds,
            vocab_size,
            logits.stride(0),
            BLOCK=block,
            num_warps=16 if block == BLOCK_TOKENS else 4,
        )
    return token_ids, thresholds

"""Sampling of one token per row with temperature, min-p, top-k and top-p, without sorting the vocabulary.

logits       [rows, vocab_size] fp32, bf16 or fp16; row stride may exceed the row size
temperature  [rows] fp32; 0 selects the most likely token
top_k        [rows] int32: keep the k largest (vocab_size: all)
top_p        [rows] fp32: of those, the smallest set whose probabilities reach p (1: all)
min_p        [rows] fp32: keep tokens at least min_p times as likely as the most likely one (0: all)
seeds        [rows] int64: equal seeds draw equal tokens, independent of the rest of the batch
token_ids    [rows] int64
thresholds   [rows] fp32: a token was kept if logit / temperature >= threshold

The order and semantics are those of keep_likely_tokens, which sorts a row. This kernel searches the threshold of the
kept set among a few candidates: one launch and one pass over the logits, by as many CTAs as fill the device.
```
sample      4096 tokens spread over the row estimate `low`, the value that about TARGET tokens reach
candidates  all CTAs of the row store every token at or above `low`; tokens below are only summed
finish      the last CTA searches the threshold among the candidates and draws among the kept ones
```
If the kept set is larger than the candidates, or there are too many candidates, the last CTA searches and draws over
the whole row: correct, but slow. Rows without limits draw in the first pass. Tokens that tie at the threshold are all
kept.
Probability masses are summed as integers, so the sums do not depend on the order of the writes: equal inputs give equal
outputs.
The draw is the argmax of x - log(E), E exponential (the Gumbel-max trick, with Philox numbers of (seed, token)). A tile
whose largest logit cannot win with any noise is skipped.
Memory-bound: rows * vocab_size * itemsize bytes, once. Source: own.
"""

import torch

from trimtab_kernels.argmax import (
    BLOCK_TOKENS,
    LOGIT_DTYPES,
    MAX_SPLITS,
    NUM_WARPS,
    TILE_TOKENS,
    argmax_of_split,
    best_of_splits,
    reduce_best,
    split_range,
    splits_of_row,
    update_best,
)
from trimtab_kernels.keep_likely_tokens import keep_likely_tokens_reference
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl

MAX_CANDIDATES = 4096
"""Candidates of a row at most: 32 KiB, which the last CTA reads from the L2 cache at each step of its search."""
CTAS_PER_SM = 2
MAX_REGISTERS = 128
"""Registers per thread: two CTAs of eight warps share a multiprocessor."""
SAMPLED_TOKENS, SAMPLED_RUN_TOKENS = 4096, 64
"""Tokens that estimate the threshold, and the length of the runs of adjacent tokens they are read in."""


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """Return the tokens that may be drawn, [rows, vocab_size] bool. Computed by sorting."""
    logits = logits.float()
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    keep_likely_tokens_reference(scaled, top_k=top_k.long(), top_p=top_p, min_p=min_p)
    kept = scaled > float("-inf")
    kept[greedy] = logits[greedy] == logits[greedy].amax(dim=-1, keepdim=True)
    return kept


@jit
def _min_float() -> tl.tensor:
    """Return the value that every selectable token reaches."""
    return tl.full([], -3.4e38, tl.float32)


@jit
def _key(x: tl.tensor) -> tl.tensor:
    """Return float32 as int32 with the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@jit
def _value(key: tl.tensor) -> tl.tensor:
    """Return the inverse of `_key`, which is its own inverse."""
    return tl.where(key >= 0, key, key ^ 0x7FFFFFFF).to(tl.float32, bitcast=True)


@jit
def _load_scaled(source: tl.tensor, tokens: tl.tensor, end: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Return the logits divided by temperature; -inf from `end` on."""
    return tl.load(source + tokens, mask=tokens < end, other=float("-inf")).to(tl.float32) * inverse


@jit
def _probability_mass(x: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Return the probability mass relative to the most likely token, in units of 2^-40. Integer sums do not depend on
    their order.
    """
    return (tl.exp(x - top) * 1099511627776.0).to(tl.int64)


@jit
def _max_scaled(source: tl.tensor, size: tl.tensor, inverse: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the largest of these logits after temperature."""
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, size, BLOCK):
        highest = tl.maximum(highest, _load_scaled(source, start + tl.arange(0, BLOCK), size, inverse))
    return tl.max(highest, 0)


@jit
def _mass_above(
    source: tl.tensor, size: tl.tensor, inverse: tl.tensor, top: tl.tensor, low: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Return the mass of the tokens at or above `low`."""
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for start in tl.range(0, size, BLOCK):
        x = _load_scaled(source, start + tl.arange(0, BLOCK), size, inverse)
        sums += tl.where(x >= low, _probability_mass(x, top), 0)
    return tl.sum(sums, 0)


@jit
def _search(
    source: tl.tensor,
    size: tl.tensor,
    inverse: tl.tensor,
    top: tl.tensor,
    low: tl.tensor,
    target: tl.tensor,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return the largest float32 threshold whose tokens (at or above it) reach the target count or mass. `low`
    (float32) must reach the target.
    """
    # 64 bits, because the difference of two keys may not fit 32.
    reaching = _key(low).to(tl.int64)
    failing = _key(top).to(tl.int64) + 1
    while failing - reaching > 1:
        quarter = tl.maximum((failing - reaching) // 4, 1)
        first = reaching + quarter
        second = tl.minimum(first + quarter, failing)
        third = tl.minimum(second + quarter, failing)
        first_key, second_key, third_key = first.to(tl.int32), second.to(tl.int32), third.to(tl.int32)
        sums1 = tl.zeros([BLOCK], dtype=tl.int64)
        sums2 = tl.zeros([BLOCK], dtype=tl.int64)
        sums3 = tl.zeros([BLOCK], dtype=tl.int64)
        for start in tl.range(0, size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            x = _load_scaled(source, tokens, size, inverse)
            key = _key(x)
            weight = _probability_mass(x, top) if BY_MASS else (tokens < size).to(tl.int64)
            sums1 += tl.where(key >= first_key, weight, 0)
            sums2 += tl.where(key >= second_key, weight, 0)
            sums3 += tl.where(key >= third_key, weight, 0)
        reaches1 = tl.sum(sums1, 0) >= target
        reaches2 = (tl.sum(sums2, 0) >= target) & (second < failing)
        reaches3 = (tl.sum(sums3, 0) >= target) & (third < failing)
        new_failing = tl.where(reaches3, failing, tl.where(reaches2, third, tl.where(reaches1, second, first)))
        reaching = tl.where(reaches3, third, tl.where(reaches2, second, tl.where(reaches1, first, reaching)))
        failing = new_failing
    return _value(reaching.to(tl.int32))


@jit
def _find_threshold(
    source: tl.tensor,
    size: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    mass_below: tl.tensor,
    vocab_size: tl.tensor,
    count: tl.tensor,
    share: tl.tensor,
    least: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return (threshold, whether it is valid for the row). `source` contains the row's tokens at or above `low`;
    `mass_below` is the mass of the others, relative to the largest.
    """
    top = _max_scaled(source, size, inverse, BLOCK)
    # p >= m * p_max  <=>  x >= x_max + log(m). A smaller literal than 1e-37 would be a float64 in Triton 3.6.
    threshold = tl.where(least > 0.0, top + tl.log(tl.maximum(least, 1e-37)), float("-inf"))
    threshold = tl.minimum(threshold, top)
    has_all = low <= _min_float()
    # A row without any selectable token has no order to search.
    is_found = (top > float("-inf")) | has_all
    if (count < vocab_size) & (top > float("-inf")):
        if size >= count:
            kth = _search(
                source, size, inverse, top, tl.full([], float("-inf"), tl.float32), count.to(tl.int64), False, BLOCK
            )
            threshold = tl.maximum(threshold, kth)
        else:
            is_found = has_all
    if (share < 1.0) & (top > float("-inf")):
        rest = tl.where(threshold == float("-inf"), mass_below, tl.full([], 0, tl.int64))
        # The mass of tokens between the min-p threshold and `low` is not known separately.
        is_found = is_found & (has_all | (threshold >= low) | (threshold == float("-inf")))
        # Below this, the exponential is 0 in float32 and adds no mass.
        floor = tl.maximum(threshold, top - 104.0)
        mass = _mass_above(source, size, inverse, top, floor, BLOCK)
        whole = mass + rest
        target = tl.minimum(tl.maximum((share * whole.to(tl.float32)).to(tl.int64), 1), whole)
        if mass >= target:
            threshold = _search(source, size, inverse, top, floor, target, True, BLOCK)
        else:
            is_found = is_found & has_all
    return threshold, is_found & (has_all | (threshold >= low))


@jit
def _gumbel(uniform: tl.tensor) -> tl.tensor:
    """Return Gumbel noise in units of ln 2, up to a constant: minus the logarithm of an exponential number, precise
    near 0, where 1 - u would be rounded away.
    """
    u = tl.maximum(uniform, 2.3e-10)  # half of the smallest number that can be drawn
    near_zero = u * (1.0 + u * (0.5 + u * 0.33333334)) * 1.4426950408889634
    return -tl.log2(tl.where(u < 0.01, near_zero, -tl.log2(1.0 - u)))


@jit
def _uniform_of(seed: tl.tensor, tokens: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return the uniform number of each token, equal to the one that `_draw_from_split` computes for four blocks of
    tokens at once.
    """
    counters = tokens // (4 * BLOCK) * BLOCK + tokens % BLOCK
    first, second, third, fourth = tl.rand4x(seed, counters, n_rounds=7)
    block = tokens // BLOCK % 4
    return tl.where(block < 2, tl.where(block == 0, first, second), tl.where(block == 2, third, fourth))


@jit
def _add_noise(
    best: tl.tensor, best_tokens: tl.tensor, x: tl.tensor, tokens: tl.tensor, threshold: tl.tensor, uniform: tl.tensor
) -> tl.tensor:
    """Return (best, best_tokens) updated with the scores of the tokens that reach the threshold."""
    score = tl.where(x >= threshold, x * 1.4426950408889634 + _gumbel(uniform), float("-inf"))
    return update_best(best, best_tokens, score, tokens)


@jit
def _draw_from_split(
    row: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    inverse: tl.tensor,
    threshold: tl.tensor,
    seed: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return (score, token) of the winner among the tokens [first, last) that reach the threshold. One Philox counter
    provides the numbers of four tokens that are one block apart.
    """
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_tokens = tl.zeros([BLOCK], dtype=tl.int32)
    leader = tl.full([], float("-inf"), tl.float32)
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(first, last, 4 * BLOCK):
        x0 = _load_scaled(row, start + lanes, last, inverse)
        x1 = _load_scaled(row, start + BLOCK + lanes, last, inverse)
        x2 = _load_scaled(row, start + 2 * BLOCK + lanes, last, inverse)
        x3 = _load_scaled(row, start + 3 * BLOCK + lanes, last, inverse)
        quads = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        highest = tl.max(tl.where(quads == quads, quads, float("-inf")), 0)
        # The noise never exceeds 32.
        if (highest >= threshold) & (highest * 1.4426950408889634 + 32.0 >= leader):
            u0, u1, u2, u3 = tl.rand4x(seed, start // 4 + lanes, n_rounds=7)
            best, best_tokens = _add_noise(best, best_tokens, x0, start + lanes, threshold, u0)
            best, best_tokens = _add_noise(best, best_tokens, x1, start + BLOCK + lanes, threshold, u1)
            best, best_tokens = _add_noise(best, best_tokens, x2, start + 2 * BLOCK + lanes, threshold, u2)
            best, best_tokens = _add_noise(best, best_tokens, x3, start + 3 * BLOCK + lanes, threshold, u3)
            leader = tl.max(best, 0)
    return reduce_best(best, best_tokens)


@jit
def _draw_from_candidates(
    values: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    threshold: tl.tensor,
    seed: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Return (score, token) of the winner among the candidates that reach the threshold. Candidates are unordered: of
    equal scores, the lowest token wins.
    """
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_tokens = tl.full([BLOCK], 2147483647, dtype=tl.int32)
    for start in tl.range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = _load_scaled(values, places, size, 1.0)
        token = tl.load(tokens + places, mask=places < size, other=0)
        score = x * 1.4426950408889634 + _gumbel(_uniform_of(seed, token, BLOCK))
        score = tl.where(x >= threshold, score, float("-inf"))
        is_better = (score > best) | ((score == best) & (token < best_tokens))
        best = tl.where(is_better, score, best)
        best_tokens = tl.where(is_better, token, best_tokens)
    return reduce_best(best, best_tokens)


@jit
def _estimate_low(
    row: tl.tensor,
    vocab_size: tl.tensor,
    inverse: tl.tensor,
    count: tl.tensor,
    SAMPLED: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tl.tensor:
    """Return (low, reference). About `wanted` tokens of the row are at or above `low`, estimated from a sample;
    `reference` is the sample's largest value. A row with no more tokens than the sample uses all of them as candidates.
    """
    low = _min_float()
    reference = tl.full([], 0.0, tl.float32)
    if vocab_size > SAMPLED:
        places = tl.arange(0, SAMPLED)
        run_distance = vocab_size // (SAMPLED // TOGETHER) // 16 * 16  # runs start at 16-byte boundaries
        x = _load_scaled(row, places // TOGETHER * run_distance + places % TOGETHER, vocab_size, inverse)
        keys = _key(tl.where(x == x, x, float("-inf")))
        wanted = tl.minimum(tl.maximum(2 * count, 1200), 3000)
        wanted = tl.where(count < vocab_size, wanted, 1200)
        rank = tl.maximum(wanted * SAMPLED // vocab_size, 8)
        highest = tl.maximum(tl.max(keys, 0), _key(low))
        reference = _value(highest)
        reaching = _key(low).to(tl.int64)
        failing = highest.to(tl.int64) + 1
        above = rank + SAMPLED
        while (failing - reaching > 1) & (above > rank + rank // 4):
            middle = (failing + reaching) // 2
            found = tl.sum((keys >= middle.to(tl.int32)).to(tl.int32), 0)
            is_enough = found >= rank
            reaching = tl.where(is_enough, middle, reaching)
            failing = tl.where(is_enough, failing, middle)
            above = tl.where(is_enough, found, above)
        low = _value(reaching.to(tl.int32))
    return low, reference


@jit
def _collect(
    row: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    reference: tl.tensor,
    needs_mass: tl.tensor,
    values: tl.tensor,
    tokens: tl.tensor,
    taken: tl.tensor,
    MOST: tl.constexpr,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """Store the tokens [first, last) at or above `low`. Returns the mass of the others relative to `reference`, which
    is no less than any of them.
    """
    mass = tl.full([], 0, tl.int64)
    for start in tl.range(first, last, BLOCK):
        own = start + tl.arange(0, BLOCK)
        x = _load_scaled(row, own, last, inverse)
        is_candidate = x >= low
        found = tl.sum(is_candidate.to(tl.int32), 0)
        if found > 0:
            before = tl.atomic_add(taken, found, sem="relaxed", scope="gpu")
            places = before + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            has_room = is_candidate & (places < MOST)
            tl.store(values + places, x, mask=has_room)
            tl.store(tokens + places, own, mask=has_room)
        if needs_mass:
            # Sums of one block in float32: block boundaries do not depend on the split of a row.
            below = tl.sum(tl.where(x < low, tl.exp(tl.minimum(x - reference, 0.0)), 0.0), 0)
            mass += (below * 1099511627776.0).to(tl.int64)
    return mass


@kernel("split_tiles", "num_splits")
def _sample(
    logits: tl.tensor,
    temperature: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    min_p: tl.tensor,
    seeds: tl.tensor,
    token_ids: tl.tensor,
    thresholds: tl.tensor,
    part_scores: tl.tensor,
    split_tokens: tl.tensor,
    part_masses: tl.tensor,
    candidate_values: tl.tensor,
    candidate_tokens: tl.tensor,
    counters: tl.tensor,
    vocab_size: tl.tensor,
    split_tiles: tl.tensor,
    num_splits: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
    MOST: tl.constexpr,
    SAMPLED: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """CTA (row, split)."""
    index = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    row = logits + index * stride
    heat = tl.load(temperature + index)
    inverse = 1.0 / tl.where(heat == 0.0, 1.0, heat)
    count = tl.load(top_k + index)
    share = tl.load(top_p + index)
    least = tl.load(min_p + index)
    seed = tl.load(seeds + index)
    is_random = heat != 0.0
    is_limited = is_random & ((count < vocab_size) | (share < 1.0) | (least > 0.0))
    first, last = split_range(split, split_tiles, vocab_size, BLOCK)
    values = candidate_values + index * MOST
    tokens = candidate_tokens + index * MOST
    arrivals = counters + 2 * index
    taken = arrivals + 1
    left = index * SPLITS + split
    low = tl.full([], 0.0, tl.float32)
    reference = tl.full([], 0.0, tl.float32)
    if is_limited:
        low, reference = _estimate_low(row, vocab_size, inverse, count, SAMPLED, TOGETHER)
        mass = _collect(row, first, last, inverse, low, reference, share < 1.0, values, tokens, taken, MOST, BLOCK)
        tl.store(part_masses + left, mass)
    else:
        if is_random:
            score, token = _draw_from_split(
                row, first, last, inverse, tl.full([], float("-inf"), tl.float32), seed, BLOCK
            )
        else:
            score, token = argmax_of_split(row, first, last, BLOCK)
        tl.store(part_scores + left, score)
        tl.store(split_tokens + left, token)
    # All threads store before one of them increments the counter; the last CTA reads after it has seen the full count.
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
        if is_limited:
            size = tl.load(taken)
            threshold, is_found = tl.full([], float("-inf"), tl.float32), False
            score, token = tl.full([], float("-inf"), tl.float32), 0
            if size <= MOST:
                splits = tl.arange(0, SPLITS)
                masses = tl.load(part_masses + index * SPLITS + splits, mask=splits < num_splits, other=0)
                top = _max_scaled(values, size, 1.0, BLOCK // 2)
                nearer = tl.exp(tl.minimum(reference - top, 0.0))
                mass_below = (tl.sum(masses, 0).to(tl.float32) * nearer).to(tl.int64)
                threshold, is_found = _find_threshold(
                    values, size, 1.0, low, mass_below, vocab_size, count, share, least, BLOCK // 2
                )
                if is_found:
                    score, token = _draw_from_candidates(values, tokens, size, threshold, seed, BLOCK)
            if not is_found:
                nothing = tl.full([], 0, tl.int64)
                everything = tl.full([], float("-inf"), tl.float32)
                threshold, _ = _find_threshold(
                    row, vocab_size, inverse, everything, nothing, vocab_size, count, share, least, BLOCK // 2
                )
                score, token = _draw_from_split(row, 0, vocab_size, inverse, threshold, seed, BLOCK)
            tl.store(taken, 0)  # for the next launch
        else:
            score, token = best_of_splits(
                part_scores + index * SPLITS, split_tokens + index * SPLITS, num_splits, SPLITS
            )
            threshold = tl.where(is_random, float("-inf"), score)
        if is_random & (score == float("-inf")):
            # No token can be drawn: return a NaN token if there is one, even if it is banned, so that the caller sees
            # the cause.
            _, token = argmax_of_split(row, 0, vocab_size, BLOCK)
        tl.store(token_ids + index, token.to(tl.int64))
        tl.store(thresholds + index, threshold)
        tl.store(arrivals, 0)


def sample_triton(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    *,
    facts: DeviceFacts | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_ids, thresholds). A row without any selectable token gets a token whose logit names the cause: NaN
    if the row contains one, else -inf.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    rows, vocab_size = logits.shape
    limits = (temperature, top_k, top_p, min_p, seeds)
    wanted = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64)
    if (
        logits.dtype not in LOGIT_DTYPES
        or logits.stride(1) != 1
        or any(limit.shape != (rows,) or limit.dtype != dtype for limit, dtype in zip(limits, wanted, strict=True))
    ):
        raise ValueError(
            f"sample: logits is {list(logits.shape)} {logits.dtype}; temperature, top_p and min_p must be [{rows}] "
            f"float32, top_k int32, seeds int64"
        )
    device = logits.device
    token_ids = torch.empty(rows, dtype=torch.int64, device=device)
    thresholds = torch.empty(rows, dtype=torch.float32, device=device)
    if rows:
        facts = facts or device_facts(device)
        num_splits, split_size = splits_of_row(rows, vocab_size, facts, per_sm=CTAS_PER_SM)
        _sample[(rows, num_splits)](
            logits,
            *limits,
            token_ids,
            thresholds,
            torch.empty(rows, MAX_SPLITS, dtype=torch.float32, device=device),
            torch.empty(rows, MAX_SPLITS, dtype=torch.int32, device=device),
            torch.empty(rows, MAX_SPLITS, dtype=torch.int64, device=device),
            torch.empty(rows, MAX_CANDIDATES, dtype=torch.float32, device=device),
            torch.empty(rows, MAX_CANDIDATES, dtype=torch.int32, device=device),
            arrival_counters(device, 2 * next_power_of_2(rows)),
            vocab_size,
            split_size // TILE_TOKENS,
            num_splits,
            logits.stride(0),
            BLOCK=BLOCK_TOKENS,
            SPLITS=MAX_SPLITS,
            MOST=MAX_CANDIDATES,
            SAMPLED=SAMPLED_TOKENS,
            TOGETHER=SAMPLED_RUN_TOKENS,
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
        )
    return token_ids, thresholds

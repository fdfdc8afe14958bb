"""Draws one token per row from temperature, min-p, top-k and top-p, without sorting the vocabulary.

logits       [rows, vocab_size] fp32, bf16 or fp16, rows may lie apart
temperature  [rows] fp32; 0 chooses the likeliest token
top_k        [rows] int32: keep the k largest (vocab_size: all)
top_p        [rows] fp32: of those, the smallest set whose probabilities reach p (1: all)
min_p        [rows] fp32: keep tokens at least min_p times as likely as the likeliest (0: all)
seeds        [rows] int64: equal seeds draw equally, whatever the rest of the batch
token_ids    [rows] int64
thresholds   [rows] fp32: a token was kept if logit / temperature >= threshold

The order and meaning are keep_likely_tokens'. There a set is cut out of a sorted row; here its smallest member is
searched, among few: one launch, and one pass over the logits by as many programs as fill the device.
```
sample      4096 tokens from all over the row say above which value about TARGET tokens lie: `low`
candidates  every token at or above low is written down, by all programs of the row; what lies below is only summed
finish      the program that comes last searches the threshold among the candidates, and draws among those kept
```
Where the set is larger than its candidates, or they are too many, the last program searches and draws over the whole
row: right as well, and slow. Rows without limits draw in the first pass. Tokens that tie at the threshold are all kept.
Masses are summed in integers, so they do not depend on who wrote what down first: equal inputs give equal outputs.
The draw is the argmax of x - log(E), E exponential (the Gumbel-max trick, with Philox numbers of (seed, token)). A tile
whose largest logit cannot win whatever is drawn for it draws nothing.
Bound by memory: rows * vocab_size * itemsize bytes, once. Source: own.
"""

import torch

from trimtab_kernels.keep_likely_tokens import keep_likely_tokens_reference
from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl
from trimtab_kernels.likeliest import (
    BLOCK_TOKENS,
    LOGIT_DTYPES,
    MAX_PARTS,
    NUM_WARPS,
    TILE_TOKENS,
    best_of_parts,
    better,
    first_best,
    likeliest_of_part,
    part_of_row,
    parts_of_row,
)

MOST_CANDIDATES = 4096
"""Of a row: 32 KiB that the last program reads at each step of its search, from the L2 cache."""
PROGRAMS_PER_SM = 2
MAX_REGISTERS = 128
"""Of a thread: two programs of eight warps share a multiprocessor."""
SAMPLED_TOKENS, SAMPLED_TOGETHER = 4096, 64
"""Looked at first, in runs of so many neighbours."""


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> torch.Tensor:
    """[rows, vocab_size] bool: the tokens that may be drawn. By sorting."""
    logits = logits.float()
    greedy = temperature == 0
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    keep_likely_tokens_reference(scaled, top_k=top_k.long(), top_p=top_p, min_p=min_p)
    kept = scaled > float("-inf")
    kept[greedy] = logits[greedy] == logits[greedy].amax(dim=-1, keepdim=True)
    return kept


@jit
def _lowest() -> tl.tensor:
    """What every token reaches that may be chosen at all."""
    return tl.full([], -3.4e38, tl.float32)


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
def _scaled(source: tl.tensor, tokens: tl.tensor, end: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """Logits by temperature; -inf from `end` on."""
    return tl.load(source + tokens, mask=tokens < end, other=float("-inf")).to(tl.float32) * inverse


@jit
def _mass(x: tl.tensor, top: tl.tensor) -> tl.tensor:
    """Relative to the likeliest token, in units of 2^-40: sums of integers do not depend on their order."""
    return (tl.exp(x - top) * 1099511627776.0).to(tl.int64)


@jit
def _highest(source: tl.tensor, size: tl.tensor, inverse: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The largest of these logits by temperature."""
    highest = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    for start in tl.range(0, size, BLOCK):
        highest = tl.maximum(highest, _scaled(source, start + tl.arange(0, BLOCK), size, inverse))
    return tl.max(highest, 0)


@jit
def _mass_above(
    source: tl.tensor, size: tl.tensor, inverse: tl.tensor, top: tl.tensor, low: tl.tensor, BLOCK: tl.constexpr
) -> tl.tensor:
    """Of the tokens at or above `low`."""
    sums = tl.zeros([BLOCK], dtype=tl.int64)
    for start in tl.range(0, size, BLOCK):
        x = _scaled(source, start + tl.arange(0, BLOCK), size, inverse)
        sums += tl.where(x >= low, _mass(x, top), 0)
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
    """The largest float32 of which the tokens at or above reach the target: their number, or their mass. Low (float32)
    reaches it."""
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
            x = _scaled(source, tokens, size, inverse)
            key = _key(x)
            weight = _mass(x, top) if BY_MASS else (tokens < size).to(tl.int64)
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
def _threshold_of(
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
    """(threshold, whether it is that of the row). Source has the row's tokens at or above `low`; the others' mass,
    relative to the largest, is `mass_below`."""
    top = _highest(source, size, inverse, BLOCK)
    # p >= m * p_max  <=>  x >= x_max + log(m). A smaller literal than 1e-37 would be a float64 in Triton 3.6.
    threshold = tl.where(least > 0.0, top + tl.log(tl.maximum(least, 1e-37)), float("-inf"))
    threshold = tl.minimum(threshold, top)
    has_all = low <= _lowest()
    # A row of which nothing may be chosen has no order to search in.
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
        # Of tokens between the threshold of min-p and `low` nobody knows the mass alone.
        is_found = is_found & (has_all | (threshold >= low) | (threshold == float("-inf")))
        # Below this the exponential is 0 in float32: nothing there adds to the mass.
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
    """What is added to a logit in units of ln 2, up to a constant: minus the logarithm of an exponential number, which
    is precise near 0, where 1 - u would have been rounded away."""
    u = tl.maximum(uniform, 2.3e-10)  # half of the smallest number that can be drawn
    near_zero = u * (1.0 + u * (0.5 + u * 0.33333334)) * 1.4426950408889634
    return -tl.log2(tl.where(u < 0.01, near_zero, -tl.log2(1.0 - u)))


@jit
def _numbers_of(seed: tl.tensor, tokens: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """The uniform number of each token: as `_drawn_part` has it for four blocks of tokens at once."""
    counters = tokens // (4 * BLOCK) * BLOCK + tokens % BLOCK
    first, second, third, fourth = tl.rand4x(seed, counters, n_rounds=7)
    block = tokens // BLOCK % 4
    return tl.where(block < 2, tl.where(block == 0, first, second), tl.where(block == 2, third, fourth))


@jit
def _with_noise(
    best: tl.tensor, best_tokens: tl.tensor, x: tl.tensor, tokens: tl.tensor, threshold: tl.tensor, uniform: tl.tensor
) -> tl.tensor:
    """(best, best_tokens) with the scores of these tokens put in, where they reach the threshold."""
    score = tl.where(x >= threshold, x * 1.4426950408889634 + _gumbel(uniform), float("-inf"))
    return better(best, best_tokens, score, tokens)


@jit
def _drawn_part(
    row: tl.tensor,
    first: tl.tensor,
    last: tl.tensor,
    inverse: tl.tensor,
    threshold: tl.tensor,
    seed: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """(score, token) of the winner among tokens [first, last) that reach the threshold. One Philox counter has the
    numbers of four tokens, a block apart."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_tokens = tl.zeros([BLOCK], dtype=tl.int32)
    leader = tl.full([], float("-inf"), tl.float32)
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(first, last, 4 * BLOCK):
        x0 = _scaled(row, start + lanes, last, inverse)
        x1 = _scaled(row, start + BLOCK + lanes, last, inverse)
        x2 = _scaled(row, start + 2 * BLOCK + lanes, last, inverse)
        x3 = _scaled(row, start + 3 * BLOCK + lanes, last, inverse)
        quads = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        highest = tl.max(tl.where(quads == quads, quads, float("-inf")), 0)
        # No number makes more than 32 of the noise.
        if (highest >= threshold) & (highest * 1.4426950408889634 + 32.0 >= leader):
            u0, u1, u2, u3 = tl.rand4x(seed, start // 4 + lanes, n_rounds=7)
            best, best_tokens = _with_noise(best, best_tokens, x0, start + lanes, threshold, u0)
            best, best_tokens = _with_noise(best, best_tokens, x1, start + BLOCK + lanes, threshold, u1)
            best, best_tokens = _with_noise(best, best_tokens, x2, start + 2 * BLOCK + lanes, threshold, u2)
            best, best_tokens = _with_noise(best, best_tokens, x3, start + 3 * BLOCK + lanes, threshold, u3)
            leader = tl.max(best, 0)
    return first_best(best, best_tokens)


@jit
def _drawn_candidate(
    values: tl.tensor,
    tokens: tl.tensor,
    size: tl.tensor,
    threshold: tl.tensor,
    seed: tl.tensor,
    BLOCK: tl.constexpr,
) -> tl.tensor:
    """(score, token) of the winner among the candidates that reach the threshold. They are in no order: of equal
    scores the lowest token's wins in any case."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_tokens = tl.full([BLOCK], 2147483647, dtype=tl.int32)
    for start in tl.range(0, size, BLOCK):
        places = start + tl.arange(0, BLOCK)
        x = _scaled(values, places, size, 1.0)
        token = tl.load(tokens + places, mask=places < size, other=0)
        score = x * 1.4426950408889634 + _gumbel(_numbers_of(seed, token, BLOCK))
        score = tl.where(x >= threshold, score, float("-inf"))
        is_better = (score > best) | ((score == best) & (token < best_tokens))
        best = tl.where(is_better, score, best)
        best_tokens = tl.where(is_better, token, best_tokens)
    return first_best(best, best_tokens)


@jit
def _low_of_sample(
    row: tl.tensor,
    vocab_size: tl.tensor,
    inverse: tl.tensor,
    count: tl.tensor,
    SAMPLED: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> tl.tensor:
    """(low, reference): about `wanted` tokens of the row are at or above low, as a sample says; the reference is the
    sample's largest. A row of no more tokens than the sample has them all for candidates."""
    low = _lowest()
    reference = tl.full([], 0.0, tl.float32)
    if vocab_size > SAMPLED:
        places = tl.arange(0, SAMPLED)
        apart = vocab_size // (SAMPLED // TOGETHER) // 16 * 16  # so that runs begin where loads of 16 bytes may
        x = _scaled(row, places // TOGETHER * apart + places % TOGETHER, vocab_size, inverse)
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
    """Write down the tokens [first, last) at or above `low`. Returns the mass of the others relative to the reference,
    which is no less than any of them."""
    mass = tl.full([], 0, tl.int64)
    for start in tl.range(first, last, BLOCK):
        own = start + tl.arange(0, BLOCK)
        x = _scaled(row, own, last, inverse)
        is_candidate = x >= low
        found = tl.sum(is_candidate.to(tl.int32), 0)
        if found > 0:
            before = tl.atomic_add(taken, found, sem="relaxed", scope="gpu")
            places = before + tl.cumsum(is_candidate.to(tl.int32), 0) - 1
            has_room = is_candidate & (places < MOST)
            tl.store(values + places, x, mask=has_room)
            tl.store(tokens + places, own, mask=has_room)
        if needs_mass:
            # Sums of one block in float32: blocks are the same however a row is split.
            below = tl.sum(tl.where(x < low, tl.exp(tl.minimum(x - reference, 0.0)), 0.0), 0)
            mass += (below * 1099511627776.0).to(tl.int64)
    return mass


@kernel("part_tiles", "num_parts")
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
    part_tokens: tl.tensor,
    part_masses: tl.tensor,
    candidate_values: tl.tensor,
    candidate_tokens: tl.tensor,
    counters: tl.tensor,
    vocab_size: tl.tensor,
    part_tiles: tl.tensor,
    num_parts: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    MOST: tl.constexpr,
    SAMPLED: tl.constexpr,
    TOGETHER: tl.constexpr,
) -> None:
    """Program (row, part)."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    row = logits + index * stride
    heat = tl.load(temperature + index)
    inverse = 1.0 / tl.where(heat == 0.0, 1.0, heat)
    count = tl.load(top_k + index)
    share = tl.load(top_p + index)
    least = tl.load(min_p + index)
    seed = tl.load(seeds + index)
    is_random = heat != 0.0
    is_limited = is_random & ((count < vocab_size) | (share < 1.0) | (least > 0.0))
    first, last = part_of_row(part, part_tiles, vocab_size, BLOCK)
    values = candidate_values + index * MOST
    tokens = candidate_tokens + index * MOST
    arrivals = counters + 2 * index
    taken = arrivals + 1
    left = index * PARTS + part
    low = tl.full([], 0.0, tl.float32)
    reference = tl.full([], 0.0, tl.float32)
    if is_limited:
        low, reference = _low_of_sample(row, vocab_size, inverse, count, SAMPLED, TOGETHER)
        mass = _collect(row, first, last, inverse, low, reference, share < 1.0, values, tokens, taken, MOST, BLOCK)
        tl.store(part_masses + left, mass)
    else:
        if is_random:
            score, token = _drawn_part(row, first, last, inverse, tl.full([], float("-inf"), tl.float32), seed, BLOCK)
        else:
            score, token = likeliest_of_part(row, first, last, BLOCK)
        tl.store(part_scores + left, score)
        tl.store(part_tokens + left, token)
    # All threads have stored before one tells of it, and whoever hears it reads what was stored before.
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        if is_limited:
            size = tl.load(taken)
            threshold, is_found = tl.full([], float("-inf"), tl.float32), False
            score, token = tl.full([], float("-inf"), tl.float32), 0
            if size <= MOST:
                parts = tl.arange(0, PARTS)
                masses = tl.load(part_masses + index * PARTS + parts, mask=parts < num_parts, other=0)
                top = _highest(values, size, 1.0, BLOCK // 2)
                nearer = tl.exp(tl.minimum(reference - top, 0.0))
                mass_below = (tl.sum(masses, 0).to(tl.float32) * nearer).to(tl.int64)
                threshold, is_found = _threshold_of(
                    values, size, 1.0, low, mass_below, vocab_size, count, share, least, BLOCK // 2
                )
                if is_found:
                    score, token = _drawn_candidate(values, tokens, size, threshold, seed, BLOCK)
            if not is_found:
                nothing = tl.full([], 0, tl.int64)
                everything = tl.full([], float("-inf"), tl.float32)
                threshold, _ = _threshold_of(
                    row, vocab_size, inverse, everything, nothing, vocab_size, count, share, least, BLOCK // 2
                )
                score, token = _drawn_part(row, 0, vocab_size, inverse, threshold, seed, BLOCK)
            tl.store(taken, 0)  # for the next launch
        else:
            score, token = best_of_parts(part_scores + index * PARTS, part_tokens + index * PARTS, num_parts, PARTS)
            threshold = tl.where(is_random, float("-inf"), score)
        if is_random & (score == float("-inf")):
            # Nothing can be drawn: a token that is no number tells why, where there is one, whatever is banned.
            _, token = likeliest_of_part(row, 0, vocab_size, BLOCK)
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
    """(token_ids, thresholds). Raises ValueError where shapes or dtypes do not fit. A row of which nothing can be
    chosen gets a token whose logit tells why: NaN where the row has any, else -inf."""
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
        num_parts, part_size = parts_of_row(rows, vocab_size, facts, per_sm=PROGRAMS_PER_SM)
        _sample[(rows, num_parts)](
            logits,
            *limits,
            token_ids,
            thresholds,
            torch.empty(rows, MAX_PARTS, dtype=torch.float32, device=device),
            torch.empty(rows, MAX_PARTS, dtype=torch.int32, device=device),
            torch.empty(rows, MAX_PARTS, dtype=torch.int64, device=device),
            torch.empty(rows, MOST_CANDIDATES, dtype=torch.float32, device=device),
            torch.empty(rows, MOST_CANDIDATES, dtype=torch.int32, device=device),
            arrival_counters(device, 2 * next_power_of_2(rows)),
            vocab_size,
            part_size // TILE_TOKENS,
            num_parts,
            logits.stride(0),
            BLOCK=BLOCK_TOKENS,
            PARTS=MAX_PARTS,
            MOST=MOST_CANDIDATES,
            SAMPLED=SAMPLED_TOKENS,
            TOGETHER=SAMPLED_TOGETHER,
            num_warps=NUM_WARPS,
            maxnreg=MAX_REGISTERS,
        )
    return token_ids, thresholds

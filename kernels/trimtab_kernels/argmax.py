"""Argmax of each row of logits, and its logit: greedy sampling.
logits     [rows, vocab_size] fp32, bf16 or fp16; row stride may exceed the row size
token_ids  [rows] int64: the first of equal maxima
best       [rows] fp32: its logit; NaN if the row contains one, -inf if no token may be chosen

Logits are read in their own dtype, without a float32 copy. A row is split over as many CTAs as fill the device; each
CTA stores the best token of its split, and the last one to finish reduces them in the order of the splits.
Memory-bound: rows * vocab_size * itemsize bytes, once. Source: own.
"""

import torch

from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl

BLOCK_TOKENS = 2048
"""Eight tokens per thread with eight warps: 16-byte loads of 16-bit logits, two of them for float32."""
TILE_TOKENS = 4 * BLOCK_TOKENS
"""Four blocks are in flight at once: 32 KiB of 16-bit logits for two CTAs per multiprocessor."""
NUM_WARPS = 8
CTAS_PER_SM = 5
"""Resident CTAs per multiprocessor, limited by registers."""
MAX_SPLITS = 64
"""Splits of a row at most: one CTA reads the results of all of them."""
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def argmax_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_ids, best). torch treats NaN as the largest value."""
    token_ids = logits.argmax(dim=-1)
    return token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).float()


def splits_of_row(num_rows: int, vocab_size: int, facts: DeviceFacts, *, per_sm: int = CTAS_PER_SM) -> tuple[int, int]:
    """Return (splits of a row, tokens per split): as many CTAs as are resident at once, in whole tiles."""
    tiles = cdiv(vocab_size, TILE_TOKENS)
    splits = max(1, min(tiles, MAX_SPLITS, per_sm * facts.num_sms // num_rows))
    size = cdiv(tiles, splits) * TILE_TOKENS
    return cdiv(vocab_size, size), size


@jit
def reduce_best(values: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Return (largest value, lowest token that has it). NaN counts as the largest."""
    is_nan = values != values
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    wins = tl.where(has_nan, is_nan, values == top)
    return tl.where(has_nan, float("nan"), top), tl.min(tl.where(wins, tokens, 2147483647), 0)


@jit
def update_best(best: tl.tensor, best_tokens: tl.tensor, values: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """Return (best, best_tokens) updated with larger or NaN values."""
    is_better = (values > best) | (values != values)
    return tl.where(is_better, values, best), tl.where(is_better, tokens, best_tokens)


@jit
def split_range(split: tl.tensor, split_tiles: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return (first token of a split, its end). Both are known to be multiples of 16 if the vocabulary size is one,
    which allows 16-byte loads.
    """
    first = split * split_tiles * (4 * BLOCK)
    return first, tl.minimum(first + split_tiles * (4 * BLOCK), vocab_size)


@jit
def argmax_of_split(row: tl.tensor, first: tl.tensor, last: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """Return (largest logit, its token) of the tokens [first, last) of a row."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_tokens = tl.zeros([BLOCK], dtype=tl.int32)
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(first, last, 4 * BLOCK):
        for quarter in tl.static_range(4):
            tokens = start + quarter * BLOCK + lanes
            x = tl.load(row + tokens, mask=tokens < last, other=float("-inf")).to(tl.float32)
            best, best_tokens = update_best(best, best_tokens, x, tokens)
    return reduce_best(best, best_tokens)


@jit
def best_of_splits(values: tl.tensor, tokens: tl.tensor, num_splits: tl.tensor, SPLITS: tl.constexpr) -> tl.tensor:
    """Return (largest value, its token) over the results of a row's CTAs."""
    splits = tl.arange(0, SPLITS)
    found = tl.load(values + splits, mask=splits < num_splits, other=float("-inf"))
    return reduce_best(found, tl.load(tokens + splits, mask=splits < num_splits, other=2147483647))


@kernel("split_tiles", "num_splits")
def _argmax(
    logits: tl.tensor,
    token_ids: tl.tensor,
    best: tl.tensor,
    split_best: tl.tensor,
    split_tokens: tl.tensor,
    arrivals: tl.tensor,
    vocab_size: tl.tensor,
    split_tiles: tl.tensor,
    num_splits: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """CTA (row, split)."""
    index = tl.program_id(0).to(tl.int64)
    first, last = split_range(tl.program_id(1), split_tiles, vocab_size, BLOCK)
    value, token = argmax_of_split(logits + index * stride, first, last, BLOCK)
    left = index * SPLITS + tl.program_id(1)
    tl.store(split_best + left, value)
    tl.store(split_tokens + left, token)
    # All threads store before one of them increments the counter; the last CTA reads after it has seen the full count.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + index, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
        value, token = best_of_splits(split_best + index * SPLITS, split_tokens + index * SPLITS, num_splits, SPLITS)
        tl.store(token_ids + index, token.to(tl.int64))
        tl.store(best + index, value)
        tl.store(arrivals + index, 0)  # for the next launch


def argmax_triton(logits: torch.Tensor, *, facts: DeviceFacts | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel. Shapes must have been checked."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    best = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        num_splits, split_size = splits_of_row(num_rows, vocab_size, facts or device_facts(device))
        _argmax[(num_rows, num_splits)](
            logits,
            token_ids,
            best,
            torch.empty(num_rows, MAX_SPLITS, dtype=torch.float32, device=device),
            torch.empty(num_rows, MAX_SPLITS, dtype=torch.int32, device=device),
            arrival_counters(device, next_power_of_2(num_rows)),
            vocab_size,
            split_size // TILE_TOKENS,
            num_splits,
            logits.stride(0),
            BLOCK=BLOCK_TOKENS,
            SPLITS=MAX_SPLITS,
            num_warps=NUM_WARPS,
        )
    return token_ids, best


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (token_ids, best) of each row.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    if logits.dim() != 2 or logits.dtype not in LOGIT_DTYPES or logits.stride(1) != 1:
        raise ValueError(
            f"argmax: logits is {list(logits.shape)} {logits.dtype}; it must be [rows, vocab_size] of float32, "
            f"bfloat16 or float16"
        )
    return argmax_triton(logits) if logits.is_cuda else argmax_reference(logits)

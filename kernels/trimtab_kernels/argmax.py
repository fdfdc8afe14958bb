"""The likeliest token of each row of logits, and its logit: what greedy requests get.

logits     [rows, vocab_size] fp32, bf16 or fp16, rows may lie apart
token_ids  [rows] int64: the first one of those that tie
best       [rows] fp32: its logit; NaN where the row has any, -inf where no token may be chosen

Read as the model computed them, without a float32 copy. A row is spread over as many programs as fill the device; each
leaves the best of its part, and the one that comes last chooses among them, in the order of the parts.
Bound by memory: rows * vocab_size * itemsize bytes, once. Source: own.
"""

import torch

from trimtab_kernels.launch.arrivals import arrival_counters
from trimtab_kernels.launch.device_facts import DeviceFacts, device_facts
from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl

BLOCK_TOKENS = 2048
"""Eight per thread at eight warps: loads of 16 bytes from 16-bit logits, of twice 16 from float32."""
TILE_TOKENS = 4 * BLOCK_TOKENS
"""Four blocks are under way at once: 32 KiB of 16-bit logits by two programs of a multiprocessor."""
NUM_WARPS = 8
PROGRAMS_PER_SM = 5
"""As many as run at once, by their registers."""
MAX_PARTS = 64
"""Of a row: one program reads what all of them left."""
LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def likeliest_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids, best). torch takes NaN for the largest."""
    token_ids = logits.argmax(dim=-1)
    return token_ids, logits.gather(1, token_ids.unsqueeze(1)).squeeze(1).float()


def parts_of_row(
    num_rows: int, vocab_size: int, facts: DeviceFacts, *, per_sm: int = PROGRAMS_PER_SM
) -> tuple[int, int]:
    """(programs that share a row, tokens of each one's part): as many as run at once, in whole tiles."""
    tiles = cdiv(vocab_size, TILE_TOKENS)
    parts = max(1, min(tiles, MAX_PARTS, per_sm * facts.num_sms // num_rows))
    size = cdiv(tiles, parts) * TILE_TOKENS
    return cdiv(vocab_size, size), size


@jit
def first_best(values: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """(the largest value, the lowest token that has it). NaN counts as the largest."""
    is_nan = values != values
    has_nan = tl.max(is_nan.to(tl.int32), 0) > 0
    top = tl.max(tl.where(is_nan, float("-inf"), values), 0)
    wins = tl.where(has_nan, is_nan, values == top)
    return tl.where(has_nan, float("nan"), top), tl.min(tl.where(wins, tokens, 2147483647), 0)


@jit
def better(best: tl.tensor, best_tokens: tl.tensor, values: tl.tensor, tokens: tl.tensor) -> tl.tensor:
    """(best, best_tokens) with what is larger, or NaN, put in."""
    is_better = (values > best) | (values != values)
    return tl.where(is_better, values, best), tl.where(is_better, tokens, best_tokens)


@jit
def part_of_row(part: tl.tensor, part_tiles: tl.tensor, vocab_size: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """(first token of a part, the one behind its last). Both are known to be multiples of 16 where the size of the
    vocabulary is one: then loads are of 16 bytes."""
    first = part * part_tiles * (4 * BLOCK)
    return first, tl.minimum(first + part_tiles * (4 * BLOCK), vocab_size)


@jit
def likeliest_of_part(row: tl.tensor, first: tl.tensor, last: tl.tensor, BLOCK: tl.constexpr) -> tl.tensor:
    """(largest logit, its token) of tokens [first, last) of a row."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    best_tokens = tl.zeros([BLOCK], dtype=tl.int32)
    lanes = tl.arange(0, BLOCK)
    for start in tl.range(first, last, 4 * BLOCK):
        for quarter in tl.static_range(4):
            tokens = start + quarter * BLOCK + lanes
            x = tl.load(row + tokens, mask=tokens < last, other=float("-inf")).to(tl.float32)
            best, best_tokens = better(best, best_tokens, x, tokens)
    return first_best(best, best_tokens)


@jit
def best_of_parts(values: tl.tensor, tokens: tl.tensor, num_parts: tl.tensor, PARTS: tl.constexpr) -> tl.tensor:
    """(largest value, its token) of what the programs of a row have left."""
    parts = tl.arange(0, PARTS)
    found = tl.load(values + parts, mask=parts < num_parts, other=float("-inf"))
    return first_best(found, tl.load(tokens + parts, mask=parts < num_parts, other=2147483647))


@kernel("part_tiles", "num_parts")
def _likeliest(
    logits: tl.tensor,
    token_ids: tl.tensor,
    best: tl.tensor,
    part_best: tl.tensor,
    part_tokens: tl.tensor,
    arrivals: tl.tensor,
    vocab_size: tl.tensor,
    part_tiles: tl.tensor,
    num_parts: tl.tensor,
    stride: tl.tensor,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
) -> None:
    """Program (row, part)."""
    index = tl.program_id(0).to(tl.int64)
    first, last = part_of_row(tl.program_id(1), part_tiles, vocab_size, BLOCK)
    value, token = likeliest_of_part(logits + index * stride, first, last, BLOCK)
    left = index * PARTS + tl.program_id(1)
    tl.store(part_best + left, value)
    tl.store(part_tokens + left, token)
    # All threads have stored before one tells of it, and whoever hears it reads what was stored before.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + index, 1, sem="acq_rel", scope="gpu") == num_parts - 1:
        value, token = best_of_parts(part_best + index * PARTS, part_tokens + index * PARTS, num_parts, PARTS)
        tl.store(token_ids + index, token.to(tl.int64))
        tl.store(best + index, value)
        tl.store(arrivals + index, 0)  # for the next launch


def likeliest_triton(logits: torch.Tensor, *, facts: DeviceFacts | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; shapes have been checked."""
    num_rows, vocab_size = logits.shape
    device = logits.device
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=device)
    best = torch.empty(num_rows, dtype=torch.float32, device=device)
    if num_rows:
        num_parts, part_size = parts_of_row(num_rows, vocab_size, facts or device_facts(device))
        _likeliest[(num_rows, num_parts)](
            logits,
            token_ids,
            best,
            torch.empty(num_rows, MAX_PARTS, dtype=torch.float32, device=device),
            torch.empty(num_rows, MAX_PARTS, dtype=torch.int32, device=device),
            arrival_counters(device, next_power_of_2(num_rows)),
            vocab_size,
            part_size // TILE_TOKENS,
            num_parts,
            logits.stride(0),
            BLOCK=BLOCK_TOKENS,
            PARTS=MAX_PARTS,
            num_warps=NUM_WARPS,
        )
    return token_ids, best


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token_ids, best). Raises ValueError where shapes or dtypes do not fit."""
    if logits.dim() != 2 or logits.dtype not in LOGIT_DTYPES or logits.stride(1) != 1:
        raise ValueError(
            f"likeliest: logits is {list(logits.shape)} {logits.dtype}; it must be [rows, vocab_size] of float32, "
            f"bfloat16 or float16"
        )
    return likeliest_triton(logits) if logits.is_cuda else likeliest_reference(logits)

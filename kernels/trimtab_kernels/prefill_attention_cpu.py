r"""Attention of many query rows by oneDNN GEMMs: paged_attention's chunks on the CPU.

query       [num_tokens, num_heads, head_size]   fp32
key, value  [length, num_kv_heads, head_size]    fp32
y           [num_kv_heads, heads per kv head, num_tokens, head_size], and the log-sum-exp of the scaled scores without
            the last dimension
Causal: query and key i are the same token. Otherwise every query sees every key.

Per kv head and ROW_BLOCK query tokens (of all its query heads), two GEMMs with a softmax between them; a causal block
stops at its own last key, which skips nearly half of the work:
```
keys      |-- seen by all rows --|\\-- hidden --|
row block |    GEMM, softmax     | \\           |
```
oneDNN compiles code per shape, so keys are padded to few lengths (`padded_length`) and the padding is hidden; rows are
padded to whole blocks. torch's flash kernel, which this replaces from MIN_ROWS rows on, multiplies with MKL in blocks
of 32 rows and reaches a fifth of the machine's rate. Measured with 2 threads, 9 heads of 64, causal, in microseconds
(the flash kernel in parentheses): 256 tokens 712 (966), 512 tokens 1953 (3657), 1024 tokens 6127 (11101).
Compute-bound: 4 * num_heads * head_size operations per pair of a query and a visible key. Source: own.
"""

from functools import cache

import torch

ROW_BLOCK = 128  # query tokens of one GEMM: 64 costs a fifth more time, 256 gains nothing
MIN_ROWS = 192  # below this, padding to whole blocks and 4 GEMMs per kv head cost more than they save
KEY_LENGTHS = (128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)  # padding is a third or less


def can_multiply(query: torch.Tensor, length: int) -> bool:
    """Return True if prefill_attention_cpu supports these rows against `length` keys and is faster."""
    return (
        query.device.type == "cpu"
        and query.dtype == torch.float32
        and query.shape[0] >= MIN_ROWS
        and length <= KEY_LENGTHS[-1]
        and torch._C._has_mkldnn
    )


def padded_length(length: int) -> int:
    """Return the smallest of KEY_LENGTHS that is at least `length`."""
    return next(size for size in KEY_LENGTHS if size >= length)


@cache
def _causal_mask(width: int) -> torch.Tensor:
    """Return a mask [ROW_BLOCK, width]: -inf for keys after the row, 0 elsewhere; the first key is the first row's."""
    return torch.full((ROW_BLOCK, width), float("-inf")).triu_(1)


def prefill_attention_cpu(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float, is_causal: bool, wants_lse: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (y, log-sum-exp); the latter is undefined unless wanted."""
    num_tokens, num_heads, size = query.shape
    length, num_kv_heads, _ = key.shape
    group = num_heads // num_kv_heads
    num_rows = -(-num_tokens // ROW_BLOCK) * ROW_BLOCK
    num_keys = padded_length(num_rows if is_causal else length)
    queries = query.new_zeros(num_kv_heads, group, num_rows, size)
    torch.mul(
        query.view(num_tokens, num_kv_heads, group, size).permute(1, 2, 0, 3), scale, out=queries[:, :, :num_tokens]
    )
    keys = key.new_zeros(num_kv_heads, num_keys, size)
    keys[:, :length] = key.transpose(0, 1)
    values = value.new_zeros(num_kv_heads, size, num_keys)
    values[:, :, :length] = value.permute(1, 2, 0)
    output = torch.empty_like(queries)
    lse = query.new_empty(num_kv_heads, group, num_rows)
    for first in range(0, num_rows, ROW_BLOCK):
        rows = slice(first, first + ROW_BLOCK)
        seen = padded_length(first + ROW_BLOCK) if is_causal else num_keys
        for head in range(num_kv_heads):
            scores = _product(queries[head, :, rows].reshape(-1, size), keys[head, :seen])
            scores = scores.view(group, ROW_BLOCK, seen)
            if is_causal:
                scores[:, :, first:].add_(_causal_mask(seen - first))
            elif length < seen:
                scores[:, :, length:] = float("-inf")
            if wants_lse:
                torch.logsumexp(scores, dim=-1, out=lse[head, :, rows])
            torch.softmax(scores, dim=-1, out=scores)
            weighted = _product(scores.view(-1, seen), values[head, :, :seen].contiguous())
            output[head, :, rows] = weighted.view(group, ROW_BLOCK, size)
    return output[:, :, :num_tokens], lse[:, :, :num_tokens]


def _product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Return x @ wᵀ; oneDNN may reorder w internally."""
    y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, w, None, "none", [], "")
    return y

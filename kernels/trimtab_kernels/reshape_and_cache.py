"""Writes new keys and values into their slots of the paged KV cache.

key, value              [num_tokens, num_kv_heads, head_size]               dtype of the cache
key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_size]   written in place
slot_mapping            [num_tokens] int64: token i goes to slot block_id * block_size + offset; all slots differ

```
cache   |-- block 0 --|-- block 1 --|-- block 2 --|      slot = 2 * block_size + 1
                                     ..^
```
Bound by memory: 4 * num_tokens * num_kv_heads * head_size * itemsize bytes. Source: own.
"""

import torch


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """One token at a time."""
    block_size = key_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // block_size, slot % block_size] = key[token]
        value_cache[slot // block_size, slot % block_size] = value[token]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """Scatter key and value by slot. Raises ValueError where shapes or dtypes do not fit."""
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[2:] or slot_mapping.shape != key.shape[:1]:
        raise ValueError(
            f"reshape_and_cache: key {list(key.shape)}, value {list(value.shape)}, cache {list(key_cache.shape)}, "
            f"slot_mapping {list(slot_mapping.shape)} do not fit together"
        )
    if key.dtype != key_cache.dtype:
        raise ValueError(f"reshape_and_cache: key is {key.dtype}, the cache holds {key_cache.dtype}")
    key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
    value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)

"""Attention's input from a layer's projection in one pass: heads of query and key normalised (Qwen3) and rotated, keys
and values written to their slots of the paged KV cache.

qkv       [num_tokens, (num_heads + 2 * num_kv_heads) * head_size]   fp32 | bf16 | fp16; any row stride
rotation  [num_tokens, head_size // 2] complex64, for adjacent pairs (see rotary_embedding)
norms     (query's, key's) weights [head_size] of qkv's dtype, or None (see rms_norm)
caches, slots, scales: see reshape_and_cache; tokens with a negative slot, and those from len(slot_mapping) on, are
          padding and reach no cache
y         (query, key, value): [num_tokens, heads, head_size] each, heads contiguous

```
a row of qkv   | query heads | key heads | value heads |      one launch instead of three, or six with norms
                 norm, rotate  norm, rotate    |
                      v          v    v        v
                   in place   in place  slot of the cache
```
On CUDA, query and key are changed in place and the results are views of qkv; on other devices qkv is unchanged.
Memory-bound: num_tokens * head_size * ((2 * num_heads + 3 * num_kv_heads) * itemsize + 2 * num_kv_heads * cache
itemsize + 4) bytes.
Source: own.
"""

from dataclasses import dataclass

import torch

from trimtab_kernels.launch.dependence import dependence, gdc_launch_dependents, gdc_wait
from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl
from trimtab_kernels.reshape_and_cache import LARGEST, clamp_to_float8, reshape_and_cache, reshape_and_cache_reference
from trimtab_kernels.rms_norm import rms_norm, rms_norm_reference
from trimtab_kernels.rotary_embedding import BLOCK_ELEMENTS, rotary_embedding, rotary_embedding_reference

Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Query, key and value: [num_tokens, heads, head_size] each."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Norms of query heads and key heads: weights [head_size], and the epsilon."""

    query: torch.Tensor
    key: torch.Tensor
    eps: float


def split_heads(qkv: torch.Tensor, num_kv_heads: int, head_size: int) -> Heads:
    """Return views of a projection's query, key and value heads."""
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // head_size, head_size)
    return heads[:, : -2 * num_kv_heads], heads[:, -2 * num_kv_heads : -num_kv_heads], heads[:, -num_kv_heads:]


def rope_and_cache_reference(
    qkv: torch.Tensor,
    rotation: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norms: Norms | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Heads:
    """Apply the references of its steps, one after another."""
    query, key, value = split_heads(qkv, *key_cache.shape[2:])
    if norms is not None:
        query = rms_norm_reference(query, norms.query, norms.eps)
        key = rms_norm_reference(key, norms.key, norms.eps)
    query, key = (rotary_embedding_reference(heads, rotation) for heads in (query, key))
    reshape_and_cache_reference(
        key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale
    )  # tokens after the last slot are omitted there
    return query, key, value


@kernel("num_slots")
def _rope_and_cache(
    qkv: tl.tensor,
    rotation: tl.tensor,
    query_norm: tl.tensor,
    key_norm: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    num_slots: tl.tensor,
    qkv_stride: tl.tensor,
    eps: tl.tensor,
    inverse_key_scale: tl.tensor,
    inverse_value_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
    DEPENDENT: tl.constexpr,
) -> None:
    """CTA (token, group of HEADS heads of any kind). BLOCK is SIZE padded to a power of two. Norms may be None.
    DEPENDENT: the kernel may start before the previous kernel has ended.
    """
    if DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    in_head = columns < SIZE
    is_query = heads < NUM_HEADS
    is_value = heads >= NUM_HEADS + NUM_KV_HEADS
    inside = (heads < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & in_head[None, :]
    places = qkv + token * qkv_stride + heads[:, None] * SIZE + columns[None, :]
    tile = tl.load(places, mask=inside, other=0.0)
    wide = tile.to(tl.float32)
    if query_norm is not None:
        scale = tl.rsqrt(tl.sum(wide * wide, axis=1) / SIZE + eps)
        query_weight = tl.load(query_norm + columns, mask=in_head, other=0.0).to(tl.float32)
        key_weight = tl.load(key_norm + columns, mask=in_head, other=0.0).to(tl.float32)
        weight = tl.where(is_query[:, None], query_weight[None, :], key_weight[None, :])
        # Rounded where rms_norm rounds: before and after the weight.
        normalised = (wide * scale[:, None]).to(tile.dtype).to(tl.float32)
        wide = (normalised * weight).to(tile.dtype).to(tl.float32)
    turns = tl.load(rotation + token * SIZE + columns, mask=in_head, other=0.0)
    even, odd = tl.split(tl.reshape(wide, (HEADS, BLOCK // 2, 2)))
    cos, sin = tl.split(tl.reshape(turns, (BLOCK // 2, 2)))
    turned_even = even * cos[None, :] - odd * sin[None, :]
    turned_odd = odd * cos[None, :] + even * sin[None, :]
    turned = tl.reshape(tl.join(turned_even, turned_odd), (HEADS, BLOCK)).to(tile.dtype)
    tl.store(places, turned, mask=inside & (heads < NUM_HEADS + NUM_KV_HEADS)[:, None])
    slot = tl.load(slot_mapping + token, mask=token < num_slots, other=-1)
    if slot >= 0:
        stored = tl.where(is_value[:, None], tile, turned)
        if LARGEST_VALUE is not None:
            inverse = tl.where(is_value, inverse_value_scale, inverse_key_scale)
            stored = clamp_to_float8(stored.to(tl.float32) * inverse[:, None], LARGEST_VALUE)
        row = slot * (NUM_KV_HEADS * SIZE)
        keys = key_cache + row + (heads - NUM_HEADS)[:, None] * SIZE + columns[None, :]
        values = value_cache + row + (heads - NUM_HEADS - NUM_KV_HEADS)[:, None] * SIZE + columns[None, :]
        is_key = (heads >= NUM_HEADS) & (heads < NUM_HEADS + NUM_KV_HEADS)
        new = stored.to(key_cache.dtype.element_ty)
        tl.store(keys, new, mask=inside & is_key[:, None])
        tl.store(values, new, mask=inside & is_value[:, None])


def rope_and_cache_triton(
    qkv: torch.Tensor,
    rotation: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norms: Norms | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Heads:
    """Launch the kernel. Shapes must have been checked. Elements of a row of qkv and the caches must be contiguous."""
    num_kv_heads, size = key_cache.shape[2:]
    query, key, value = split_heads(qkv, num_kv_heads, size)
    num_tokens, num_heads, _ = query.shape
    if num_tokens:
        block = next_power_of_2(size)
        heads = min(next_power_of_2(num_heads + 2 * num_kv_heads), max(1, BLOCK_ELEMENTS // block))
        _rope_and_cache[(num_tokens, cdiv(num_heads + 2 * num_kv_heads, heads))](
            qkv,
            torch.view_as_real(rotation),
            None if norms is None else norms.query,
            None if norms is None else norms.key,
            key_cache,
            value_cache,
            slot_mapping,
            slot_mapping.shape[0],
            qkv.stride(0),
            0.0 if norms is None else norms.eps,
            1.0 / key_scale,
            1.0 / value_scale,
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            SIZE=size,
            HEADS=heads,
            BLOCK=block,
            LARGEST_VALUE=LARGEST.get(key_cache.dtype),
            num_warps=4,
            **dependence(qkv.device),
        )
    return query, key, value


def _check(
    qkv: torch.Tensor, rotation: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor, norms: Norms | None
) -> None:
    num_tokens, width = qkv.shape
    num_kv_heads, size = cache.shape[2:]
    fits = width % size == 0 and width // size > 2 * num_kv_heads and size % 2 == 0 and qkv.stride(1) == 1
    if not fits or rotation.shape != (num_tokens, size // 2) or slots.dim() != 1 or slots.shape[0] > num_tokens:
        raise ValueError(
            f"rope_and_cache: qkv is {list(qkv.shape)}, rotation {list(rotation.shape)}, slot_mapping "
            f"{list(slots.shape)}, the cache {list(cache.shape)}: qkv must have query heads and twice the cache's "
            f"heads in a row, rotation a row per token, slots one at most, head_size must be even"
        )
    if norms is not None and not norms.query.shape == norms.key.shape == (size,):
        raise ValueError(
            f"rope_and_cache: norms are {list(norms.query.shape)} and {list(norms.key.shape)}, not [{size}]"
        )


def rope_and_cache(
    qkv: torch.Tensor,
    rotation: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    norms: Norms | None = None,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    is_padded: bool = False,
) -> Heads:
    """Write the caches and return query, key and value for attention. On the CPU, `is_padded` must be set if slots may
    be negative.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    scales = {"key_scale": key_scale, "value_scale": value_scale}
    _check(qkv, rotation, key_cache, slot_mapping, norms)
    if qkv.is_cuda:
        return rope_and_cache_triton(qkv, rotation, key_cache, value_cache, slot_mapping, norms=norms, **scales)
    query, key, value = _rotate(qkv, rotation, key_cache.shape[2], norms)
    real = slice(slot_mapping.shape[0])
    reshape_and_cache(key[real], value[real], key_cache, value_cache, slot_mapping, is_padded=is_padded, **scales)
    return query, key, value


def _rotate(qkv: torch.Tensor, rotation: torch.Tensor, num_kv_heads: int, norms: Norms | None) -> Heads:
    """Compute it with torch operators: query and key heads are rotated in one multiplication."""
    query, key, value = split_heads(qkv, num_kv_heads, 2 * rotation.shape[1])
    num_heads = query.shape[1]
    if norms is None:
        unturned = qkv.view(qkv.shape[0], num_heads + 2 * num_kv_heads, query.shape[2])[:, :-num_kv_heads]
    else:
        normalised = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
        unturned = torch.cat(normalised, dim=1)
    turned = rotary_embedding(unturned, rotation)
    return turned[:, :num_heads], turned[:, num_heads:], value

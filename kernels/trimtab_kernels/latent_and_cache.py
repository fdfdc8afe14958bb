"""Latent attention's cache write in one pass: normalise the latent vector, rotate the key part of its token, write both
to their slot of the paged cache, and rotate the rotary part of all query heads.

kept      [num_tokens, width]                       fp32 | bf16 | fp16: the latent vector, then the rotary part
rotated   [num_tokens, num_heads, rotary_size]      of the queries; a head's elements are contiguous
query     [num_tokens, num_heads, width]            contiguous; the last rotary_size elements of each head are
                                                    written here, the first ones by another kernel
norm      [kv_rank]                                 see rms_norm; kv_rank is width - rotary_size
rotation  [num_tokens, rotary_size // 2] complex64  for adjacent pairs (see rotary_embedding)
cache     [num_blocks, block_size, 1, width]        slots and scale: see reshape_and_cache; tokens with a negative slot,
                                                    and those from len(slot_mapping) on, are padding and reach no cache
y         [num_tokens, 1, width]: the keys, on CUDA written over `kept`

Memory-bound: num_tokens * ((2 * num_heads * rotary_size + 2 * width) * itemsize + width * cache itemsize) bytes.
Source: own.
"""

import torch

from trimtab_kernels.launch.jit import cdiv, jit, kernel, next_power_of_2, tl
from trimtab_kernels.reshape_and_cache import LARGEST, clamp_to_float8, reshape_and_cache, reshape_and_cache_reference
from trimtab_kernels.rms_norm import rms_norm, rms_norm_reference
from trimtab_kernels.rotary_embedding import BLOCK_ELEMENTS, rotary_embedding, rotary_embedding_reference


def latent_and_cache_reference(
    query: torch.Tensor,
    rotated: torch.Tensor,
    kept: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Apply the references of its steps, one after another."""
    kv_rank = norm.shape[0]
    query[:, :, kv_rank:] = rotary_embedding_reference(rotated, rotation)
    latent = rms_norm_reference(kept[:, :kv_rank], norm, eps)
    shared = rotary_embedding_reference(kept[:, None, kv_rank:], rotation)
    key = torch.cat([latent.unsqueeze(1), shared], dim=-1)
    reshape_and_cache_reference(key, key, cache, cache, slot_mapping, key_scale=scale, value_scale=scale)
    return key


@jit
def _rotate(tile: tl.tensor, turns: tl.tensor, HEADS: tl.constexpr, BLOCK: tl.constexpr) -> tl.tensor:
    """Return [HEADS, BLOCK] of pairs in fp32, each rotated by [BLOCK] of cos and sin."""
    even, odd = tl.split(tl.reshape(tile, (HEADS, BLOCK // 2, 2)))
    cos, sin = tl.split(tl.reshape(turns, (BLOCK // 2, 2)))
    turned_even = even * cos[None, :] - odd * sin[None, :]
    turned_odd = odd * cos[None, :] + even * sin[None, :]
    return tl.reshape(tl.join(turned_even, turned_odd), (HEADS, BLOCK))


@kernel("num_slots")
def _latent_and_cache(
    query: tl.tensor,
    rotated: tl.tensor,
    kept: tl.tensor,
    norm: tl.tensor,
    rotation: tl.tensor,
    cache: tl.tensor,
    slot_mapping: tl.tensor,
    num_slots: tl.tensor,
    rotated_stride: tl.tensor,
    head_stride: tl.tensor,
    kept_stride: tl.tensor,
    eps: tl.tensor,
    inverse_scale: tl.tensor,
    NUM_HEADS: tl.constexpr,
    KV_RANK: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
) -> None:
    """CTA (token, part): part 0 is the key, the others are HEADS query heads each. SIZE elements are rotated."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    in_head = columns < SIZE
    turns = tl.load(rotation + token * SIZE + columns, mask=in_head, other=0.0)
    if part > 0:
        heads = (part - 1) * HEADS + tl.arange(0, HEADS)
        inside = (heads < NUM_HEADS)[:, None] & in_head[None, :]
        places = token * rotated_stride + heads[:, None] * head_stride + columns[None, :]
        tile = tl.load(rotated + places, mask=inside, other=0.0)
        turned = _rotate(tile.to(tl.float32), turns, HEADS, BLOCK).to(tile.dtype)
        target = (token * NUM_HEADS + heads)[:, None] * (KV_RANK + SIZE) + KV_RANK + columns[None, :]
        tl.store(query + target, turned, mask=inside)
    else:
        latents = tl.arange(0, BLOCK_C)
        in_latent = latents < KV_RANK
        row = kept + token * kept_stride
        vector = tl.load(row + latents, mask=in_latent, other=0.0)
        wide = vector.to(tl.float32)
        factor = tl.rsqrt(tl.sum(wide * wide, 0) / KV_RANK + eps)
        weight = tl.load(norm + latents, mask=in_latent, other=0.0).to(tl.float32)
        # Rounded where rms_norm rounds: before and after the weight.
        latent = ((wide * factor).to(vector.dtype).to(tl.float32) * weight).to(vector.dtype)
        rotary_part = tl.load(row + KV_RANK + columns, mask=in_head, other=0.0)
        turned_alone = _rotate(tl.reshape(rotary_part.to(tl.float32), (1, BLOCK)), turns, 1, BLOCK)
        shared = tl.reshape(turned_alone, (BLOCK,)).to(vector.dtype)
        tl.store(row + latents, latent, mask=in_latent)
        tl.store(row + KV_RANK + columns, shared, mask=in_head)
        slot = tl.load(slot_mapping + token, mask=token < num_slots, other=-1)
        if slot >= 0:
            place = cache + slot * (KV_RANK + SIZE)
            if LARGEST_VALUE is not None:
                stored_latent = clamp_to_float8(latent.to(tl.float32) * inverse_scale, LARGEST_VALUE)
                stored_shared = clamp_to_float8(shared.to(tl.float32) * inverse_scale, LARGEST_VALUE)
                tl.store(place + latents, stored_latent.to(cache.dtype.element_ty), mask=in_latent)
                tl.store(place + KV_RANK + columns, stored_shared.to(cache.dtype.element_ty), mask=in_head)
            else:
                tl.store(place + latents, latent.to(cache.dtype.element_ty), mask=in_latent)
                tl.store(place + KV_RANK + columns, shared.to(cache.dtype.element_ty), mask=in_head)


def latent_and_cache_triton(
    query: torch.Tensor,
    rotated: torch.Tensor,
    kept: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float = 1.0,
) -> torch.Tensor:
    """Launch the kernel. Shapes must have been checked."""
    num_tokens, num_heads, size = rotated.shape
    kv_rank = norm.shape[0]
    if num_tokens:
        block = next_power_of_2(size)
        heads = min(next_power_of_2(num_heads), max(1, BLOCK_ELEMENTS // block))
        _latent_and_cache[(num_tokens, 1 + cdiv(num_heads, heads))](
            query,
            rotated,
            kept,
            norm,
            torch.view_as_real(rotation),
            cache,
            slot_mapping,
            slot_mapping.shape[0],
            rotated.stride(0),
            rotated.stride(1),
            kept.stride(0),
            eps,
            1.0 / scale,
            NUM_HEADS=num_heads,
            KV_RANK=kv_rank,
            SIZE=size,
            HEADS=heads,
            BLOCK_C=next_power_of_2(kv_rank),
            BLOCK=block,
            LARGEST_VALUE=LARGEST.get(cache.dtype),
            num_warps=4,
        )
    return kept.unsqueeze(1)


def latent_and_cache(
    query: torch.Tensor,
    rotated: torch.Tensor,
    kept: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    rotation: torch.Tensor,
    cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    scale: float = 1.0,
    is_padded: bool = False,
) -> torch.Tensor:
    """Write the cache and complete the queries; return the step's keys. On the CPU, `is_padded` must be set if slots
    may be negative.

    Raises:
        ValueError: shapes do not match.
    """
    num_tokens, num_heads, size = rotated.shape
    kv_rank, width = norm.shape[0], kept.shape[1]
    fits = query.shape == (num_tokens, num_heads, width) and kept.shape[0] == num_tokens and kv_rank + size == width
    lie_well = query.is_contiguous() and rotated.stride(2) == 1 and kept.stride(1) == 1
    if not fits or not lie_well or cache.shape[2:] != (1, width) or rotation.shape != (num_tokens, size // 2):
        raise ValueError(
            f"latent_and_cache: query {list(query.shape)}, rotated {list(rotated.shape)}, kept {list(kept.shape)}, "
            f"norm {list(norm.shape)}, rotation {list(rotation.shape)}, cache {list(cache.shape)} do not fit together"
        )
    if kept.is_cuda:
        return latent_and_cache_triton(query, rotated, kept, norm, eps, rotation, cache, slot_mapping, scale=scale)
    query[:, :, kv_rank:] = rotary_embedding(rotated.contiguous(), rotation)
    latent = rms_norm(kept[:, :kv_rank].contiguous(), norm, eps)
    shared = rotary_embedding(kept[:, None, kv_rank:].contiguous(), rotation)
    key = torch.cat([latent.unsqueeze(1), shared], dim=-1)
    new = key[: slot_mapping.shape[0]]
    reshape_and_cache(new, new, cache, cache, slot_mapping, key_scale=scale, value_scale=scale, is_padded=is_padded)
    return key

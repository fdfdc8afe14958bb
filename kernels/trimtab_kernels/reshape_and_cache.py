"""Write of new keys and values to their slots of the paged KV cache.

key, value              [num_tokens, num_kv_heads, head_size]               fp32 | bf16 | fp16; heads contiguous
key_cache, value_cache  [num_blocks, block_size, num_kv_heads, head_size]   written in place: fp32 | bf16 | fp16 |
                                                                            float8_e4m3fn | float8_e5m2
slot_mapping            [num_tokens] int64: token i goes to slot block_id * block_size + offset; all slots differ.
                        A negative slot marks a padding row, which is not written (captured graphs pad)

```
cache   |-- block 0 --|-- block 1 --|-- block 2 --|      slot = 2 * block_size + 1
                                     ..^
```
A float8 cache contains x / scale, clamped to the range of the format (448, or 57344 for e5m2) and rounded to nearest.
There is one scale for all keys and one for all values.
Memory-bound: 2 * num_tokens * num_kv_heads * head_size * (itemsize + cache itemsize) bytes. Source: own.
"""

import torch

from trimtab_kernels.launch.jit import jit, kernel, next_power_of_2, tl

FLOAT8 = torch.float8_e4m3fn
FLOAT8_MAX = 448.0
"""The largest finite float8_e4m3fn; larger values are NaN in this format."""


LARGEST = {FLOAT8: FLOAT8_MAX, torch.float8_e5m2: 57344.0}
"""The supported float8 cache formats, and the largest finite value of each."""
CACHE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, *LARGEST)


def quantize_float8(x: torch.Tensor, scale: float, dtype: torch.dtype = FLOAT8) -> torch.Tensor:
    """Return x / scale in a float8 format, clamped."""
    largest = LARGEST[dtype]
    return (x.float() / scale).clamp_(-largest, largest).to(dtype)


def as_stored(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return x in the dtype of the cache. Only float8 uses the scale."""
    return quantize_float8(x, scale, dtype) if dtype in LARGEST else x.to(dtype)


def as_read(stored: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Return cached values in attention's dtype."""
    read = stored.to(dtype)
    return read.mul_(scale) if stored.dtype in LARGEST and scale != 1.0 else read


def reshape_and_cache_reference(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write one token at a time."""
    block_size = key_cache.shape[1]
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        stored = as_stored(new, cache.dtype, scale)
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                cache[slot // block_size, slot % block_size] = stored[token]


def reshape_and_cache_cpu(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Write with one indexed copy each. No slot may be negative."""
    if key_cache.dtype == key.dtype:
        key_cache.flatten(0, 1).index_copy_(0, slot_mapping, key)
        value_cache.flatten(0, 1).index_copy_(0, slot_mapping, value)
        return
    for new, cache, scale in ((key, key_cache, key_scale), (value, value_cache, value_scale)):
        slots, stored = cache.flatten(0, 1), as_stored(new, cache.dtype, scale)
        if cache.dtype in LARGEST:  # torch does not index float8, so its bytes are used
            slots, stored = slots.view(torch.uint8), stored.view(torch.uint8)
        slots.index_copy_(0, slot_mapping, stored)


@jit
def clamp_to_float8(x: tl.tensor, largest: tl.tensor) -> tl.tensor:
    """Return fp32 clamped to the range of float8, whose conversion saturates on some generations and yields NaN on
    others. NaN stays NaN: clamping alone would turn it into the largest value and hide the error.
    """
    return tl.clamp(x, -largest, largest, propagate_nan=tl.PropagateNan.ALL)


@kernel()
def _reshape_and_cache(
    key: tl.tensor,
    value: tl.tensor,
    key_cache: tl.tensor,
    value_cache: tl.tensor,
    slot_mapping: tl.tensor,
    key_stride: tl.tensor,
    value_stride: tl.tensor,
    inverse_key_scale: tl.tensor,
    inverse_value_scale: tl.tensor,
    ROW: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_VALUE: tl.constexpr,
) -> None:
    """One CTA per token: its kv heads are one contiguous row of ROW elements, in the input and in the cache."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping + token)
    if slot >= 0:
        offsets = tl.arange(0, BLOCK)
        inside = offsets < ROW
        new_key = tl.load(key + token * key_stride + offsets, mask=inside)
        new_value = tl.load(value + token * value_stride + offsets, mask=inside)
        if LARGEST_VALUE is not None:
            new_key = clamp_to_float8(new_key.to(tl.float32) * inverse_key_scale, LARGEST_VALUE)
            new_value = clamp_to_float8(new_value.to(tl.float32) * inverse_value_scale, LARGEST_VALUE)
        tl.store(key_cache + slot * ROW + offsets, new_key.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(value_cache + slot * ROW + offsets, new_value.to(value_cache.dtype.element_ty), mask=inside)


def reshape_and_cache_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> None:
    """Launch the kernel. Shapes must have been checked. The caches must be contiguous."""
    num_tokens, num_kv_heads, head_size = key.shape
    row = num_kv_heads * head_size
    key, value = (x if x.stride()[1:] == (head_size, 1) else x.contiguous() for x in (key, value))
    if num_tokens == 0:
        return
    block = next_power_of_2(row)
    _reshape_and_cache[(num_tokens,)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        key.stride(0),
        value.stride(0),
        1.0 / key_scale,
        1.0 / value_scale,
        ROW=row,
        BLOCK=block,
        LARGEST_VALUE=LARGEST.get(key_cache.dtype),
        num_warps=4 if block <= 2048 else 8,
    )


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
    is_padded: bool = False,
) -> None:
    """Scatter key and value by slot. On the CPU, `is_padded` must be set if slots may be negative.

    Raises:
        ValueError: shapes or dtypes do not match.
    """
    if key.shape != value.shape or key.shape[1:] != key_cache.shape[2:] or slot_mapping.shape != key.shape[:1]:
        raise ValueError(
            f"reshape_and_cache: key {list(key.shape)}, value {list(value.shape)}, cache {list(key_cache.shape)}, "
            f"slot_mapping {list(slot_mapping.shape)} do not fit together"
        )
    if key_cache.dtype not in CACHE_DTYPES:
        raise ValueError(f"reshape_and_cache: key is {key.dtype}, the cache holds {key_cache.dtype}")
    if key.is_cuda:
        reshape_and_cache_triton(
            key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale
        )
    else:
        write = reshape_and_cache_reference if is_padded else reshape_and_cache_cpu
        write(key, value, key_cache, value_cache, slot_mapping, key_scale=key_scale, value_scale=value_scale)

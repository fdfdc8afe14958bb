"""Rotary position embedding:  each pair (x[2i], x[2i+1]) is rotated by position * frequency_i   (arXiv:2104.09864).

x        [num_tokens, num_heads, head_size]  fp32 | bf16 | fp16, pairs interleaved (adjacent)
rotation [num_tokens, head_size // 2]        complex64: cos + i sin of each token's angles, scaled by the rope's factor
y        like x, contiguous.  Computed in fp32, rounded once.

Checkpoints in the transformers format pair x[i] with x[i + head_size/2]; the model permutes the rows of its q and k
projections once at load (`interleave_pairs`), because adjacent pairs rotate in one complex multiplication. Dot products
of q and k do not change if both have the same permutation.
Memory-bound: 2 * num_tokens * num_heads * head_size * itemsize bytes. Source: own.
"""

import torch

from trimtab_kernels.launch.jit import cdiv, kernel, next_power_of_2, tl

BLOCK_ELEMENTS = 2048
"""Elements of one CTA: 16 heads of 128, two 16-byte vector loads per thread with 4 warps and 2 bytes per value."""


def rotary_embedding_reference(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Return the definition in real arithmetic, float32."""
    wide = x.float()
    cos, sin = rotation.real.unsqueeze(1), rotation.imag.unsqueeze(1)
    even, odd = wide[..., 0::2], wide[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotary_embedding_complex(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Compute the rotation as one complex multiplication."""
    num_tokens, num_heads, head_size = x.shape
    pairs = torch.view_as_complex(x.float().view(num_tokens, num_heads, head_size // 2, 2))
    turned = torch.view_as_real(pairs * rotation.unsqueeze(1)).view(num_tokens, num_heads, head_size)
    return turned if x.dtype == torch.float32 else turned.to(x.dtype)


def interleave_pairs(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Reorder the rows [num_heads * head_size, ...] of a projection: pairs (i, i + head_size/2) become adjacent."""
    rest = weight.shape[1:]
    return weight.view(-1, 2, head_size // 2, *rest).transpose(1, 2).reshape(weight.shape)


@kernel()
def _rotary_embedding(
    x: tl.tensor,
    rotation: tl.tensor,
    y: tl.tensor,
    x_stride: tl.tensor,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Program (token, group of HEADS heads). BLOCK is SIZE padded to a power of two.

    Adjacent pairs are split and joined in registers, so memory sees whole rows:
    ```
    row   | e0 o0 | e1 o1 | e2 o2 | ...      rotation  | c0 s0 | c1 s1 | c2 s2 | ...
    ```
    """
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    inside = (heads < NUM_HEADS)[:, None] & (columns < SIZE)[None, :]
    offsets = heads[:, None] * SIZE + columns[None, :]
    tile = tl.load(x + token * x_stride + offsets, mask=inside, other=0.0)
    turns = tl.load(rotation + token * SIZE + columns, mask=columns < SIZE, other=0.0)
    even, odd = tl.split(tl.reshape(tile.to(tl.float32), (HEADS, BLOCK // 2, 2)))
    cos, sin = tl.split(tl.reshape(turns, (BLOCK // 2, 2)))
    turned_even = even * cos[None, :] - odd * sin[None, :]
    turned_odd = odd * cos[None, :] + even * sin[None, :]
    turned = tl.reshape(tl.join(turned_even, turned_odd), (HEADS, BLOCK))
    tl.store(y + token * NUM_HEADS * SIZE + offsets, turned.to(tile.dtype), mask=inside)


def rotary_embedding_triton(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Launch the kernel. Shapes must have been checked. x may have any token stride; heads that are not contiguous are
    copied first.
    """
    num_tokens, num_heads, size = x.shape
    x = x if x.stride()[1:] == (size, 1) else x.contiguous()
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if num_tokens == 0:
        return y
    block = next_power_of_2(size)
    heads = min(next_power_of_2(num_heads), max(1, BLOCK_ELEMENTS // block))
    _rotary_embedding[(num_tokens, cdiv(num_heads, heads))](
        x,
        torch.view_as_real(rotation),
        y,
        x.stride(0),
        NUM_HEADS=num_heads,
        SIZE=size,
        HEADS=heads,
        BLOCK=block,
        num_warps=4,
    )
    return y


def rotary_embedding(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Rotate every head of x by its token's rotation.

    Raises:
        ValueError: shapes do not match.
    """
    num_tokens, _, head_size = x.shape
    if head_size % 2 or rotation.shape != (num_tokens, head_size // 2):
        raise ValueError(
            f"rotary_embedding: x is {list(x.shape)}, rotation is {list(rotation.shape)}; "
            f"head_size must be even and rotation [num_tokens, head_size // 2]"
        )
    return rotary_embedding_triton(x, rotation) if x.is_cuda else rotary_embedding_complex(x, rotation)

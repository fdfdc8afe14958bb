"""Rotary position embedding:  each pair (x[2i], x[2i+1]) turns by position * frequency_i   (arXiv:2104.09864).

x        [num_tokens, num_heads, head_size]  fp32 | bf16 | fp16, pairs interleaved (adjacent)
rotation [num_tokens, head_size // 2]        complex64: cos + i sin of each token's angles, scaled by the rope's factor
y        like x, contiguous.  Computed in fp32, rounded once.

Checkpoints in the transformers format pair x[i] with x[i + head_size/2]; the model permutes the rows of its q and k
projections once at load (`interleave_pairs`), because adjacent pairs turn in one complex product. Dot products of q
and k do not change under a permutation that both share.
Bound by memory: 2 * num_tokens * num_heads * head_size * itemsize bytes. Source: own.
"""

import torch


def rotary_embedding_reference(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """The definition in real arithmetic, float32."""
    wide = x.float()
    cos, sin = rotation.real.unsqueeze(1), rotation.imag.unsqueeze(1)
    even, odd = wide[..., 0::2], wide[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotary_embedding_complex(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """The same as one complex product."""
    num_tokens, num_heads, head_size = x.shape
    pairs = torch.view_as_complex(x.float().view(num_tokens, num_heads, head_size // 2, 2))
    turned = torch.view_as_real(pairs * rotation.unsqueeze(1)).view(num_tokens, num_heads, head_size)
    return turned if x.dtype == torch.float32 else turned.to(x.dtype)


def interleave_pairs(weight: torch.Tensor, head_size: int) -> torch.Tensor:
    """Reorder rows [num_heads * head_size, ...] of a projection: pairs (i, i + head_size/2) become adjacent."""
    rest = weight.shape[1:]
    return weight.view(-1, 2, head_size // 2, *rest).transpose(1, 2).reshape(weight.shape)


def rotary_embedding(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    """Turn every head of x by its token's rotation. Raises ValueError where shapes do not fit."""
    num_tokens, _, head_size = x.shape
    if head_size % 2 or rotation.shape != (num_tokens, head_size // 2):
        raise ValueError(
            f"rotary_embedding: x is {list(x.shape)}, rotation is {list(rotation.shape)}; "
            f"head_size must be even and rotation [num_tokens, head_size // 2]"
        )
    return rotary_embedding_complex(x, rotation)

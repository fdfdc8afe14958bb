"""RMS normalisation:  y = x / sqrt(mean(x^2) + eps) * weight   (Zhang & Sennrich 2019, arXiv:1910.07467).

x       [num_tokens, hidden_size]  fp32 | bf16 | fp16
weight  [hidden_size]              dtype of x
y       like x.  The mean and rsqrt are taken in fp32; the normalised value is rounded to x's dtype before the product
        with the weight, as transformers does.
Bound by memory: 2 * num_tokens * hidden_size * itemsize bytes. Source: own.
"""

import torch
import torch.nn.functional as F


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The definition in plain torch, computed in float32."""
    wide = x.float()
    normalised = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps)
    return normalised.to(x.dtype) * weight


def rms_norm_cpu(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """float32 only: torch's own composite, which saves the dispatch of single operators (dominant for few rows)."""
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Normalise the rows of x. Raises ValueError where shapes or dtypes do not fit."""
    if weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        raise ValueError(
            f"rms_norm: weight is {list(weight.shape)} {weight.dtype}, x is {list(x.shape)} {x.dtype}; "
            f"weight must be [{x.shape[-1]}] of x's dtype"
        )
    if x.dtype == torch.float32 and x.device.type == "cpu":
        return rms_norm_cpu(x, weight, eps)
    return rms_norm_reference(x, weight, eps)

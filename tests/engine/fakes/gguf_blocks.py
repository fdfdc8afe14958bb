"""Matrices in all GGUF types, including 256-element blocks that the gguf library can only read."""

import gguf
import numpy
import torch

LARGE = {"Q4_K": ((0, 4e-4), (2, 3e-3)), "Q5_K": ((0, 2e-4), (2, 3.1e-3)), "Q6_K": ((208, 7e-5),)}
"""float16 positions of these blocks, and values that make random weights about 0.1."""


def stored_matrix(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> numpy.ndarray:
    """[rows, bytes] uint8 of random weights, or numbers of a type that is not quantised."""
    type_ = gguf.GGMLQuantizationType[kind]
    if kind not in LARGE:
        stored: numpy.ndarray = gguf.quants.quantize(torch.randn(shape, generator=generator).numpy() * 0.1, type_)
        return stored
    numbers, block_bytes = gguf.GGML_QUANT_SIZES[type_]
    count = shape[0] * (shape[1] // numbers)
    blocks = torch.randint(256, (count, block_bytes), dtype=torch.uint8, generator=generator)
    for place, factor in LARGE[kind]:
        factors = (torch.rand(count, 1, generator=generator) + 0.5) * factor
        blocks[:, place : place + 2] = factors.half().view(torch.uint8)
    return blocks.view(shape[0], -1).numpy()

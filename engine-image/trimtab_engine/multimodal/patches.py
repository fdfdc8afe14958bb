"""A image's pixels as rows of patches, and the numbers that a vision encoder reads of them."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trimtab_engine.multimodal.items import Patches
from trimtab_engine.multimodal.processor_settings import NUM_LEVELS


def cut_into_rows(
    pixels: NDArray[np.uint8], *, patch_size: int, merge_size: int, frames_per_patch: int
) -> NDArray[np.uint8]:
    """Return patches [num_patches, channels * frames * patch * patch], those of one token next to each other. pixels
    [images, height, width, channels]: sides and number must be multiples of a token's.
    """
    pictures, height, width, channels = pixels.shape
    patch, merge, frames = patch_size, merge_size, frames_per_patch
    tall, wide = height // patch // merge, width // patch // merge
    # [t, f, h/m, m, p, w/m, m, p, c] -> [t, h/m, w/m, m, m, c, f, p, p]
    cut = pixels.reshape(pictures // frames, frames, tall, merge, patch, wide, merge, patch, channels)
    ordered = cut.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7)
    return np.ascontiguousarray(ordered).reshape(-1, channels * frames * patch**2)


def meanings_of(mean: Sequence[float], std: Sequence[float], rescale_factor: float) -> NDArray[np.float32]:
    """Return [channels, 256] float32: the encoder's input for each 8-bit value, rounded as transformers does."""
    levels = (np.arange(NUM_LEVELS, dtype=np.float64) * rescale_factor).astype(np.float32)
    means, deviations = (np.array(each, dtype=np.float32)[:, None] for each in (mean, std))
    return np.asarray((levels[None, :] - means) / deviations, dtype=np.float32)


def as_float32(patches: Patches) -> NDArray[np.float32]:
    """[num_rows, row_size] float32 of patches that are whole: each value's meaning in its channel."""
    channels = patches.num_channels
    meanings = np.frombuffer(patches.meanings, dtype="<f4").reshape(channels, NUM_LEVELS)
    values = np.frombuffer(patches.values, dtype=np.uint8).reshape(patches.num_rows, channels, -1)
    rows = np.empty(values.shape, dtype=np.float32)
    for channel in range(channels):
        np.take(meanings[channel], values[:, channel], out=rows[:, channel], mode="clip")
    return rows.reshape(patches.num_rows, patches.row_size)

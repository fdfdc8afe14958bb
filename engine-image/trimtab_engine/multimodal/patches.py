"""The numbers that a tower reads of an item's patches."""

import numpy as np
from numpy.typing import NDArray

from trimtab_engine.multimodal.items import Patches

NUM_LEVELS = 256


def as_float32(patches: Patches) -> NDArray[np.float32]:
    """[num_rows, row_size] float32 of patches that are whole: each value's meaning in its channel."""
    channels = patches.num_channels
    meanings = np.frombuffer(patches.meanings, dtype="<f4").reshape(channels, NUM_LEVELS)
    values = np.frombuffer(patches.values, dtype=np.uint8).reshape(patches.num_rows, channels, -1)
    rows = np.empty(values.shape, dtype=np.float32)
    for channel in range(channels):
        np.take(meanings[channel], values[:, channel], out=rows[:, channel], mode="clip")
    return rows.reshape(patches.num_rows, patches.row_size)

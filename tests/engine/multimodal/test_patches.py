"""Conversion of 8-bit values to the encoder's input with each channel's table."""

import numpy as np
from trimtab_engine.multimodal.items import Patches
from trimtab_engine.multimodal.patches import as_float32


def test_each_value_is_what_its_channel_s_table_says() -> None:
    meanings = np.arange(2 * 256, dtype="<f4").reshape(2, 256) / 7
    values = np.array([[0, 255, 3, 4], [9, 8, 255, 0]], dtype=np.uint8)  # a channel's two values are adjacent
    rows = as_float32(Patches(4, values.tobytes(), meanings.tobytes()))
    expected = [[meanings[0, 0], meanings[0, 255], meanings[1, 3], meanings[1, 4]]]
    expected += [[meanings[0, 9], meanings[0, 8], meanings[1, 255], meanings[1, 0]]]
    assert rows.dtype == np.float32
    assert np.array_equal(rows, np.array(expected, dtype=np.float32))

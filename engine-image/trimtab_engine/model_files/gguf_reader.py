"""gguf-py's reader with checks that it lacks: it slices silently beyond the end of a file, and reads an array of 2^40
values for ever.
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, GGUFValueType

from trimtab_engine.errors import ModelError, one_line

ARRAY_HEAD_BYTES = 12  # type of the elements, 32 bits, and their number, 64 bits
DAMAGE = (OSError, ValueError, KeyError, IndexError, TypeError, OverflowError, RecursionError)


class _BoundedReader(GGUFReader):
    def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
        end = offset + int(count) * np.dtype(dtype).itemsize
        if end > len(self.data):
            raise ValueError(f"{len(self.data)} bytes of {end}")
        return super()._get(offset, dtype, count, override_order)

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == GGUFValueType.ARRAY:
            count = int(self._get(orig_offs + 4, np.uint64)[0])
            if count > len(self.data) - orig_offs - ARRAY_HEAD_BYTES:  # an element has one byte at least
                raise ValueError(f"an array of {count} values is longer than the file")
        return super()._get_field_parts(orig_offs, raw_type)


def open_gguf(file: Path) -> GGUFReader:
    """Return a reader of the file's metadata and tensors. Nothing writes to its mapping.

    Raises:
        ModelError: The file is truncated, damaged or no GGUF file.
    """
    try:
        return _BoundedReader(file, "c")
    except DAMAGE as error:
        reason = one_line(error)[:200]
        raise ModelError(f"{file}: is truncated or no GGUF file: {reason}; download the file again") from None

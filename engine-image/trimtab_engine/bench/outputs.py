"""Output files of a measurement: complete, or unchanged. The disk may have become full during the measurement."""

import contextlib
from pathlib import Path

from trimtab_engine.errors import TrimtabError


def write_file(path: Path, content: bytes) -> None:
    """Write a file. Raises TrimtabError on failure; an existing file then keeps its content."""
    before = path.read_bytes() if path.is_file() else None
    is_new = not path.exists()
    try:
        path.write_bytes(content)
    except OSError as error:
        with contextlib.suppress(OSError):
            if before is not None:
                path.write_bytes(before)  # truncating has freed its space
            elif is_new:
                path.unlink(missing_ok=True)
        raise TrimtabError(
            f"{path}: cannot write the file: {error.strerror}; free space or set another path, then repeat the "
            f"measurement"
        ) from None

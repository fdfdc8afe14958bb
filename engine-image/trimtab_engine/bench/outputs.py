"""What a measurement leaves in files: whole, or as it was before. A disk may have become full while it ran."""

import contextlib
from pathlib import Path

from trimtab_engine.errors import TrimtabError


def write_file(path: Path, content: bytes) -> None:
    """Write a file. Raises TrimtabError where that fails; a file that was there then has what it had."""
    before = path.read_bytes() if path.is_file() else None
    is_new = not path.exists()
    try:
        path.write_bytes(content)
    except OSError as error:
        with contextlib.suppress(OSError):
            if before is not None:
                path.write_bytes(before)  # truncated it has given back its room
            elif is_new:
                path.unlink(missing_ok=True)
        raise TrimtabError(
            f"{path}: cannot be written: {error.strerror}; make room, or name another place, and measure again"
        ) from None

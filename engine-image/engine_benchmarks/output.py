"""Output of a measured page: a missing folder must not lose its figures."""

from pathlib import Path


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path`, creating missing folders.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

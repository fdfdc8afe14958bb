"""Canonical JSON for comparing, hashing and signing. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def compact(value: Mapping[str, Any]) -> str:
    """Return the canonical JSON of a value: equal values have equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))

"""JSON in one spelling per value: for what is compared, hashed or signed. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def compact(value: Mapping[str, Any]) -> str:
    """Equal values, equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))

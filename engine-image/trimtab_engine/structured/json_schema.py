"""Adaptation of clients' JSON schemas to llguidance, which rejects formats and bounds that JSON Schema allows.

An adapted schema never matches text that the client's schema rejects.
"""

import json
from typing import Any

ENFORCED_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown")
)
"""Formats that llguidance enforces. By JSON Schema 2020-12, all others are annotations."""
SCHEMA_MAPS = frozenset(
    ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
)  # keywords whose value maps names to schemas; a name may equal a keyword
DATA = frozenset(("const", "enum", "default", "examples"))  # keywords whose value is data, not a schema
MAX_BOUND = 2**63 - 1024  # the largest number that is exact as a double and below int64's maximum
MAX_INT64 = 2**63 - 1
MAX_LENGTH = 2**32 - 1  # of a string in llguidance; longer than any output


def read_enforceable_schema(text: str) -> Any:
    """Return the schema that llguidance enforces: without unknown formats, and with bounds that it supports.

    Raises:
        ValueError: The text is not JSON.
    """
    return _adapt_schema(json.loads(text))


def _adapt_schema(node: Any) -> Any:
    if isinstance(node, list):
        return [_adapt_schema(item) for item in node]
    if not isinstance(node, dict):
        return node
    adapted = {}
    for key, value in node.items():
        if key == "format" and isinstance(value, str) and value not in ENFORCED_FORMATS:
            continue
        if key in DATA:
            adapted[key] = value
        elif key in SCHEMA_MAPS and isinstance(value, dict):
            adapted[key] = {name: _adapt_schema(item) for name, item in value.items()}
        elif isinstance(value, int | float) and not isinstance(value, bool):
            adapted[key] = _narrow_bound(key, value, allows_fractions=_allows_fractions(node))
        else:
            adapted[key] = _adapt_schema(value)
    return adapted


def _allows_fractions(node: dict[str, Any]) -> bool:
    types = node.get("type", "number")
    return types == "number" or (isinstance(types, list) and "number" in types)


def _narrow_bound(keyword: str, value: float, *, allows_fractions: bool) -> float:
    """Return the bound, or the nearest narrower one that llguidance supports."""
    match keyword:
        case "minimum" | "exclusiveMinimum":
            return max(value, -MAX_BOUND)
        case "maximum" | "exclusiveMaximum":
            return min(value, MAX_BOUND if allows_fractions else MAX_INT64)
        case "maxLength" | "maxItems" | "maxProperties":
            return min(value, MAX_LENGTH)
    return value

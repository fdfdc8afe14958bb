"""Bounds on untrusted objects, checked before anything expensive is done with them."""

from __future__ import annotations

from collections.abc import Sequence

MAX_SPEC_VALUES = 20_000  # objects, lists and scalars; a pod template with 1,000 environment variables has about 4,000
MAX_SPEC_DEPTH = 64
MAX_FINDINGS = 20  # per response: more are not read, and each costs a search for similar names
MAX_FINDING_LENGTH = 1_000  # characters


def size_error(spec: object) -> str | None:
    """Return why a spec is too large to validate, or None. The cost is bounded for any input."""
    count = 0
    level: list[object] = [spec]
    for _ in range(MAX_SPEC_DEPTH):
        if not level:
            return None
        count += len(level)
        below: list[object] = []
        for value in level:
            if not isinstance(value, dict | list):
                continue
            if count + len(below) + len(value) > MAX_SPEC_VALUES:
                return f"has more than {MAX_SPEC_VALUES:,} values; remove some"
            below.extend(value.values() if isinstance(value, dict) else value)
        level = below
    return f"is nested more than {MAX_SPEC_DEPTH} levels deep; flatten it" if level else None


def cap_findings(findings: Sequence[str]) -> list[str]:
    """Return at most MAX_FINDINGS messages of bounded length, the last of which counts the others."""
    kept = [shorten(finding) for finding in findings[:MAX_FINDINGS]]
    omitted = len(findings) - len(kept)
    return [*kept, f"{omitted:,} more errors are not listed"] if omitted else kept


def shorten(text: str, *, most: int = MAX_FINDING_LENGTH) -> str:
    """Return the text with at most `most` characters; an ellipsis marks a cut."""
    return text if len(text) <= most else f"{text[: most - 1]}…"

"""Sizes in plain bytes or as a Kubernetes quantity, such as 1500Mi or 2G."""

import re
from fractions import Fraction

UNITS = {
    "": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40,
}  # fmt: skip
MAX_DIGITS = 40  # no realistic size has more


def parse_quantity(text: str) -> int | None:
    """Return bytes, rounded down. None if the text is not a size."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(k|M|G|T|Ki|Mi|Gi|Ti|)", text, re.ASCII)
    return int(Fraction(match.group(1)) * UNITS[match.group(2)]) if match and len(text) <= MAX_DIGITS else None

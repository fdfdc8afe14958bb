"""Parsing of Kubernetes quantities and durations. Pure, exact, without a client library."""

from __future__ import annotations

import re
from decimal import Decimal

_QUANTITY = re.compile(r"([+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+))(Ki|Mi|Gi|Ti|Pi|Ei|[numkMGTPE]|[eE][+-]?[0-9]{1,2})?")
_BINARY = {"Ki": 1, "Mi": 2, "Gi": 3, "Ti": 4, "Pi": 5, "Ei": 6}  # powers of 1024
_DECIMAL = {"n": -3, "u": -2, "m": -1, "": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5, "E": 6}  # powers of 1000
_DURATION = re.compile(r"^(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?$")
_FINE = re.compile(r"^(\d+)(us|ms)$")


def parse_quantity(text: str | float) -> Decimal:
    """Parse a Kubernetes quantity, such as `1500Mi` → 1572864000.

    Raises:
        ValueError: The text is not a quantity.
    """
    found = _QUANTITY.fullmatch(str(text))
    if not found:
        raise ValueError(f"{text!r} is not a Kubernetes quantity such as 500m, 4Gi or 1500Mi")
    number, suffix = Decimal(found[1]), found[2] or ""
    if suffix in _BINARY:
        return number * Decimal(1024) ** _BINARY[suffix]
    if suffix in _DECIMAL:
        return number * Decimal(1000) ** _DECIMAL[suffix]
    return number * Decimal(10) ** int(suffix[1:])


def is_same_quantity(a: str | float, b: str | float) -> bool:
    """Return True if both are equal quantities, such as `1000m` and `1`. False if one is not a quantity."""
    try:
        return parse_quantity(a) == parse_quantity(b)
    except ValueError:
        return False


def canonical_quantity(text: str) -> str:
    """Return the shortest usual spelling of a quantity: `1000m` → 1, `8192Mi` → 8Gi, `8589934592` → 8Gi.

    Raises:
        ValueError: The text is not a quantity.
    """
    value = parse_quantity(text)
    if value != value.to_integral_value():
        scaled = ((suffix, value.scaleb(digits)) for suffix, digits in (("m", 3), ("u", 6), ("n", 9)))
        return next((f"{n:f}".partition(".")[0] + suffix for suffix, n in scaled if n == n.to_integral_value()), text)
    number, suffix = int(value), ""
    if number and number % (1 << 20) == 0:
        for suffix in reversed(_BINARY):
            if number % 1024 ** _BINARY[suffix] == 0:
                number //= 1024 ** _BINARY[suffix]
                break
    return f"{number}{suffix}"


def canonical_duration(text: str) -> str:
    """Return the usual spelling of a duration: `60s` → 1m, `2000us` → 2ms.

    Raises:
        ValueError: The text is not a duration.
    """
    microseconds = round(parse_seconds(text) * 1_000_000)
    if microseconds % 1000:
        return f"{microseconds}us"
    if microseconds % 1_000_000:
        return f"{microseconds // 1000}ms"
    minutes, seconds = divmod(microseconds // 1_000_000, 60)
    hours, minutes = divmod(minutes, 60)
    parts = (f"{number}{unit}" for number, unit in ((hours, "h"), (minutes, "m"), (seconds, "s")) if number)
    return "".join(parts) or text  # zero, which most fields reject by the spelling of the user


def canonical_fraction(text: str) -> str:
    """Return a fraction without trailing zeros: `0.90` → 0.9."""
    return text.rstrip("0").rstrip(".") if text.strip("0.") else "0.0"


def parse_seconds(text: str) -> float:
    """Parse a duration such as `90s`, `1m30s`, `2h`, `500ms` or `125us` to seconds.

    Raises:
        ValueError: The text is not a duration.
    """
    fine = _FINE.match(text)
    if fine:
        return int(fine[1]) / (1_000_000 if fine[2] == "us" else 1000)
    found = _DURATION.match(text)
    if not found or not text:
        raise ValueError(f"{text!r} is not a duration such as 500ms, 30s or 1m30s")
    hours, minutes, seconds = (int(part or 0) for part in found.groups())
    return hours * 3600.0 + minutes * 60.0 + seconds

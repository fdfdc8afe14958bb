"""Kubernetes quantities and durations."""

from __future__ import annotations

from decimal import Decimal

import pytest
from trimtab_operator.resource.quantity import is_same_quantity, parse_quantity, parse_seconds


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1500Mi", 1572864000),
        ("500m", Decimal("0.5")),
        ("1e3", 1000),
        ("2", 2),
        (2, 2),
        ("0.5Gi", 536870912),
        ("1k", 1000),
    ],
)
def test_quantities_are_exact(text: str | int, value: Decimal | int) -> None:
    assert parse_quantity(text) == value


@pytest.mark.parametrize("text", ["", "x", "1 Gi", "1KiB", "--1"])
def test_nonsense_is_no_quantity(text: str) -> None:
    with pytest.raises(ValueError, match="not a Kubernetes quantity"):
        parse_quantity(text)


def test_is_same_quantity_ignores_spelling() -> None:
    assert is_same_quantity("1000m", "1")
    assert not is_same_quantity("1000m", "2")
    assert not is_same_quantity("x", "x")


@pytest.mark.parametrize(
    ("text", "seconds"), [("30s", 30), ("1m30s", 90), ("2h", 7200), ("500ms", 0.5), ("125us", 0.000125)]
)
def test_durations(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5", "1.5s"])
def test_nonsense_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_seconds(text)

"""Kubernetes quantities and durations."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from operator_cluster import FakeCluster
from trimtab_operator.resource.quantity import (
    canonical_duration,
    canonical_fraction,
    canonical_quantity,
    is_same_quantity,
    parse_quantity,
    parse_seconds,
)


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


@pytest.mark.parametrize(
    ("spellings", "canonical"),
    [
        (("1", "1000m", "1.0", "1e0"), "1"),
        (("8Gi", "8192Mi", "8589934592", "8388608Ki"), "8Gi"),
        (("1G", "1000M", "1000000000"), "1000000000"),
        (("0.5", "500m", ".5"), "500m"),
        (("1.5Gi", "1536Mi"), "1536Mi"),
        (("0", "0Gi", "0m"), "0"),
        (("100u", "0.1m", "0.0001"), "100u"),
    ],
)
def test_equal_quantities_have_one_spelling(spellings: tuple[str, ...], canonical: str) -> None:
    assert {canonical_quantity(text) for text in spellings} == {canonical}


@given(st.integers(0, 10**15), st.sampled_from(["", "m", "k", "M", "G", "T", "Ki", "Mi", "Gi", "Ti"]))
def test_canonical_quantity_is_equal_and_final(number: int, suffix: str) -> None:
    text = f"{number}{suffix}"
    canonical = canonical_quantity(text)
    assert is_same_quantity(canonical, text)
    assert canonical_quantity(canonical) == canonical


@pytest.mark.parametrize(
    ("spellings", "canonical"),
    [
        (("60s", "1m", "60000ms"), "1m"),
        (("90m", "1h30m", "5400s"), "1h30m"),
        (("250ms",), "250ms"),
        (("2000us", "2ms"), "2ms"),
    ],
)
def test_equal_durations_have_one_spelling(spellings: tuple[str, ...], canonical: str) -> None:
    assert {canonical_duration(text) for text in spellings} == {canonical}
    assert parse_seconds(canonical) == parse_seconds(spellings[0])


@pytest.mark.parametrize(
    ("text", "canonical"), [("0.90", "0.9"), ("0.9", "0.9"), ("1.0", "1"), ("1", "1"), ("0.00", "0.0")]
)
def test_equal_fractions_have_one_spelling(text: str, canonical: str) -> None:
    assert canonical_fraction(text) == canonical


def with_requests(**amounts: str) -> dict[str, Any]:
    return {"template": {"spec": {"containers": [{"name": "main", "resources": {"requests": amounts}}]}}}


RESPELLED: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"engine": {"swapSpace": "4Gi"}}, {"engine": {"swapSpace": "4096Mi"}}),
    ({"engine": {"gpuMemoryUtilization": "0.9"}}, {"engine": {"gpuMemoryUtilization": "0.90"}}),
    ({"rollout": {"drainTimeout": "60s"}}, {"rollout": {"drainTimeout": "1m"}}),
    (with_requests(cpu="1", memory="8Gi"), with_requests(cpu="1000m", memory="8192Mi")),
    (
        {"template": {"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "2Gi"}}]}}},
        {"template": {"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimit": "2048Mi"}}]}}},
    ),
]


@pytest.mark.parametrize(("before", "after"), RESPELLED)
def test_respelled_amount_restarts_nothing(before: dict[str, Any], after: dict[str, Any]) -> None:
    cluster = FakeCluster(**before)
    cluster.settle()
    pods = {pod["metadata"]["uid"] for pod in cluster.pods.values()}
    cluster.edit(**after)
    cluster.settle()
    assert {pod["metadata"]["uid"] for pod in cluster.pods.values()} == pods

"""Drift between rendered and live manifests."""

from __future__ import annotations

from trimtab_operator.builders.drift import first_difference


def test_fields_added_by_api_server_are_no_drift() -> None:
    wanted = {"limits": {"cpu": "1000m", "memory": "1024Mi"}, "env": [{"name": "A", "value": ""}], "list": []}
    present = {"limits": {"cpu": "1", "memory": "1Gi"}, "env": [{"name": "A"}, {"name": "B"}], "uid": "x"}
    assert first_difference({"resources": wanted}, {"resources": present}) is None


def test_an_amount_that_is_written_as_a_number_is_no_drift() -> None:
    """`cpu: 0.5` without quotes is a number in YAML; the API server stores 500m."""
    wanted, present = {"limits": {"cpu": 0.5}}, {"limits": {"cpu": "500m"}}
    assert first_difference({"resources": wanted}, {"resources": present}) is None

"""The e2e validation scenarios hold on every Kubernetes, whether the CRD's rules or the webhook reject first."""

from __future__ import annotations

from typing import Any

import pytest
from crd_rules import cel_refusals, with_defaults
from harness.deployment import sample
from harness.rejected_specs import REJECTED, WITHOUT_WEBHOOK
from trimtab_operator.planning.admission import validation_messages

Case = tuple[str, dict[str, Any], tuple[str, ...]]


def make_resource(changes: dict[str, Any]) -> dict[str, Any]:
    resource: dict[str, Any] = with_defaults(sample("refused", image="engine:1", **changes))
    return resource


@pytest.mark.parametrize("case", REJECTED, ids=[case[0] for case in REJECTED])
def test_webhook_and_crd_rules_give_expected_messages(case: Case) -> None:
    """From Kubernetes 1.25 on the API server evaluates the CRD's rules before it calls the webhook."""
    _, changes, parts = case
    by_webhook = "; ".join(validation_messages(make_resource(changes), default_image=None))
    by_rules = "; ".join(cel_refusals(make_resource(changes)))
    for message in (by_webhook, by_rules or by_webhook):
        assert [part for part in parts if part not in message] == [], message


def test_crd_rules_accept_specs_of_scenarios_without_webhook() -> None:
    """These scenarios apply resources that only the reconciler rejects, so the API server must accept them."""
    changes = {name: changes for name, changes, _ in REJECTED}
    for name in WITHOUT_WEBHOOK:
        assert cel_refusals(make_resource(changes[name])) == []

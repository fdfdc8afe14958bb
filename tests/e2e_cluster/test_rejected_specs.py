"""The stories of refusals hold on every Kubernetes: where the CRD's rules refuse first, and where the webhook does."""

from __future__ import annotations

from typing import Any

import pytest
from crd_rules import cel_refusals, with_defaults
from harness.deployment import sample
from harness.rejected_specs import REJECTED, WITHOUT_WEBHOOK
from trimtab_operator.planning.admission import validation_messages

Story = tuple[str, dict[str, Any], tuple[str, ...]]


def a_resource(changes: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = with_defaults(sample("refused", image="engine:1", **changes))
    return made


@pytest.mark.parametrize("story", REJECTED, ids=[story[0] for story in REJECTED])
def test_who_refuses_first_says_what_the_story_expects(story: Story) -> None:
    """From Kubernetes 1.25 on the API server judges by the CRD's rules before it asks the webhook."""
    _, changes, says = story
    by_webhook = "; ".join(validation_messages(a_resource(changes), default_image=None))
    by_rules = "; ".join(cel_refusals(a_resource(changes)))
    for message in (by_webhook, by_rules or by_webhook):
        assert [part for part in says if part not in message] == [], message


def test_what_the_loop_says_without_a_webhook_is_left_to_it_by_the_rules() -> None:
    """Those stories apply a resource that is refused later, so the API server must take it."""
    changes = {name: changes for name, changes, _ in REJECTED}
    for name in WITHOUT_WEBHOOK:
        assert cel_refusals(a_resource(changes[name])) == []

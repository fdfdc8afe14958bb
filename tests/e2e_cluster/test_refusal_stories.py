"""The stories of refusals hold on every Kubernetes: where the CRD's rules refuse first, and where the webhook does."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
from crd_rules import cel_refusals, with_defaults
from harness.deployment import sample
from trimtab_operator.decisions.admission import refusals_of

STORIES = Path(__file__).parents[2] / "e2e" / "test_refusals.py"
Story = tuple[str, dict[str, Any], tuple[str, ...]]


def told_in(name: str) -> Any:
    """The value of a constant of the stories, which are not imported: they need a cluster."""
    for node in ast.parse(STORIES.read_text()).body:
        target = (
            node.target
            if isinstance(node, ast.AnnAssign)
            else node.targets[0]
            if isinstance(node, ast.Assign)
            else None
        )
        if isinstance(target, ast.Name) and target.id == name and isinstance(node, ast.Assign | ast.AnnAssign):
            assert node.value is not None
            return ast.literal_eval(node.value)
    raise AssertionError(f"{STORIES} has no {name}")


REFUSED: list[Story] = told_in("REFUSED")


def a_resource(changes: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = with_defaults(sample("refused", image="engine:1", **changes))
    return made


@pytest.mark.parametrize("story", REFUSED, ids=[story[0] for story in REFUSED])
def test_who_refuses_first_says_what_the_story_expects(story: Story) -> None:
    """From Kubernetes 1.25 on the API server judges by the CRD's rules before it asks the webhook."""
    _, changes, says = story
    by_webhook = "; ".join(refusals_of(a_resource(changes), default_image=None))
    by_rules = "; ".join(cel_refusals(a_resource(changes)))
    for message in (by_webhook, by_rules or by_webhook):
        assert [part for part in says if part not in message] == [], message


def test_what_the_loop_says_without_a_webhook_is_left_to_it_by_the_rules() -> None:
    """Those stories apply a resource that is refused later, so the API server must take it."""
    changes = {name: changes for name, changes, _ in REFUSED}
    for name in told_in("WITHOUT_WEBHOOK"):
        assert cel_refusals(a_resource(changes[name])) == []

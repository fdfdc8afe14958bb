"""What the operator keeps in ConfigMaps is believed only if it has signed it, and only as what it is."""

from __future__ import annotations

import json

import pytest
from trimtab_operator.resource.signed_text import opened, sealed


def test_what_was_sealed_is_opened_with_the_same_key_and_name_alone() -> None:
    text = sealed("body", key="k", kind="tuning")
    assert opened(text, key="k", kind="tuning") == "body"
    assert opened(text, key="other", kind="tuning") is None
    assert opened(text, key="k", kind="rollout") is None


def test_a_body_that_was_changed_is_not_believed() -> None:
    outer = json.loads(sealed("body", key="k", kind="tuning"))
    assert opened(json.dumps({**outer, "state": "another"}), key="k", kind="tuning") is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "[" * 100_000, '{"signature": "x"}', '{"state": "body"}'])
def test_what_is_no_sealed_text_is_nothing(text: str | None) -> None:
    assert opened(text, key="k", kind="tuning") is None

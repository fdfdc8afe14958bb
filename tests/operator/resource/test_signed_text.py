"""Signed text in ConfigMaps, valid only with the same key and kind."""

from __future__ import annotations

import json

import pytest
from trimtab_operator.resource.signed_text import sign, verify


def test_verify_needs_same_key_and_kind() -> None:
    text = sign("body", key="k", kind="tuning")
    assert verify(text, key="k", kind="tuning") == "body"
    assert verify(text, key="other", kind="tuning") is None
    assert verify(text, key="k", kind="rollout") is None


def test_a_body_that_was_changed_is_not_believed() -> None:
    outer = json.loads(sign("body", key="k", kind="tuning"))
    assert verify(json.dumps({**outer, "state": "another"}), key="k", kind="tuning") is None


@pytest.mark.parametrize("text", [None, "", "{", "[]", "[" * 100_000, '{"signature": "x"}', '{"state": "body"}'])
def test_verify_of_malformed_text_is_none(text: str | None) -> None:
    assert verify(text, key="k", kind="tuning") is None

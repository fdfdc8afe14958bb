"""Event templates, rendered once except for one string."""

from typing import Any

import pytest
from trimtab_engine.api.http.streaming import EventTemplate, event


def make_body(text: str) -> dict[str, Any]:
    return {"id": 'a "quoted" id', "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None}


@pytest.mark.parametrize("text", ["", " word", 'a "b" \\ c', "\n\t\x00\x1f\x7f", "Grüße 北京 🙂", "\u2028", "\ud800"])
def test_filled_template_equals_rendered_event(text: str) -> None:
    template = EventTemplate.of(make_body)
    assert template.fill([text, "x"]) == event(make_body(text)) + event(make_body("x"))

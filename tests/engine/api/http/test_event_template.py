"""Events that are rendered once but for one string."""

from typing import Any

import pytest
from trimtab_engine.api.http.streaming import EventTemplate, event


def a_body(text: str) -> dict[str, Any]:
    return {"id": 'a "quoted" id', "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None}


@pytest.mark.parametrize("text", ["", " word", 'a "b" \\ c', "\n\t\x00\x1f\x7f", "Grüße 北京 🙂", "\u2028", "\ud800"])
def test_a_filled_template_is_the_event_that_would_be_rendered(text: str) -> None:
    template = EventTemplate.of(a_body)
    assert template.fill([text, "x"]) == event(a_body(text)) + event(a_body("x"))

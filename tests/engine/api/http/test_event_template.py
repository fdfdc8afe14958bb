"""Event templates, rendered once except for one string."""

import json
from typing import Any

import pytest
from trimtab_engine.api.http.streaming import EventTemplate, event


def make_body(text: str) -> dict[str, Any]:
    return {"id": 'a "quoted" id', "choices": [{"index": 0, "text": text, "logprobs": None}], "usage": None}


@pytest.mark.parametrize(
    "text", ["", " word", 'a "b" \\ c', "\n\t\x00\x1f\x7f", "Grüße 北京 🙂", "a\u2028b\u2029c\x85", "\ud800"]
)
def test_filled_template_equals_rendered_event(text: str) -> None:
    template = EventTemplate.of(make_body)
    assert template.fill([text, "x"]) == event(make_body(text)) + event(make_body("x"))


def test_event_has_no_line_separator_within_its_data() -> None:
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\x1cg"  # clients such as httpx break lines at each
    for written in (event(make_body(text)), EventTemplate.of(make_body).fill([text])):
        (line, _) = written.splitlines()
        assert json.loads(line.removeprefix("data: ")) == make_body(text)

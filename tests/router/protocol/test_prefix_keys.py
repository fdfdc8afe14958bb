"""Prefix keys: equal beginnings have equal keys, and tests/golden/prefix_keys.json pins them across versions."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from trimtab_router.protocol.prefix_keys import CUT_BYTES, MAX_KEYS, api_key_salt, prompt_keys

GOLDEN: list[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "golden" / "prefix_keys.json").read_text())
LONG = "The quick brown fox jumps over the lazy dog. " * 60
SYSTEM = {"role": "system", "content": LONG}
TOOL = {"type": "function", "function": {"name": "now", "description": LONG, "parameters": {"type": "object"}}}


def keys_of(body: dict[str, Any], **options: str) -> tuple[int, ...]:
    (prompt,) = prompt_keys(body, **options)
    return prompt.keys


def num_shared(one: tuple[int, ...], two: tuple[int, ...]) -> int:
    return next((place for place, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


@pytest.mark.parametrize("case", GOLDEN, ids=[case["name"] for case in GOLDEN])
def test_keys_of_request_equal_golden_keys(case: dict[str, Any]) -> None:
    prompts = prompt_keys(case["body"], path=case["path"], adapter=case["adapter"], salt=case["salt"])
    assert [[f"{key:016x}" for key in prompt.keys] for prompt in prompts] == case["keys"]
    assert [prompt.num_bytes for prompt in prompts] == case["num_bytes"]


def test_text_prompts_share_keys_up_to_first_difference() -> None:
    one, two = keys_of({"prompt": LONG + "a" * 600}), keys_of({"prompt": LONG + "b" * 600})
    assert num_shared(one, two) == len(LONG) // CUT_BYTES
    assert len(one) == (len(LONG) + 600) // CUT_BYTES


def test_next_turn_of_conversation_continues_keys() -> None:
    first = [SYSTEM, {"role": "user", "content": "Hello " * 100}]
    second = [*first, {"role": "assistant", "content": "Hi " * 100}, {"role": "user", "content": "More " * 200}]
    one, two = keys_of({"messages": first}), keys_of({"messages": second, "temperature": 0.5})
    assert num_shared(one, two) == len(one) > 0
    assert len(two) > len(one)


@pytest.mark.parametrize(
    "other",
    [
        {"messages": [SYSTEM], "cache_salt": "a"},
        {"messages": [SYSTEM], "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": [SYSTEM], "add_special_tokens": True},
        {"messages": [SYSTEM], "reasoning_effort": "low"},
        {"messages": [SYSTEM], "tools": [TOOL]},
        {"messages": [{**SYSTEM, "role": "user"}]},
        {"messages": [{**SYSTEM, "name": "a"}]},
        {"prompt": LONG},
    ],
)
def test_other_prompt_beginnings_share_no_key(other: dict[str, Any]) -> None:
    assert num_shared(keys_of({"messages": [SYSTEM]}), keys_of(other)) == 0


def test_adapter_and_salt_share_no_key() -> None:
    body = {"prompt": LONG}
    roots = [keys_of(body), keys_of(body, adapter="a"), keys_of(body, salt="a")]
    assert len({keys[0] for keys in roots}) == 3
    assert keys_of({"prompt": LONG, "cache_salt": "b"}, salt="a:") == keys_of(body, salt="a:b")


def test_equal_prompts_in_other_form_have_equal_keys() -> None:
    parts = [{"type": "text", "text": LONG}]
    plain = keys_of({"messages": [{"role": "system", "content": LONG}]})
    assert keys_of({"messages": [{"role": "developer", "content": parts}]}) == plain
    assert keys_of({"messages": [{"role": "system", "content": LONG, "name": None, "tool_calls": []}]}) == plain
    assert keys_of({"prompt": [LONG]}) == keys_of({"prompt": LONG})


def test_media_count_by_digest_of_their_content() -> None:
    def body(url: str) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": url, "detail": "low"}}
        return {"messages": [{"role": "user", "content": [image, {"type": "text", "text": LONG}]}]}

    (one,) = prompt_keys(body("data:image/png;base64," + "A" * 100_000))
    (same,) = prompt_keys(body("data:image/png;base64," + "A" * 100_000))
    (other,) = prompt_keys(body("data:image/png;base64," + "B" * 100_000))
    assert one == same
    assert num_shared(one.keys, other.keys) == 0
    assert one.num_bytes < len(LONG) + 100


def test_prompt_lists_have_one_chain_each() -> None:
    texts = prompt_keys({"prompt": [LONG, "short"]})
    assert [len(prompt.keys) for prompt in texts] == [len(LONG) // CUT_BYTES, 0]
    ids = prompt_keys({"prompt": [[1, 2, 3], list(range(256))]})
    assert [(prompt.num_tokens, len(prompt.keys)) for prompt in ids] == [(3, 0), (256, 2)]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": 3},
        {"prompt": [1, -1]},
        {"prompt": [1, 2**40]},
        {"prompt": ["a", 1]},
        {"messages": [3]},
        {"messages": [{}]},
        {"messages": [{"role": ["a"], "content": ""}]},
        {"messages": [{"role": "user", "content": [{}]}]},
        {"messages": [{"role": "user", "content": [3]}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
        {"messages": [{"role": "user", "content": 5}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
        {"messages": [], "tools": 5},
        {"input": LONG},
        {"prompt": LONG, "truncate_prompt_tokens": 5},
    ],
)
def test_body_without_valid_prompt_has_no_keys(body: dict[str, Any]) -> None:
    assert [prompt.keys for prompt in prompt_keys(body) if prompt.keys] == []


def test_three_forms_of_one_conversation_have_equal_keys() -> None:
    chat = {"messages": [{"role": "system", "content": LONG}, {"role": "user", "content": LONG}]}
    messages = {"system": LONG, "messages": [{"role": "user", "content": [{"type": "text", "text": LONG}]}]}
    responses = {"instructions": LONG, "input": LONG}
    assert keys_of(messages) == keys_of(chat)
    assert keys_of(responses, path="/v1/responses") == keys_of(chat)
    assert prompt_keys(responses | {"previous_response_id": "r"}, path="/v1/responses") == []
    assert prompt_keys(responses | {"truncation": "auto"}, path="/v1/responses") == []


def test_lone_surrogates_have_keys_of_replacement() -> None:
    assert keys_of({"prompt": "\ud800" + LONG}) == keys_of({"prompt": "\ufffd" + LONG})


def test_number_of_keys_is_bounded() -> None:
    (prompt,) = prompt_keys({"prompt": "a" * (CUT_BYTES * (MAX_KEYS + 10))})
    assert len(prompt.keys) == MAX_KEYS


def test_api_key_salt_hides_and_separates_keys() -> None:
    assert api_key_salt(b"secret") != api_key_salt(b"other")
    assert "secret" not in api_key_salt(b"secret")


def test_32_kilobytes_take_tens_of_microseconds() -> None:
    """The bar is 20 µs on an idle core; the test allows for a loaded machine."""
    body = {"messages": [{"role": "user", "content": LONG[:2048]}] * 16}
    prompt_keys(body)
    best = 1.0
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(20):
            prompt_keys(body)
        best = min(best, (time.perf_counter() - started) / 20)
    assert best < 200e-6

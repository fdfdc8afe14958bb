"""Prompt construction: special tokens, truncation, and chat template switches."""

from pathlib import Path
from typing import Any

import openai
import pytest
from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast
from trimtab_engine.api.openai.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.text.chat_template import ChatTemplate

A_CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hello"}]}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content TRIM }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def kept(fields: dict[str, Any], max_tokens: int | None = None) -> list[int]:
    body = CompletionRequest.model_validate({"prompt": "a", **fields})
    return body.kept([1, 2, 3, 4, 5], max_model_len=4, max_tokens=max_tokens)


@pytest.mark.parametrize(
    ("fields", "max_tokens", "tokens"),
    [
        ({}, None, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": 2}, None, [4, 5]),
        ({"truncate_prompt_tokens": 2, "truncation_side": "right"}, None, [1, 2]),
        ({"truncate_prompt_tokens": 9}, None, [1, 2, 3, 4, 5]),
        ({"truncate_prompt_tokens": -1}, None, [3, 4, 5]),  # one output token fits
        ({"truncate_prompt_tokens": -1}, 2, [4, 5]),
        ({"truncate_prompt_tokens": -1}, 0, [3, 4, 5]),  # an echo alone computes one token too
        ({"truncate_prompt_tokens": -1, "truncation_side": "right"}, 2, [1, 2]),
        ({"truncate_prompt_tokens": -1}, 9, [5]),  # still too long; reported by the length check
    ],
)
def test_prompt_is_truncated_on_requested_side(
    fields: dict[str, Any], max_tokens: int | None, tokens: list[int]
) -> None:
    assert kept(fields, max_tokens) == tokens


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("completions", {"prompt": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens"),
        ("completions", {"prompt": "a", "truncate_prompt_tokens": True}, "truncate_prompt_tokens"),
        ("completions", {"prompt": "a", "truncation_side": "middle"}, "truncation_side"),
        ("completions", {"prompt": "a", "add_special_tokens": "yes"}, "add_special_tokens"),
        ("completions", {"prompt": "a", "continue_final_message": True}, "continue_final_message"),
        ("completions", {"prompt": "a", "stream_interval": 0}, "stream_interval"),
        ("completions", {"prompt": "a", "request_id": "two words"}, "request_id"),
        ("completions", {"prompt": "a", "return_token_ids": 1}, "return_token_ids"),
        ("completions", {"prompt": "a", "spaces_between_special_tokens": False}, "spaces_between_special_tokens"),
        ("chat/completions", {**A_CHAT, "documents": [{"text": "a"}]}, "documents"),
        ("chat/completions", {**A_CHAT, "continue_final_message": True}, "continue_final_message"),
        ("chat/completions", {**A_CHAT, "kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ("chat/completions", {**A_CHAT, "include_reasoning": False}, "include_reasoning"),
    ],
)
@pytest.mark.parametrize("suffix", ["", "/render"])
def test_invalid_prompt_field_is_rejected_by_name(
    server: Any, path: str, body: dict[str, Any], param: str, suffix: str
) -> None:
    answer = server.http.post(f"/v1/{path}{suffix}", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert param in answer.json()["error"]["message"]


def test_fields_without_effect_are_accepted(server: Any) -> None:
    body = {**A_CHAT, "max_tokens": 1, "documents": None, "include_reasoning": True, "length_penalty": 1}
    body |= {"spaces_between_special_tokens": True, "vllm_xargs": None, "return_token_ids": None}
    assert server.http.post("/v1/chat/completions", json=body).status_code == 200


def test_truncated_prompt_is_computed_and_echoed(server: Any) -> None:
    body = {"prompt": "abcdef", "truncate_prompt_tokens": 2, "max_tokens": 2, "echo": True}
    answer = server.http.post("/v1/completions", json=body).json()
    assert answer["choices"][0]["text"] == "efef"
    assert answer["usage"]["prompt_tokens"] == 2


def test_prompt_above_context_is_accepted_with_truncation(server: Any) -> None:
    body = {"prompt": "ab" * 200, "max_tokens": 6}
    assert server.http.post("/v1/completions", json=body).status_code == 400
    answer = server.http.post("/v1/completions", json={**body, "truncate_prompt_tokens": -1}).json()
    assert (answer["usage"]["prompt_tokens"], answer["choices"][0]["text"]) == (250, "ababab")
    chat = {"messages": [{"role": "user", "content": "ab" * 200}], "truncate_prompt_tokens": -1}
    assert server.http.post("/v1/chat/completions", json=chat).json()["usage"]["prompt_tokens"] == 255


@pytest.fixture(scope="module")
def with_beginning(tokenizer_folder: Path, start_shared_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose tokenizer adds <|end|> before each text, with a typical chat template."""
    import json
    import shutil

    folder = tmp_path_factory.mktemp("with-beginning") / "model"
    shutil.copytree(tokenizer_folder, folder)
    file = folder / "tokenizer.json"
    described = json.loads(file.read_text())
    described["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<|end|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [256], "tokens": ["<|end|>"]}},
    }
    file.write_text(json.dumps(described))
    (folder / "chat_template.jinja").write_text(CHATML.replace(" TRIM", ""))
    return start_shared_server(model=folder)


def tokens(server: Any, path: str, body: dict[str, Any]) -> list[int]:
    answer = server.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["tokens" if path == "/tokenize" else "token_ids"]
    return found


def test_special_tokens_default_to_prompts_only(
    with_beginning: Any,
) -> None:
    for prompt in ("ab", ["ab", "ab"]):
        for fields, expected in (({}, [256, 97, 98]), ({"add_special_tokens": False}, [97, 98])):
            answer = with_beginning.http.post("/v1/completions/render", json={"prompt": prompt, **fields})
            assert [entry["token_ids"] for entry in answer.json()] == [expected] * (
                2 if isinstance(prompt, list) else 1
            )
    plain = tokens(with_beginning, "/v1/chat/completions/render", A_CHAT)
    added = tokens(with_beginning, "/v1/chat/completions/render", {**A_CHAT, "add_special_tokens": True})
    assert added == [256, *plain]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"add_special_tokens": True},
        {"add_generation_prompt": False},
        {"add_generation_prompt": False, "continue_final_message": True},
        {"chat_template_kwargs": {"unread": 1}},
    ],
)
def test_tokenize_equals_tokens_of_the_chat_request(with_beginning: Any, fields: dict[str, Any]) -> None:
    body = {**A_CHAT, **fields}
    assert tokens(with_beginning, "/tokenize", body) == tokens(with_beginning, "/v1/chat/completions/render", body)


def test_response_continues_a_started_message(with_beginning: Any) -> None:
    with openai.OpenAI(base_url=f"{with_beginning.http.base_url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="stub",
            messages=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "The answer is"}],
            max_tokens=1,
            extra_body={
                "add_generation_prompt": False,
                "continue_final_message": True,
                "return_token_ids": True,
            },
        )
    assert answer.model_extra is not None
    text = bytes(answer.model_extra["prompt_token_ids"]).decode()
    assert text.endswith("<|im_start|>assistant\nThe answer is")


@pytest.mark.parametrize("trim", ["", "| trim"])
@pytest.mark.parametrize("content", ["The answer is", "The answer is ", "  The answer", "The answer\n"])
def test_continued_message_equals_transformers(trim: str, content: str) -> None:
    template = CHATML.replace("TRIM", trim)
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": content}]
    ours = ChatTemplate(template, {}).render(messages, add_generation_prompt=False, continue_final_message=True)
    from tokenizers import Tokenizer, models

    reference = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), chat_template=template)  # type: ignore[no-untyped-call]
    assert ours == reference.apply_chat_template(messages, tokenize=False, continue_final_message=True)


@pytest.mark.parametrize(
    ("template", "content"),
    [("{{ messages[0].role }}", "a"), ("{% for m in messages %}{{ m.content }}{% endfor %}", "")],
)
def test_message_dropped_by_template_cannot_be_continued(template: str, content: str) -> None:
    with pytest.raises(InvalidRequest, match="continue_final_message"):
        ChatTemplate(template, {}).render([{"role": "user", "content": content}], continue_final_message=True)


@pytest.mark.parametrize("name", ["tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message"])
def test_message_fields_are_rejected_with_a_prompt(server: Any, name: str) -> None:
    values: dict[str, Any] = {"tools": [], "chat_template_kwargs": {}}
    answer = server.http.post("/tokenize", json={"prompt": "a", name: values.get(name, False)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


def test_special_token_default_depends_on_route() -> None:
    assert CompletionRequest.model_validate({"prompt": "a"}).add_special_tokens is None
    assert ChatRequest.model_validate(A_CHAT).add_special_tokens is None
    assert TokenizeRequest.model_validate({"prompt": "a"}).add_special_tokens is None

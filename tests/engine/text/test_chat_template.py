"""Chat templates compared with transformers, and invalid or endless templates."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template
from trimtab_engine.errors import InvalidRequest, ModelError
from trimtab_engine.text.builtin_templates import BUILTIN_TEMPLATES, builtin_template
from trimtab_engine.text.chat_template import ChatTemplate, ChatTemplates
from trimtab_engine.text.chat_worker import Rendering
from trimtab_engine.text.tokenizer import Tokenizer

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "Be <brief> & é."},
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, None]}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
NAMESPACE_AND_BREAK = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if ns.n == 2 %}{% break %}"
    "{% endif %}{{ loop.index }}{% endfor %}{{ ns.n }}{% if add_generation_prompt %}>{% endif %}"
)
TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}\n  {{ m['role'] }}: {{ m.content | trim }}\n{% endfor %}\n{{ eos_token }}",
    "{%- for m in messages -%}\n{{ m | tojson }}\n{%- endfor %}{{ tools | tojson(indent=2) }}",
    NAMESPACE_AND_BREAK,
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
    "{% macro show(m) %}[{{ m.role }}]{% endmacro %}{% for m in messages[::-1] %}{{ show(m) }}{% endfor %}",
    "{{ dict(a=1) | tojson }}{{ strftime_now('%Y') }}{% if tools is not none %}{{ tools | length }}{% endif %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_rendering_equals_transformers(template: str, tools: list[dict[str, Any]] | None) -> None:
    special: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>"}
    theirs: Any = render_jinja_template
    expected, _ = theirs([MESSAGES], tools=tools, chat_template=template, add_generation_prompt=True, **special)
    assert ChatTemplate(template, special).render(MESSAGES, tools=tools) == expected[0]


def test_request_variables_cannot_override_reserved_names() -> None:
    template = ChatTemplate("{{ thinking }}{{ messages | length }}", {})
    assert template.render(MESSAGES, variables={"thinking": False, "messages": []}) == "False3"


def test_template_with_tools_is_detected() -> None:
    assert ChatTemplate("{% if tools %}{{ tools }}{% endif %}", {}).uses_tools
    assert not ChatTemplate("{{ 'tools' }}{{ messages }}", {}).uses_tools


def test_sandbox_blocks_python_access() -> None:
    for text in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
    ):
        with pytest.raises(InvalidRequest):
            ChatTemplate(text, {}).render(MESSAGES)


def test_text_above_max_characters_is_rejected() -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{{ 'x' * 100 }}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequest, match="exceed 1000 characters"):
        ChatTemplate(endless, {}).render(MESSAGES, max_characters=1000)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% if %}", "line 1"),
        ("{{ nothing.at.all }}", "'nothing' is undefined"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages | unknown }}", "unknown"),
        ("{% include 'x' %}", "cannot render one user message"),
    ],
)
def test_invalid_template_is_detected_before_use(template: str, reason: str) -> None:
    with pytest.raises(ModelError, match="the chat template:") as broken:
        ChatTemplate(template, {}).check()
    assert reason in str(broken.value)


@pytest.mark.parametrize(
    ("templates", "place"),
    [
        ({"default": "a\n{% if %}"}, "the chat template of /m: invalid Jinja in line 2: "),
        ({"default": "a\n\n{{ a.b.c }}"}, "the chat template of /m: line 3: cannot render one user"),
        ({"default": "{% macro m(a) %}\n{{ a.b.c }}{% endmacro %}\n{{ m(x) }}"}, "/m: line 2: "),
        ({"default": "{% if not tools %}\n{{ a.b.c }}{% endif %}"}, "/m: line 2: "),
        (
            {"default": "", "tool_use": "{{ tools }}\n{{ a.b }}"},
            "template for tools of /m: line 2: ",
        ),
    ],
)
def test_invalid_template_error_has_its_line(templates: dict[str, str], place: str) -> None:
    assert place in Rendering(ChatTemplates(templates, {}, "/m")).answer({"check": True})["refused"]


def test_template_rejecting_the_check_is_valid() -> None:
    ChatTemplate("{{ raise_exception('a system message comes first') }}", {}).check()


def test_tools_use_the_tool_template_if_available() -> None:
    rendering = Rendering(ChatTemplates({"default": "plain", "tool_use": "{{ tools | length }} tools"}, {}))
    request_fields = {"messages": MESSAGES, "variables": None, "max_characters": 100}
    request_fields |= {"add_generation_prompt": True, "continue_final_message": False}
    assert rendering.answer({**request_fields, "tools": None}) == {"text": "plain"}
    assert rendering.answer({**request_fields, "tools": TOOLS}) == {"text": "1 tools"}
    assert rendering.answer({"check": True})["uses_tools"]


EACH_PART = "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
BOTH = "{% if message.content is string %}{{ message.content }}{% else %}" + EACH_PART + "{% endif %}"


@pytest.mark.parametrize(
    ("template", "forms"),
    [
        ("{{ message.content }}", "text text text text"),
        ("{{ message.role + message.content }}", "text text text text"),
        ("{{ message.content | tojson }}", "text text text text"),
        ("{% if message.content is string %}{{ message.content }}{% endif %}", "text text text text"),
        (BOTH, "any any any any"),
        (EACH_PART, "parts parts parts parts"),
        ("{% if message.role == 'user' %}" + BOTH + "{% else %}{{ message.content }}{% endif %}", "text any text text"),
        ("{% if message.role == 'tool' %}{{ raise_exception('no') }}{% endif %}" + BOTH, "any any any text"),
    ],
)
def test_content_form_is_detected_per_role(template: str, forms: str) -> None:
    text = "{% for message in messages %}" + template + "{% endfor %}"
    answer = Rendering(ChatTemplates({"default": text}, {})).answer({"check": True})
    assert answer["forms"] == dict(zip(("system", "user", "assistant", "tool"), forms.split(), strict=True))


def test_content_forms_are_those_of_all_templates() -> None:
    texts = [
        "{% for message in messages %}" + template + "{% endfor %}" for template in (BOTH, "{{ message.content }}")
    ]
    answer = Rendering(ChatTemplates(dict(zip(("default", "tool_use"), texts, strict=True)), {})).answer(
        {"check": True}
    )
    assert set(answer["forms"].values()) == {"text"}


@pytest.mark.parametrize(
    ("files", "tokenizer_template", "template"),
    [
        ([], None, "processor"),
        ([], "tokenizer", "tokenizer"),
        (["preprocessor_config.json"], "tokenizer", "processor"),
        (["preprocessor_config.json"], None, "processor"),
        (["processor_config.json", "chat_template.jinja"], "tokenizer", "jinja"),
    ],
)
def test_template_of_the_processor_is_read(
    files: list[str], tokenizer_template: str | None, template: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    """Vision checkpoints have their template in chat_template.json, and text checkpoints rarely."""
    config = json.loads((tokenizer_folder / "tokenizer_config.json").read_text()) | {
        "chat_template": tokenizer_template
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "processor"}))
    for name in files:
        (tmp_path / name).write_text("jinja" if name.endswith(".jinja") else "{}")
    assert Tokenizer(str(tmp_path)).chat_templates.by_name == {"default": template}


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"chat_template": 1}'])
def test_invalid_processor_template_is_reported(content: str, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes((tokenizer_folder / "tokenizer.json").read_bytes())
    (tmp_path / "chat_template.json").write_text(content)
    with pytest.raises(ModelError, match=r"chat_template\.json: is not a JSON object with a chat_template"):
        Tokenizer(str(tmp_path))


def test_tokenizer_has_the_models_templates(tokenizer_folder: Path) -> None:
    templates = Tokenizer(str(tokenizer_folder)).chat_templates
    assert templates.by_name.keys() == {"default"}
    assert templates.special_tokens["eos_token"] == "<|end|>"


CALLS = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": True}}}]}
RESULTS = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]


def hermes() -> ChatTemplate:
    text = builtin_template("hermes")
    assert text is not None
    return ChatTemplate(text, {})


def test_hermes_renders_tools_calls_and_results() -> None:
    user = {"role": "user", "content": "hi"}
    written = hermes().render([MESSAGES[0], user, CALLS, *RESULTS], tools=TOOLS)
    assert written.startswith("<|im_start|>system\nBe <brief> & é.\n\n# Tools\n\n")
    tool = '{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}'
    assert f"<tools>\n{tool}\n</tools>\n" in written
    assert written.endswith(
        "</tool_call><|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": true}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_hermes_without_tools_is_chatml_with_default_system_message() -> None:
    assert hermes().render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_shipped_templates_are_valid_and_support_tools(name: str) -> None:
    template = ChatTemplate(builtin_template(name) or "", {})
    template.check()
    template.check(TOOLS)
    assert template.uses_tools

"""The end-of-sequence token of a tokenizer folder is found in any of its files."""

import json
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.text.end_of_sequence import tokenizer_eos_id


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"tokenizer_config.json": {"eos_token": "</s>", "added_tokens_decoder": {"2": {"content": "</s>"}}}}, 2),
        (
            {
                "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
                "tokenizer.json": {"added_tokens": [{"id": 3, "content": "</s>"}]},
            },
            3,
        ),
        (
            {
                "special_tokens_map.json": {"eos_token": "</s>"},
                "tokenizer.json": {"added_tokens": [], "model": {"vocab": {"a": 0, "</s>": 4}}},
            },
            4,
        ),
        (
            {"tokenizer_config.json": {"eos_token": "</s>"}, "tokenizer.json": {"model": {"vocab": [["</s>", 0.0]]}}},
            None,
        ),
        ({"tokenizer_config.json": {"eos_token": None}}, None),
        ({"tokenizer_config.json": []}, None),
        ({}, None),
    ],
)
def test_tokenizer_eos_id_is_found(files: dict[str, Any], expected: int | None, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    assert tokenizer_eos_id(str(tmp_path)) == expected


def test_fixture_tokenizer_has_its_end_token(tokenizer_folder: Path) -> None:
    assert tokenizer_eos_id(str(tokenizer_folder)) == 256
    assert tokenizer_eos_id(str(tokenizer_folder / "tokenizer.json")) is None

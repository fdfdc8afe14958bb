"""Sampling defaults of generation_config.json, of another file, and of the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults, read_sampling_defaults
from trimtab_engine.errors import ConfigError

QWEN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "eos_token_id": [1, 2], "min_p": None}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "generation_config.json").write_text(json.dumps(QWEN))
    return tmp_path


@pytest.mark.parametrize(
    ("source", "override", "expected"),
    [
        ("auto", {}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (
            "auto",
            {"temperature": 0, "max_new_tokens": 9},
            {"temperature": 0.0, "top_p": 0.95, "top_k": 20, "max_new_tokens": 9},
        ),
        ("vllm", {}, {}),
        ("vllm", {"min_p": 0.1}, {"min_p": 0.1}),
    ],
)
def test_defaults_are_read_from_their_source(
    model: Path, source: str, override: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert read_sampling_defaults(model, source, override).values == expected


def test_another_folder_or_file_replaces_the_model_s(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    file = other / "generation_config.json"
    file.write_text(json.dumps({"temperature": 0.2}))
    for source in (other, file):
        assert read_sampling_defaults(model, str(source), {}) == SamplingDefaults(temperature=0.2)


def test_models_without_the_file_have_no_defaults(tmp_path: Path) -> None:
    assert read_sampling_defaults(tmp_path, "auto", {}) == NO_DEFAULTS
    (tmp_path / "model.gguf").touch()
    assert read_sampling_defaults(tmp_path / "model.gguf", "auto", {}) == NO_DEFAULTS


@pytest.mark.parametrize(
    ("source", "fields", "override", "message"),
    [
        ("auto", {"temperature": -1}, {}, r"generation_config.json: temperature must be a number from 0 to 100 \(-1\)"),
        ("auto", {"top_k": 2.5}, {}, "top_k must be a whole number"),
        ("auto", {"top_p": True}, {}, "top_p must be a number"),
        ("auto", {}, {"top_p": 2}, r"--override-generation-config: top_p must be a number from 0 to 1 \(2\)"),
        ("auto", {}, {"beams": 2}, "--override-generation-config: beams is not supported; fields are temperature"),
        ("/nowhere", {}, {}, "--generation-config: /nowhere does not exist; give a folder"),
    ],
)
def test_invalid_defaults_are_rejected_by_name(
    model: Path, source: str, fields: dict[str, Any], override: dict[str, Any], message: str
) -> None:
    (model / "generation_config.json").write_text(json.dumps(QWEN | fields))
    with pytest.raises(ConfigError, match=message):
        read_sampling_defaults(model, source, override)

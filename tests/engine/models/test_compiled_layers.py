"""Compiled layers and torch's layers: same tokens, selected once, and logged."""

import json
import logging
from pathlib import Path

import pytest
import torch
import trimtab_engine.models.compiled_layers as compiled_module
from engine_benchmarks.parity import greedy_generator, load_runner
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.device.device import Device
from trimtab_engine.layers import linear
from trimtab_engine.runner.loading import load_model_runner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_kernels.native.library import NativeLibrary, NativeUnavailable, native_library

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
PROMPTS = [[5, 6, 7], [9], list(range(20, 61)), [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (linear, compiled_module):
        monkeypatch.setattr(module, "native_library", lambda: NativeUnavailable("they were not compiled"))


def tokens(checkpoint: Path, chunk: int | None) -> list[list[int]]:
    runner = load_runner(str(checkpoint), load_format="dummy")
    return greedy_generator(runner, block_size=16, chunk=chunk)(PROMPTS, 20)


@pytest.mark.parametrize("chunk", [None, 3])
def test_the_engine_without_compiled_operators_gives_the_same_tokens(
    checkpoint: Path, chunk: int | None, request: pytest.FixtureRequest
) -> None:
    if isinstance(native_library(), NativeUnavailable):
        pytest.skip("no compiled operators here")
    expected = tokens(checkpoint, chunk)
    request.getfixturevalue("no_library")
    assert tokens(checkpoint, chunk) == expected


def test_selected_operators_are_logged(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    library = native_library()
    if not isinstance(library, NativeLibrary):
        pytest.skip("no compiled operators here")
    with caplog.at_level(logging.INFO):
        load_runner(str(checkpoint), load_format="dummy")
    assert f"CPU operators: compiled, for {library.instruction_set}" in caplog.text


@pytest.mark.usefixtures("no_library")
def test_without_a_library_the_log_says_why(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        load_runner(str(checkpoint), load_format="dummy")
    assert "CPU operators: torch, not the compiled ones: they were not compiled" in caplog.text
    assert "1.5 to 3 times slower" in caplog.text
    assert "WARNING" in {record.levelname for record in caplog.records}


def test_other_dtypes_are_torch_s(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    if isinstance(native_library(), NativeUnavailable):
        pytest.skip("no compiled operators here")
    config = EngineConfig(model=str(checkpoint), dtype="bfloat16", load_format="dummy")
    with caplog.at_level(logging.INFO):
        runner = load_model_runner(ModelRunner, config, Device("cpu"), lambda stage, percent: None)
    assert not runner._model.is_compiled
    assert "they compute in float32 and the model in bfloat16" in caplog.text
    assert linear.library_for(torch.bfloat16, torch.device("cpu")) is None

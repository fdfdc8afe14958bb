"""The sample model's tokenizer matches the GGUF file, also in folders converted by earlier versions."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from devtools import model
from gguf import GGUFWriter
from tokenizers import Tokenizer, pre_tokenizers

TEXT, PIECES = "  12", ["Ġ", "Ġ", "1", "2"]
GPT2_SPLIT = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def write_gguf(path: Path) -> None:
    """Write byte-level tokens and a merge of a space and a digit, which SmolLM2's pre-tokenizer never produces."""
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ1"]
    path.parent.mkdir(parents=True)
    writer = GGUFWriter(path, "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (len(tokens) - 1)])
    writer.add_token_merges(["Ġ 1"])
    writer.add_eos_token_id(0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a cache with the file and a folder of an earlier version."""
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    monkeypatch.setattr(model, "project_python", lambda: sys.executable)
    write_gguf(tmp_path / "models" / "gguf" / model.GGUF)
    folder = tmp_path / "models" / model.NAME
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    (folder / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": GPT2_SPLIT}))
    return folder


def test_old_folder_gets_current_tokenizer_and_keeps_weights(cache: Path) -> None:
    assert not model.splits_digits(cache)
    assert model.ensure() == cache
    assert Tokenizer.from_file(str(cache / "tokenizer.json")).encode(TEXT).tokens == PIECES
    assert (cache / "model.safetensors").read_text() == "weights"
    assert {path.name for path in cache.parent.iterdir()} == {"gguf", model.NAME}


def test_folder_with_current_tokenizer_is_unchanged(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    split = {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, GPT2_SPLIT]}
    (cache / "tokenizer.json").write_text(json.dumps({"pre_tokenizer": split}))
    monkeypatch.setattr(model, "run", lambda *arguments, **options: pytest.fail("must not convert"))
    assert model.ensure() == cache

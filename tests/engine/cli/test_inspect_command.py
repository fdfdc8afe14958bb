"""`trimtab-engine inspect`: facts on stdout, and in a file no larger than a termination message."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from trimtab_engine.cli import main
from trimtab_engine.cli.facts_table import facts_table
from trimtab_engine.cli.inspect_command import MAX_OUTPUT_FILE_BYTES


def make_model(folder: Path, **config: object) -> str:
    facts = {"architectures": ["OtherForCausalLM"], "num_hidden_layers": 3, "num_attention_heads": 9, **config}
    (folder / "config.json").write_text(json.dumps(facts))
    save_file({}, folder / "model.safetensors")
    return str(folder)


def test_the_file_holds_what_is_printed_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "termination-log"
    assert main(["inspect", make_model(tmp_path), "-o", "json", "--output-file", str(target)]) == 0
    text = target.read_text()
    assert json.loads(text) == json.loads(capsys.readouterr().out)
    assert "\n" not in text
    assert json.loads(text)["num_attention_heads"] == 9


def test_unreadable_model_writes_reason_to_file(tmp_path: Path) -> None:
    target = tmp_path / "termination-log"
    assert main(["inspect", str(tmp_path / "missing"), "--output-file", str(target)]) == 2
    assert "there is no model at" in target.read_text()


def test_facts_too_long_for_file_are_rejected(tmp_path: Path) -> None:
    target = tmp_path / "termination-log"
    model = make_model(tmp_path, architectures=["x" * MAX_OUTPUT_FILE_BYTES])
    assert main(["inspect", model, "--output-file", str(target)]) == 2
    assert len(target.read_bytes()) <= MAX_OUTPUT_FILE_BYTES
    assert "shorten long names" in target.read_text()
    assert main(["inspect", model]) == 0


def test_unwritable_output_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", make_model(tmp_path), "--output-file", str(tmp_path / "no" / "folder")]) == 2
    assert "no/folder: cannot write the file" in capsys.readouterr().err


def test_table_has_one_line_per_fact(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", make_model(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == "architecture     OtherForCausalLM, not supported by this engine"
    assert not [line for line in lines if "None" in line or "{" in line]


FACTS = {
    "model": "m",
    "architecture": "Qwen3MoeForCausalLM",
    "supported": True,
    "num_parameters": 30_532_122_624,
    "weights_bytes": 61_064_245_248,
    "dtype": "bfloat16",
    "quantization": None,
    "format": "safetensors",
    "num_layers": 48,
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "num_kv_heads": 4,
    "head_size": 128,
    "latent_kv_size": 0,
    "intermediate_size": 6144,
    "num_experts": 128,
    "num_experts_per_token": 8,
    "moe_intermediate_size": 768,
    "dense_layers": [],
    "vocab_size": 151_936,
    "max_model_len": 40_960,
    "kv_groups": [{"layers": [[0, 48]], "num_kv_heads": 4, "key_size": 128, "value_size": 128, "window": None}],
}


def test_table_shows_units_and_kv_bytes_per_token() -> None:
    assert facts_table(FACTS, dtype_bytes=2, disk_bytes=61_066_575_848).splitlines() == [
        "model            m",
        "architecture     Qwen3MoeForCausalLM",
        "parameters       30.5 billion",
        "weights          56.9 GiB as bfloat16; 56.9 GiB on disk (safetensors)",
        "layers           48 of width 2048",
        "attention        32 heads of 128, 4 KV heads",
        "MLP              6144 wide",
        "experts          128 per layer, 8 for each token, 768 wide",
        "vocabulary       151,936 tokens",
        "longest request  40,960 tokens",
        "KV cache         96.0 KiB per token, 3.8 GiB for the longest request",
    ]


def test_table_marks_models_executed_by_transformers() -> None:
    table = facts_table({**FACTS, "computed_by": "transformers"}, dtype_bytes=2, disk_bytes=1)
    assert "Qwen3MoeForCausalLM, executed by transformers' code" in table


def test_unknown_facts_of_unsupported_architecture_are_omitted() -> None:
    unknown = dict.fromkeys(("kv_groups", "max_model_len", "num_layers", "intermediate_size", "latent_kv_size"))
    table = facts_table({**FACTS, **unknown, "supported": False, "vocab_size": "many"}, dtype_bytes=2, disk_bytes=1)
    assert "Qwen3MoeForCausalLM, not supported by this engine" in table
    assert "vocabulary       many" in table
    assert "None" not in table

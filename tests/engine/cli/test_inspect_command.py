"""`trimtab-engine inspect`: the facts on stdout, and in a file no larger than a termination message."""

import json
from pathlib import Path

import pytest
from safetensors.numpy import save_file
from trimtab_engine.cli import main
from trimtab_engine.cli.inspect_command import MAX_OUTPUT_FILE_BYTES


def a_model(folder: Path, **config: object) -> str:
    facts = {"architectures": ["OtherForCausalLM"], "num_hidden_layers": 3, "num_attention_heads": 9, **config}
    (folder / "config.json").write_text(json.dumps(facts))
    save_file({}, folder / "model.safetensors")
    return str(folder)


def test_the_file_holds_what_is_printed_on_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "termination-log"
    assert main(["inspect", a_model(tmp_path), "-o", "json", "--output-file", str(target)]) == 0
    text = target.read_text()
    assert json.loads(text) == json.loads(capsys.readouterr().out)
    assert "\n" not in text
    assert json.loads(text)["num_attention_heads"] == 9


def test_a_model_that_cannot_be_read_leaves_its_reason_in_the_file(tmp_path: Path) -> None:
    target = tmp_path / "termination-log"
    assert main(["inspect", str(tmp_path / "missing"), "--output-file", str(target)]) == 2
    assert "there is no model at" in target.read_text()


def test_facts_that_the_file_cannot_hold_are_refused_whole(tmp_path: Path) -> None:
    target = tmp_path / "termination-log"
    model = a_model(tmp_path, architectures=["x" * MAX_OUTPUT_FILE_BYTES])
    assert main(["inspect", model, "--output-file", str(target)]) == 2
    assert len(target.read_bytes()) <= MAX_OUTPUT_FILE_BYTES
    assert "too long" in target.read_text()
    assert main(["inspect", model]) == 0


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", a_model(tmp_path), "--output-file", str(tmp_path / "no" / "folder")]) == 2
    assert "no/folder cannot be written" in capsys.readouterr().err

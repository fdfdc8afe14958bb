"""`serve --config FILE.yaml`: keys are flags, the command line takes precedence, errors are one line."""

from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.cli import _parser, _with_config_file, main
from trimtab_engine.cli.serve_command import served_names
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags.engine import engine_config


def arguments(tmp_path: Path, text: str, *flags: str) -> Any:
    file = tmp_path / "engine.yaml"
    file.write_text(text)
    parser = _parser()
    return parser.parse_args(_with_config_file(["serve", *flags, "--config", str(file), "--device", "cpu"], parser))


def config(tmp_path: Path, text: str, *flags: str) -> EngineConfig:
    return engine_config(arguments(tmp_path, text, *flags))


EVERYTHING = """
model: /models/of-file
served-model-name: [first, second]
max-num-seqs: 7
max_num_batched_tokens: 64
gpu-memory-utilization: 0.85
swap-space: 512Mi
enable-prefix-caching: false
disable-log-stats: true
preemption-mode: auto
speculative-config: {method: ngram, num_speculative_tokens: 3}
"""


def test_keys_are_flags_with_dashes_or_underscores(tmp_path: Path) -> None:
    read = config(tmp_path, EVERYTHING)
    assert (read.model, read.max_num_seqs, read.max_num_batched_tokens) == ("/models/of-file", 7, 64)
    assert (read.gpu_memory_utilization, read.swap_space_bytes, read.preemption_mode) == ("0.85", 512 << 20, "auto")
    assert (read.enable_prefix_caching, read.disable_log_stats, read.num_speculative_tokens) == (False, True, 3)
    assert served_names(arguments(tmp_path, EVERYTHING)) == ("first", "second")


def test_adapters_may_be_strings_or_objects(tmp_path: Path) -> None:
    text = "model: /m\nenable-lora: true\nlora-modules: [a=/a, {name: b, path: /b}]\nmax-loras: 2"
    read = config(tmp_path, text).adapters
    assert read is not None
    assert [(module.name, module.path) for module in read.modules] == [("a", "/a"), ("b", "/b")]


def test_command_line_takes_precedence(tmp_path: Path) -> None:
    flags = ["/models/m", "--max-num-seqs=9", "--enable-prefix-caching", "--served-model-name", "mine"]
    read = config(tmp_path, EVERYTHING, *flags)
    assert (read.model, read.max_num_seqs, read.enable_prefix_caching) == ("/models/m", 9, True)
    assert read.max_num_batched_tokens == 64
    assert served_names(arguments(tmp_path, EVERYTHING, *flags)) == ("mine",)


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert config(tmp_path, "", "/models/m") == engine_config(
        _parser().parse_args(["serve", "/models/m", "--device", "cpu"])
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seq: 3", "unknown flag max-num-seq; did you mean max-num-seqs?"),
        ("max-num-seqs:", "max-num-seqs has no value"),
        ("- a\n- b", "use keys and values"),
        ("a: [", "invalid YAML"),
        ("a: !!python/object/apply:os.system ['true']", "invalid YAML"),
    ],
)
def test_invalid_file_is_rejected_with_its_path(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(tmp_path, text, "/models/m")
    assert str(tmp_path / "engine.yaml") in str(error.value)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_invalid_value_is_rejected_like_on_command_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "engine.yaml").write_text("max-num-seqs: many")
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path), "--config", str(tmp_path / "engine.yaml")])
    assert end.value.code == 2
    assert "--max-num-seqs: 'many' is not an integer" in capsys.readouterr().err


def test_missing_file_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "/models/m", "--config=/no/such/file.yaml"]) == 2
    error = capsys.readouterr().err
    assert "--config /no/such/file.yaml: cannot read the file: No such file or directory" in error
    assert error.count("\n") == 1

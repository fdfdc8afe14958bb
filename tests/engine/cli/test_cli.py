"""The command line: accepted arguments, and one line with exit code 2 for invalid ones."""

import argparse
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.api.serving.lifecycle import Listen
from trimtab_engine.cli import _parser, main
from trimtab_engine.cli.serve_command import chat_template, served_names
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError
from trimtab_engine.flags import parser
from trimtab_engine.flags.engine import engine_config


def parsed(*flags: str) -> Any:
    return _parser().parse_args(["serve", "/models/m", "--device", "cpu", *flags])


def config(*flags: str) -> EngineConfig:
    return engine_config(parsed(*flags))


def error_line(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Return the single line that a rejected command prints."""
    try:
        code: Any = main(list(arguments))
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_node_rank_auto_uses_pod_ordinal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pods of the workers' StatefulSet count from 0, and node 0 is the leader."""
    monkeypatch.setattr(socket, "gethostname", lambda: "smollm2-g0-w-1")
    assert config("-tp", "3", "--nnodes", "3", "--node-rank", "auto").node_rank == 2


def test_node_rank_auto_without_ordinal_is_rejected(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "laptop.example.org")
    assert "the host name laptop does not end in a number" in error_line(
        capsys, "serve", "/models/m", "-tp", "2", "--nnodes", "2", "--node-rank", "auto"
    )


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--max-num-seq", "4"], "--max-num-seqs"),  # the nearest flag
        (["--gpu-memory-utilisation", "0.9"], "--gpu-memory-utilization"),
        (["--max-num-seqs", "0"], "--max-num-seqs"),
        (["--max-num-seqs", "many"], "'many' is not an integer"),
        (["--max-num-seqs", "300", "--max-num-batched-tokens", "200"], "--max-num-batched-tokens"),
        (["--max-num-seqs", "8", "--max-num-seqs-cap", "4"], "--max-num-seqs-cap"),
        (["--gpu-memory-utilization", "1.5"], "--gpu-memory-utilization"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization"),
        (["--block-size", "12"], "8, 16, 32"),
        (["--device", "tpu"], "tpu"),
        (["--device-memory-bytes", "12 parsecs"], "1500Mi"),
        (["--port", "70000"], "70000"),
        (["--load-format", "pickle"], "pickle"),
        (["--admin-token-sha256", "abc"], "64 hexadecimal digits"),
        (["--shutdown-timeout", "-1"], "--shutdown-timeout"),
        (["-tp", "0"], "argument --tensor-parallel-size/-tp"),
        (["--pipeline-layer-partition", "3,x"], "'3,x' is not a list of layer counts"),
        (["--distributed-executor-backend", "ray"], "invalid choice: 'ray'"),
        (["--quantization=int3"], "int3 is not supported; supported: fp8"),
        (["--kv-cache-dtype", "fp4"], "'fp4' is not one of auto, float32, bfloat16, float16, fp8, fp8_e4m3, fp8_e5m2"),
        (["--kv-cache-dtype", "int4"], "'int4' is not one of auto, float32"),
        (["--watermark", "2"], "use a number from 0 to 1"),
        (["--watermark", "0.95"], "--watermark is 0.95; it must be between 0 and 0.9"),
        (["--scheduling-policy", "lifo"], "--scheduling-policy"),
        (["--scheduling-policy", "deadline"], "--scheduling-policy is deadline, but --ttft-target is 0; set it"),
        (["--ttft-target", "soon"], "'soon' is not a number of seconds"),
        (["--swap-space", "many"], "--swap-space"),
        (["--swap-space", "4", "--swap-space-cap", "2"], "--swap-space-cap"),
        (["--stats-interval-seconds", "0"], "between 1 and 3600"),
        (["--log-level", "loud"], "--log-level"),
        (["--max-num-queued-reqs", "-1"], "--max-num-queued-reqs"),
        (["--middleware=a.b"], "--middleware is not supported"),
        (["--preemption-mode", "swap"], "set --swap-space, such as 0.5 (GiB) or 512Mi"),
        (["--seed", "x"], "--seed"),
        (["--max-model-len", "0"], "--max-model-len"),
        (["--max-model-len", "1.2345k"], "is not a number of tokens"),
        (["--max-model-len", "long"], "auto for the longest that fits"),
        (["--seed", "9" * 30], "64 bits"),
        (["--max-logprobs", "-1"], "--max-logprobs"),
        (["--model", "/other"], "conflicting models"),
    ],
)
def test_invalid_flag_prints_one_line_and_exits_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], word: str
) -> None:
    assert word in error_line(capsys, "serve", str(tmp_path), *flags)


@pytest.mark.parametrize("flag", ["--fully-sharded-lora", "--trust-remote-cod", "--ssl-certfil", "--cpu-offload-g"])
def test_unsupported_flag_is_never_suggested(capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    line = error_line(capsys, "serve", str(tmp_path), flag, "1")
    assert f"unrecognized arguments: {flag}" in line
    assert "did you mean" not in line


def test_choice_is_suggested_only_if_similar(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "did you mean" not in error_line(capsys, "serve", str(tmp_path), "--device", "gpu")
    assert "did you mean cuda?" in error_line(capsys, "serve", str(tmp_path), "--device", "cuba")


def test_missing_model_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert "/no/such/model" in error_line(capsys, "serve", "/no/such/model", "--device", "cpu")
    assert "gs://a/b: models of gs:// are not supported" in error_line(capsys, "serve", "gs://a/b", "--device", "cpu")
    assert "oci://a/b names no model of oci://" in error_line(capsys, "serve", "oci://a/b", "--device", "cpu")
    assert "no model" in error_line(capsys, "serve", "--device", "cpu")
    assert "/no/such/model" in error_line(capsys, "inspect", "/no/such/model")


def test_port_in_use_prints_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        flags = ["--host", "127.0.0.1", "--port", port, "--device", "cpu"]
        assert f"127.0.0.1:{port}" in error_line(capsys, "serve", str(tmp_path), *flags)


@pytest.mark.parametrize(
    "flags",
    [
        ["--tensor-parallel-size", "1"],
        ["--tensor-parallel-size=1", "-pp", "1"],
        ["--no-enforce-eager"],
        ["-O2"],
        ["--compilation-config", "{}"],
        ["--preemption-mode", "recompute"],
        ["--kv-cache-dtype", "auto"],
        ["--swap-space", "0"],
    ],
)
def test_flags_without_effect_are_accepted(flags: list[str]) -> None:
    assert config(*flags) == config()


@pytest.mark.parametrize(
    ("flags", "field", "value"),
    [
        ([], "max_num_seqs", 128),
        ([], "max_num_batched_tokens", 2048),
        ([], "gpu_memory_utilization", "0.9"),
        ([], "enable_chunked_prefill", True),
        (["--no-enable-chunked-prefill"], "enable_chunked_prefill", False),
        (["--max-num-seqs", "8"], "max_num_seqs_cap", 8),  # a cap defaults to the start value
        (["--gpu-memory-utilization=0.5"], "gpu_memory_utilization_cap", "0.5"),
        (["--device-memory-bytes", "1500Mi"], "device_memory_bytes", 1500 << 20),
        (["--device-memory-bytes", "2G"], "device_memory_bytes", 2_000_000_000),
        (["--device-memory-bytes", "12345"], "device_memory_bytes", 12345),
        (["--kv-cache-memory-bytes", "1.5Gi"], "kv_cache_memory_bytes", 3 << 29),
        (["--max-num-batched-tokens", "64"], "max_num_seqs", 64),  # the default is lowered
        (["--max-num-seqs", "4096"], "max_num_batched_tokens", 4096),
        (["--max-num-seqs-cap", "32"], "max_num_seqs", 32),
        (["--model", "/models/m"], "model", "/models/m"),
        ([], "max_model_len", None),
        ([], "enable_prefix_caching", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--swap-space", "4"], "swap_space_bytes", 4 << 30),  # GiB
        (["--swap-space", "0.5"], "swap_space_bytes_cap", 1 << 29),
        (["--swap-space-cap", "512Mi"], "swap_space_bytes_cap", 1 << 29),
        (["--preemption-mode", "auto", "--swap-space-cap", "1"], "preemption_mode", "auto"),
        (["--kv-cache-dtype", "bfloat16"], "kv_cache_dtype", "bfloat16"),
        (["--kv-cache-dtype", "fp8"], "kv_cache_dtype", "fp8"),
        (["--quantization", "fp8"], "quantization", "fp8"),
        (["-q", "fp8"], "quantization", "fp8"),
        ([], "quantization", None),
        (["--block-size", "64"], "block_size", 64),
        (["--block-size", "auto", "--max-model-len", "1024"], "block_size", 64),
        (["--block-size", "auto", "--max-model-len", "100K"], "block_size", 128),  # for 128 sequences
        (["--block-size", "auto", "--max-model-len", "100K", "--max-num-seqs", "8"], "block_size", 16),
        (["--block-size", "auto", "--max-model-len", "2M"], "block_size", 256),  # the largest size
        (["--watermark", "0.01"], "watermark", 0.01),
        (["--scheduling-policy", "priority"], "scheduling_policy", "priority"),
        (["--scheduling-policy", "deadline", "--ttft-target", "2"], "scheduling_policy", "deadline"),
        (["--ttft-target", "1.5"], "ttft_target", 1.5),
        (["--ttft-target-per-prompt-token", "0.001"], "ttft_target_per_prompt_token", 0.001),
        (["--long-prefill-token-threshold", "512"], "long_prefill_token_threshold", 512),
        (["--max-num-queued-reqs", "7"], "max_num_queued_reqs", 7),
        (["--max-num-queued-tokens", "70"], "max_num_queued_tokens", 70),
        (["--disable-log-stats"], "disable_log_stats", True),
        (["--stats-interval-seconds", "2.5"], "stats_interval_seconds", 2.5),
        (["--log-level", "debug"], "log_level", "debug"),
        (["--max-model-len", "4096"], "max_model_len", 4096),
        (["--max-model-len", "8k"], "max_model_len", 8000),
        (["--max-model-len", "8K"], "max_model_len", 8192),
        (["--max-model-len", "1.5M"], "max_model_len", 3 << 19),
        (["--max-model-len", "auto"], "max_model_len", "auto"),
        (["--max-model-len", "-1"], "max_model_len", "auto"),
    ],
)
def test_flags_become_the_configuration(flags: list[str], field: str, value: object) -> None:
    assert getattr(config(*flags), field) == value


def test_switch_without_effect_does_not_consume_model() -> None:
    arguments = _parser().parse_args(["serve", "--enforce-eager", "/models/m", "--device", "cpu"])
    assert engine_config(arguments).model == "/models/m"


def test_the_served_name_is_the_last_part_of_the_model_unless_given() -> None:
    assert served_names(parsed()) == ("m",)
    assert served_names(_parser().parse_args(["serve", "file:///a/b.gguf"])) == ("b",)
    assert served_names(parsed("--served-model-name", "x", "y")) == ("x", "y")


def test_a_model_may_be_a_file_uri() -> None:
    assert engine_config(_parser().parse_args(["serve", "file:///a/b", "--device", "cpu"])).model == "/a/b"
    with pytest.raises(ConfigError, match="gs://b/k: models of gs:// are not supported"):
        engine_config(_parser().parse_args(["serve", "gs://b/k", "--device", "cpu"]))


@pytest.mark.parametrize(("flags", "host"), [([], "127.0.0.1"), (["--admin-token-sha256", "a" * 64], "0.0.0.0")])
def test_the_admin_port_is_on_loopback_without_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flags: list[str], host: str
) -> None:
    seen: list[Listen] = []

    def record(_config: object, _options: object, listen: Listen, _timeout: float) -> int:
        seen.append(listen)
        return 0

    monkeypatch.setattr("trimtab_engine.api.serving.lifecycle.run_server", record)
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", str(tmp_path), "--device", "cpu", "--admin-port", "8001", *flags]) == 0
    assert seen == [Listen("0.0.0.0", 8000, host, 8001)]


def test_help_shows_every_flag_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    contract = (Path(__file__).parents[3] / "docs" / "reference" / "contract.md").read_text()
    table = contract.split("## 1.")[1].split("## 2.")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `--")]
    flags = {word.strip("`, ") for row in rows for word in row.replace("[no-]", "").split()}
    assert {flag for flag in flags if flag not in shown} == set()


def test_help_begins_with_how_it_is_used_and_its_examples_are_flags_that_exist(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert shown.splitlines()[0] == "usage: trimtab-engine serve MODEL [FLAG ...]"
    examples = re.findall(r"^    trimtab-engine serve (.*)$", shown.split("examples:")[1], re.MULTILINE)
    assert len(examples) == 5
    for example in examples:
        assert _parser().parse_args(["serve", *example.split()]).run


def test_the_command_line_imports_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, trimtab_engine.api.serving.lifecycle, trimtab_engine.cli.serve_command as s\n"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'heavy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_more_threads_than_any_machine_has_are_refused() -> None:
    assert parser.threads("4096") == 4096
    with pytest.raises(argparse.ArgumentTypeError, match="100000 is above 4096"):
        parser.threads("100000")


def test_a_chat_template_is_a_file_or_the_template_itself(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}é", encoding="utf-8")
    assert chat_template(str(file)) == "{{ messages }}é"
    assert chat_template("{% for m in messages %}{% endfor %}") == "{% for m in messages %}{% endfor %}"
    assert chat_template(None) is None
    with pytest.raises(ConfigError, match=r"No such file .* or hermes"):
        chat_template(str(tmp_path / "missing.jinja"))
    assert "<tool_call>" in str(chat_template("hermes"))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--host", "192.0.2.1"], ["this machine has no such address", "remove --host"]),
        (["--host", "localhost:8000"], ["without a port, such as 127.0.0.1"]),
        (["--profiler-dir", "/proc/nope"], ["cannot write to --profiler-dir /proc/nope"]),
        (["--port", "8000", "--admin-port", "8000"], ["--admin-port: equals --port (8000); set another port"]),
        (
            ["--speculative-config", '{"model":"/nope","num_speculative_tokens":3}'],
            ["--speculative-config: there is no model at /nope"],
        ),
        (
            ["--otlp-traces-endpoint", "notaurl"],
            ["--otlp-traces-endpoint notaurl is not a URL", "http://collector:4318"],
        ),
    ],
)
def test_addresses_and_paths_are_checked_before_start(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    line = error_line(capsys, "serve", str(tmp_path), "--device", "cpu", *flags)
    assert [word for word in words if word not in line] == []


def test_empty_folder_is_reported_as_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = error_line(capsys, "serve", str(tmp_path), "--device", "cpu")
    assert f"there is no model in {tmp_path}" in line
    assert "tokenizer" not in line


def test_hub_name_error_shows_download_command_without_network(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    line = error_line(capsys, "serve", "HuggingFaceTB/SmolLM2-135M-Instruct", "--device", "cpu", "--port", "0")
    assert "hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER" in line


def test_unknown_flag_is_reported_by_its_subcommand(capsys: pytest.CaptureFixture[str]) -> None:
    assert error_line(capsys, "serve", "m", "--max-num-seq", "1").endswith(
        "did you mean --max-num-seqs?; see trimtab-engine serve --help\n"
    )
    assert "see trimtab-engine bench serve --help" in error_line(capsys, "bench", "serve", "--request-rat", "1")


def test_misspelt_command_is_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean serve?" in error_line(capsys, "sevre")
    assert "validate is a command of trimtab" in error_line(capsys, "validate", "-f", "x.yaml")
    assert "did you mean latency?" in error_line(capsys, "bench", "latenc")


def test_bench_without_model_explains_model_flag(capsys: pytest.CaptureFixture[str]) -> None:
    line = error_line(capsys, "bench", "latency", "--device", "cpu")
    assert "with --model" in line
    assert "engine serve MODEL" not in line

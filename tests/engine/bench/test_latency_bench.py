"""`bench latency` and `bench throughput` on a tiny model: results under vLLM's names."""

import json
from pathlib import Path

import pytest
from trimtab_engine.bench.latency_bench import summarize, text
from trimtab_engine.cli import main

ENGINE = ["--load-format", "dummy", "--device", "cpu", "--cpu-threads", "1", "--max-model-len", "128"]
ENGINE += ["--num-gpu-blocks-override", "60", "--max-num-seqs", "8", "--max-num-batched-tokens", "64"]


def test_latency_has_vllm_fields() -> None:
    result = summarize([1.0, 2.0, 3.0])
    assert (result["avg_latency"], result["latencies"]) == (2.0, [1.0, 2.0, 3.0])
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["50"] == 2.0
    assert text(result).splitlines()[0] == "Avg latency: 2.0 seconds"


def test_latency_counts_iterations_after_warmup(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "latency.json"
    command = ["bench", "latency", "--model", str(tiny_model), *ENGINE, "--input-len", "8", "--output-len", "4"]
    command += ["--batch-size", "2", "--num-iters-warmup", "1", "--num-iters", "3", "--output-json", str(output)]
    assert main(command) == 0
    assert "Avg latency:" in capsys.readouterr().out
    assert len(json.loads(output.read_text())["latencies"]) == 3


def test_throughput_counts_input_and_output_tokens(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "throughput.json"
    command = ["bench", "throughput", "--model", str(tiny_model), *ENGINE, "--input-len", "8", "--output-len", "4"]
    command += ["--num-prompts", "5", "--n", "2", "--output-json", str(output)]
    assert main(command) == 0
    assert "Throughput:" in capsys.readouterr().out
    result = json.loads(output.read_text())
    assert (result["num_requests"], result["total_num_tokens"], result["total_output_tokens"]) == (5, 80, 40)
    assert result["tokens_per_second"] == pytest.approx(80 / result["elapsed_time"])


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_lengths_beyond_the_model_are_rejected(tiny_model: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", kind, "--model", str(tiny_model), *ENGINE, "--input-len", "120", "--output-len", "20"]
    assert main(command) == 2
    assert "--max-model-len" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["latency", "throughput"])
def test_profile_is_written_instead_of_results(
    tiny_model: Path, kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", kind, "--model", str(tiny_model), *ENGINE, "--input-len", "8", "--output-len", "2", "--profile"]
    command += ["--num-iters-warmup", "0"] if kind == "latency" else ["--num-prompts", "1"]
    assert main(command) == 2
    assert "--profiler-dir" in capsys.readouterr().err
    assert main([*command, "--profiler-dir", str(tmp_path)]) == 0
    (trace,) = tmp_path.iterdir()
    assert str(trace) in capsys.readouterr().out

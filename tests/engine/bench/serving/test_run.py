"""The bench serve command with a real server and a tiny model: results, files, exit codes, Ctrl-C."""

import gzip
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from trimtab_engine.cli import main
from trimtab_engine.models.compiled_layers import PROFILED_AS

DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Server:
    port: str
    admin_url: str
    profiles: Path


@pytest.fixture(scope="module")
def server(start_server: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A listening server that may still be loading."""
    folder = tmp_path_factory.mktemp("server")
    profiles = folder / "profiles"
    flags = ["--max-model-len", "256", "--num-gpu-blocks-override", "60", "--max-num-seqs", "8"]
    flags += ["--max-num-batched-tokens", "64", "--profiler-dir", str(profiles)]
    with start_server(folder, *flags) as ports:
        yield Server(ports.url.rpartition(":")[2], ports.admin_url, profiles)


@pytest.fixture
def port(server: Server) -> str:
    return server.port


def arguments(port: str, tiny_model: Path, *more: str) -> list[str]:
    common = ["bench", "serve", "--port", port, "--ready-check-timeout-sec", "60", "--tokenizer", str(tiny_model)]
    return [*common, "--disable-tqdm", "--input-len", "20", "--output-len", "6", *more]


def measured(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_run_writes_figures_file_and_plot(
    port: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--num-prompts", "8", "--request-rate", "50", "--goodput", "ttft:60000", "itl:60000", "-o", "json"]
    more += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "run.json"]
    more += ["--plot", str(tmp_path / "run.svg"), "--metadata", "version=1", "--num-warmups", "1"]
    assert main(arguments(port, tiny_model, *more)) == 0
    result = measured(capsys)
    assert (result["completed"], result["failed"], result["model_id"], result["version"]) == (8, 0, "tiny", "1")
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (8 * 20, 8 * 6)
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert 0 < result["mean_itl_ms"] < result["mean_e2el_ms"]
    assert result["server"]["preemptions"] == 0
    saved = json.loads((tmp_path / "run.json").read_text())
    assert saved["mean_ttft_ms"] == result["mean_ttft_ms"]
    assert saved["output_lens"] == [6] * 8
    assert (tmp_path / "run.svg").stat().st_size > 1000


def test_chat_is_measured(port: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(port, tiny_model, "--backend", "openai-chat", "--num-prompts", "3", "-o", "json")) == 0
    assert measured(capsys)["total_output_tokens"] == 18


def test_trace_is_replayed_with_its_times_and_lengths(
    port: str, tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 1000 * i, "input_length": 1536, "output_length": 100, "hash_ids": [0, 1, 2 + i]} for i in range(4)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--dataset-name", "trace", "--trace-path", str(trace), "--trace-speedup", "20", "-o", "json"]
    assert main(arguments(port, tiny_model, *flags)) == 0
    result = measured(capsys)
    assert result["trace_length_scale"] == pytest.approx(255 / 1636)
    assert result["duration"] > 0.15  # 3 s of trace at 20 × speed
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (4 * 239, 4 * 15)


def test_too_long_load_is_rejected_before_sending(
    port: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(port, tiny_model, "--output-len", "240", "--num-prompts", "1")) == 2
    assert "the longest request has 260 tokens" in capsys.readouterr().err


def test_failed_requests_are_listed_and_exit_1(port: str, tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--num-prompts", "2", "--extra-body", '{"temperature": -1}']
    assert main(arguments(port, tiny_model, *flags)) == 1
    output = capsys.readouterr()
    assert "2 × HTTP 400" in output.err
    assert "Failed requests:                         2" in output.out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--model", "nobody"), "does not serve the model 'nobody'; set --model to one of: tiny"),
        (("--dataset-name", "sharegpt"), "--dataset-path"),
        (("--dataset-name", "trace"), "--trace-path"),
        (("--header", "x"), "NAME=VALUE"),
        (("--metadata", "x"), "NAME=VALUE"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
        (("--plot", "x.txt"), "must end in"),
        (("--profile",), "no profiler at"),
    ],
)
def test_invalid_run_prints_one_line(
    port: str, tiny_model: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], message: str
) -> None:
    assert main(arguments(port, tiny_model, "--num-prompts", "1", *flags)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_missing_server_error_names_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--port", "1", "--num-prompts", "1"]) == 2
    assert "check the server" in capsys.readouterr().err


def test_profile_of_the_run_is_written_by_server(
    server: Server, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--num-prompts", "2", "--profile", "--admin-url", server.admin_url]
    assert main(arguments(server.port, tiny_model, *flags)) == 0
    (trace,) = server.profiles.iterdir()
    names = {event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert names & {PROFILED_AS, "aten::linear"}, "neither compiled layers nor torch matmuls"
    assert httpx.post(f"{server.admin_url}/stop_profile", timeout=DEADLINE_SECONDS).status_code == 400


def num_answered(port: str) -> float:
    """Return the total number of requests completed by the server."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=DEADLINE_SECONDS).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:request_success_total{"))


def test_ctrl_c_prints_partial_results(port: str, tiny_model: Path, tmp_path: Path) -> None:
    """Two requests arrive at once, a third after a minute, with one at a time: when the second is answered, the first
    has been received.
    """
    trace = tmp_path / "trace.csv"
    times = ("18:00:00.0", "18:00:00.0", "18:01:00.0")
    rows = "".join(f"2023-11-16 {time},20,6\n" for time in times)
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    before, started = num_answered(port), time.monotonic()
    flags = ["--dataset-name", "trace", "--trace-path", str(trace), "-o", "json", "--max-concurrency", "1"]
    command = [sys.executable, "-m", "trimtab_engine.cli", *arguments(port, tiny_model, *flags)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while num_answered(port) < before + 2:
            assert time.monotonic() < started + DEADLINE_SECONDS
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_SECONDS)
    assert process.returncode == 130
    result = json.loads(output)
    assert result["completed"] in (1, 2)
    assert (result["failed"], result["interrupted"]) == (0, True)
    assert result["duration"] < DEADLINE_SECONDS


def test_load_generator_imports_no_torch() -> None:
    code = "import sys, trimtab_engine.bench.serving.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=DEADLINE_SECONDS).returncode == 0

"""The autotune command with a real server: files, resuming, restored values, rejected arguments."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from trimtab_engine.bench.autotune.engine import ConcurrentChange, EngineAddress, LiveEngine
from trimtab_engine.cli import main

DEADLINE_SECONDS = 120.0
MODELS = Path(os.environ.get("TRIMTAB_CACHE", "~/.cache/trimtab")).expanduser() / "models"
TUNED = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")


@dataclass(frozen=True)
class Server:
    url: str
    admin_url: str
    model: Path

    def config(self) -> dict[str, Any]:
        answer: dict[str, Any] = httpx.get(f"{self.admin_url}/admin/v1/config", timeout=60).json()
        return answer

    def patch(self, values: dict[str, float]) -> None:
        httpx.patch(f"{self.admin_url}/admin/v1/config", json=values, timeout=60).raise_for_status()

    def tuned(self) -> dict[str, float]:
        return {name: self.config()["desired"][name] for name in TUNED}


@pytest.fixture(scope="module")
def server(start_server: Any, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A ready server with headroom above its start values."""
    flags = ["--max-model-len", "128", "--device-memory-bytes", "1Gi", "--gpu-memory-utilization", "0.5"]
    flags += ["--gpu-memory-utilization-cap", "0.52", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    with start_server(tmp_path_factory.mktemp("server"), *flags) as ports:
        ports.wait_until_ready()
        yield Server(ports.url, ports.admin_url, tiny_model)


def arguments(server: Server, folder: Path, *more: str) -> list[str]:
    common = ["autotune", server.url, "--admin-url", server.admin_url]
    common += ["--num-seqs-list", "1,4", "--num-batched-tokens-list", "8,32", "--num-prompts", "6"]
    common += ["--tokenizer", str(server.model)]
    return [*common, "--input-len", "12", "--output-len", "3", "--result-dir", str(folder), *more]


def test_autotune_reports_values_and_restores_start_values(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(server, tmp_path, "--name", "chat", "--namespace", "prod")) == 0
    captured = capsys.readouterr()
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["found"]) == set(TUNED)
    assert report["found"]["gpu_memory_utilization"] == 0.52  # the cap works
    assert len(report["candidates"]) == 4
    assert "Final run" in captured.out
    assert "about" in captured.err  # estimated remaining time
    patch = yaml.safe_load((tmp_path / "patch.yaml").read_text())
    assert patch["metadata"] == {"name": "chat", "namespace": "prod"}
    assert patch["spec"]["engine"]["maxNumSeqs"] == report["found"]["max_num_seqs"]
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert server.tuned() == {"gpu_memory_utilization": 0.5, "max_num_seqs": 4, "max_num_batched_tokens": 32}

    generation = server.config()["generation"]
    assert main([*arguments(server, tmp_path), "-o", "json"]) == 0  # all results are known: no trial is run
    again = capsys.readouterr()
    assert json.loads(again.out)["found"] == report["found"]
    assert again.err.count("(from state.json)") == len(report["runs"])
    assert server.config()["generation"] == generation

    assert main(arguments(server, tmp_path, "--num-prompts", "7")) == 2
    assert "num_prompts was 6 and is 7 now" in capsys.readouterr().err


def test_keep_leaves_best_values_in_engine(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start = server.tuned()
    assert main(arguments(server, tmp_path, "--num-seqs-list", "2", "--num-batched-tokens-list", "16", "--keep")) == 0
    kept = server.tuned()
    server.patch(start)
    assert kept == {"gpu_memory_utilization": 0.52, "max_num_seqs": 2, "max_num_batched_tokens": 16}


def test_unreachable_limits_exit_1_without_patch(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "patch.yaml").write_text("earlier search")
    assert main(arguments(server, tmp_path, "--limits", "e2el:0.001")) == 1
    assert "No candidate meets the limits. The closest is" in capsys.readouterr().out
    assert not (tmp_path / "patch.yaml").exists()


def test_shared_prefixes_give_requested_cache_hits(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--input-len", "40", "--min-cache-hit", "0.4", "--num-seqs-list", "4", "--num-batched-tokens-list", "32")
    assert main(arguments(server, tmp_path, *more)) == 0
    final = json.loads((tmp_path / "report.json").read_text())["final"]
    assert final["figures"]["prefix_cache_hit_rate"] >= 0.4
    assert "after 16 shared ones" in capsys.readouterr().out


def test_ctrl_c_restores_start_values_and_command_resumes(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    start = server.tuned()
    words = arguments(server, tmp_path, "--output-len", "20", "--num-prompts", "40")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "trimtab_engine.cli", *words]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        first = process.stderr.readline()  # of the first run; another one is running
        process.send_signal(signal.SIGINT)
        rest = process.stderr.read()
        assert process.wait(DEADLINE_SECONDS) == 130, first + rest
    assert "the same command resumes from" in rest
    assert server.tuned() == start
    assert main(words) == 0
    assert "(from state.json)" in capsys.readouterr().err


def test_failing_requests_end_search_with_reason(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments(server, tmp_path, "--temperature", "-1")) == 2
    output = capsys.readouterr().err
    assert "6 × HTTP 400" in output
    assert "all requests of the first run failed" in output


async def test_change_by_another_client_is_detected_and_kept(server: Server) -> None:
    start = server.tuned()
    engine = await LiveEngine.connect(EngineAddress(server.url, server.admin_url, {}, {}))
    assert await engine.set(start | {"max_num_seqs": 3}) is None
    await engine.check_unchanged()
    theirs: dict[str, float] = {"max_num_seqs": 2}
    server.patch(theirs)
    with pytest.raises(ConcurrentChange, match=r"set spec\.tuning\.mode to Off"):
        await engine.check_unchanged()
    with pytest.raises(ConcurrentChange):
        await engine.set(start)
    assert server.tuned() == start | theirs
    server.patch(start)


def test_no_run_starts_after_max_seconds(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(server, tmp_path, "--max-seconds", "0")) == 1
    assert "--max-seconds 0 reached" in capsys.readouterr().err
    assert json.loads((tmp_path / "report.json").read_text())["found"] is None


def error_line(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """Return the single line that a rejected command prints."""
    try:
        code: Any = main(["autotune", *words])
    except SystemExit as end:
        code = end.code
    captured = capsys.readouterr()
    assert code == 2, captured.err
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["http://127.0.0.1:1"], "set --admin-url http://HOST:PORT"),
        (["http://127.0.0.1:1", "--admin-url", "http://127.0.0.1:1", "--serve-flags=--device=cpu"], "--serve-flags"),
        (["m", "--limits", "ttft"], "such as ttft:500"),
        (["m", "--trace-path", "x"], "--trace-path is not supported by autotune"),
        (["m", "--request-rate", "4"], "the search determines the rate"),
        (["m", "--max-num-seqs", "4"], "use --num-seqs-list"),
        (["m", "--keep"], "remove it"),
        (["m", "--namespace", "n"], "set both"),
        (["m", "--max-utilization", "0.925"], "not a multiple of 0.01"),
        (["m", "--num-seqs-list", "4,x"], "'x' is not an integer"),
        (["m", "--result-dir", "/dev/null/x"], "--result-dir /dev/null/x"),
        (["m"], "there is no model at m"),
        (["gs://bucket/m"], "models of gs:// are not supported"),
        (["m", "--serve-flags='--device"], "--serve-flags"),
        (["m", "--header", "x"], "use NAME=VALUE"),
        (["m", "--dataset-name", "custom"], "--dataset-name custom requires --dataset-path FILE"),
        (["m", "--dataset-name", "custom", "--dataset-path", "x.jsonl"], "x.jsonl: no such file"),
        (["m", "--tokenizer", "x"], "--tokenizer x: no such folder"),
        (["http://127.0.0.1:1", "--admin-url", "http://127.0.0.1:1"], "check the server"),
    ],
)
def test_invalid_arguments_print_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: list[str], expected: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expected in error_line(capsys, *words)
    assert list(tmp_path.iterdir()) == [], "no files are left"


def test_failed_server_start_is_reported_without_leftovers(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    folder = tmp_path / "autotune"
    words = ["autotune", str(tiny_model), "--serve-flags=--device cpu", "--input-len=64", "--result-dir"]
    assert main([*words, str(folder)]) == 2
    assert "no safetensors or GGUF file in it" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.model
@pytest.mark.timeout(600)
def test_real_model_is_tuned_in_its_own_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = "--device cpu --device-memory-bytes 2Gi --gpu-memory-utilization 0.7 --max-model-len 256 --max-num-seqs 4"
    words = ["autotune", str(MODELS / "SmolLM2-135M-Instruct"), f"--serve-flags={flags} --max-num-batched-tokens 64"]
    words += ["--max-utilization", "0.75", "--num-seqs-list", "2,4", "--num-batched-tokens-list", "64"]
    words += ["--input-len", "16", "--output-len", "4", "--num-prompts", "4", "--result-dir", str(tmp_path)]
    assert main([*words, "--limits", "e2el:600000"]) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["model"] == "SmolLM2-135M-Instruct"
    assert report["found"]["gpu_memory_utilization"] == 0.75
    assert (tmp_path / "patch.yaml").exists()


def test_lengths_beyond_the_model_are_rejected_before_a_server_starts(
    tmp_path: Path, tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "result"
    words = ["autotune", str(tiny_model), "--input-len", "1000000", "--output-len", "5", "--result-dir", str(folder)]
    assert main(words) == 2
    assert "--input-len 1000000 and --output-len 5: together above the model's" in capsys.readouterr().err
    assert not folder.exists()

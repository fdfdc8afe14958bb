"""Layouts as they are installed: the command, the API server, real cores and ranks on a tiny random model."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors.torch import save_file
from trimtab_engine.model_config import parse_model_config
from trimtab_engine.models.checkpoint import expected_shapes

DEADLINE_SECONDS = 180.0  # generous: several processes each load torch, perhaps on a busy machine
DEATH_SECONDS = 10.0  # within which a dead rank ends the engine
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}
MIXTURE = MODEL | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
PROMPTS = [f"{word} is what they said " * (1 + number % 3) for number, word in enumerate("abcdefghijkl")]


class Engine:
    """A running `trimtab-engine serve` on ports that the kernel chose."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        command = [sys.executable, "-m", "trimtab_engine.cli", "serve", str(model), "--served-model-name", "tiny"]
        command += ["--device", "cpu", "--cpu-threads", "1", "--max-model-len", "256"]
        command += ["--num-gpu-blocks-override", "40", "--max-num-seqs", "4", "--max-num-batched-tokens", "64"]
        command += ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--shutdown-timeout", "10"]
        command += ["--device-memory-bytes", "4Gi", *flags]
        if not any(model.glob("*.safetensors")):
            command += ["--load-format", "dummy"]
        self.log = log
        with log.open("wb") as stream:
            self.process = subprocess.Popen(command, stderr=stream)
        self.wait_for(lambda: len(self._ports()) == 2, "two listening ports")
        self.http, self.admin = (
            httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=DEADLINE_SECONDS) for port in self._ports()
        )
        self.wait_for(lambda: self.http.get("/readyz").status_code == 200, "readiness")

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            text = self.log.read_text()[-1000:]
            assert self.process.poll() is None, f"ended while waiting for {what}: {text}"
            assert time.monotonic() < deadline, f"waited for {what}: {text}"
            time.sleep(0.01)

    def _ports(self) -> list[str]:
        return re.findall(r"listens on 127\.0\.0\.1 port (\d+)\n", self.log.read_text())

    def layout(self) -> dict[str, Any]:
        layout: dict[str, Any] = self.admin.get("/admin/v1/layout").json()
        return layout

    def post(self, prompt: str, max_tokens: int = 20, rank: str | None = None) -> httpx.Response:
        body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        headers = {} if rank is None else {"X-data-parallel-rank": rank}
        return self.http.post("/v1/completions", json=body, headers=headers)

    def texts(self) -> list[str]:
        """What all prompts yield, asked for at once."""
        answers: dict[str, str] = {}

        def ask(prompt: str) -> None:
            answers[prompt] = self.post(prompt).json()["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_SECONDS)
        return [answers[prompt] for prompt in PROMPTS]

    def metric(self, name: str) -> dict[str, float]:
        """Values of a family by engine."""
        lines = self.http.get("/metrics").text.splitlines()
        found = [line for line in lines if line.startswith(name + "{")]
        return {re.findall(r'engine="(\d+)"', line)[0]: float(line.split()[-1]) for line in found}

    def end(self) -> None:
        self.http.close()
        self.admin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@pytest.fixture(scope="module")
def tiny_model(tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    for file in tokenizer_folder.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


@pytest.fixture(scope="module")
def tiny_mixture(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts with random weights large enough for its experts to matter."""
    folder = tmp_path_factory.mktemp("mixture")
    for file in tiny_model.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "config.json").write_text(json.dumps(MIXTURE))
    generator = torch.Generator().manual_seed(5)
    tensors = {}
    for name, shape in expected_shapes(parse_model_config(MIXTURE, {}, "config.json")).items():
        noise = torch.randn(shape, generator=generator) * (0.3 if len(shape) > 1 else 0.1)
        tensors[name] = noise + 1.0 if "norm" in name else noise
    save_file(tensors, folder / "model.safetensors")
    return folder


Serve = Callable[..., Engine]


@pytest.fixture
def serve(tiny_model: Path, tmp_path: Path) -> Iterator[Serve]:
    engines: list[Engine] = []

    def start(*flags: str, model: Path | None = None) -> Engine:
        engines.append(Engine(model or tiny_model, tmp_path / f"log-{len(engines)}", *flags))
        return engines[-1]

    yield start
    for engine in engines:
        engine.end()


@pytest.fixture(scope="module")
def expected(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What one rank yields."""
    engine = Engine(tiny_model, tmp_path_factory.mktemp("one") / "log")
    texts = engine.texts()
    engine.end()
    return texts


@pytest.fixture(scope="module")
def expected_of_mixture(tiny_mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    engine = Engine(tiny_mixture, tmp_path_factory.mktemp("one-mixture") / "log")
    texts = engine.texts()
    engine.end()
    return texts


def test_two_cores_of_two_ranks_each_give_the_text_of_one_and_share_the_work(serve: Serve, expected: list[str]) -> None:
    engine = serve("-dp", "2", "-tp", "2")
    assert engine.texts() == expected
    layout = engine.layout()
    assert (layout["world_size"], layout["data_parallel_size"], layout["tensor_parallel_size"]) == (4, 2, 2)
    assert [(row["rank"], row["data"], row["tensor"]) for row in layout["ranks"]] == [
        (0, 0, 0), (1, 0, 1), (2, 1, 0), (3, 1, 1),
    ]  # fmt: skip
    assert len({row["pid"] for row in layout["ranks"]}) == 4
    assert engine.metric("trimtab_layout_ranks") == {"0": 2.0, "1": 2.0}
    generated = engine.metric("vllm:generation_tokens_total")
    assert sum(generated.values()) == 20 * len(PROMPTS)
    assert min(generated.values()) >= 20 * 3, "four seats each: neither core had all"


@pytest.mark.parametrize(
    "flags",
    [
        ("-dp", "2"),
        ("-dp", "2", "--enable-expert-parallel"),
        ("-dp", "2", "-tp", "2", "--enable-expert-parallel", "--expert-placement-strategy", "round_robin"),
        ("-dp", "2", "-pp", "2"),
    ],
    ids=" ".join,
)
def test_a_mixture_of_experts_over_data_parallel_cores_gives_the_text_of_one_rank(
    flags: tuple[str, ...], serve: Serve, tiny_mixture: Path, expected_of_mixture: list[str]
) -> None:
    engine = serve(*flags, model=tiny_mixture)
    assert engine.texts() == expected_of_mixture
    assert engine.post(PROMPTS[0]).json()["choices"][0]["text"] == expected_of_mixture[0], "alone, the others idle"
    experts = [tuple(row["experts"]) for row in engine.layout()["ranks"]]
    if "--enable-expert-parallel" in flags:
        assert sorted(expert for held in experts for expert in held) == list(range(6)), "each expert is held once"
    else:
        assert set(experts) == {tuple(range(6))}
    generated = engine.metric("vllm:generation_tokens_total")
    assert min(generated.values()) >= 20 * 3, "both cores served"


def test_a_request_can_name_its_core_and_a_change_reaches_all(serve: Serve) -> None:
    engine = serve("-dp", "2")
    for _ in range(3):
        assert engine.post("a", rank="1").status_code == 200
    assert engine.metric("vllm:generation_tokens_total").get("0", 0.0) == 0.0
    wrong = engine.post("a", rank="2")
    assert (wrong.status_code, "ranks here are 0 to 1" in wrong.text) == (400, True)
    assert engine.admin.patch("/admin/v1/config", json={"max_num_seqs": 2}).status_code == 200
    engine.wait_for(
        lambda: engine.metric("trimtab_config_generation") == {"0": 2.0, "1": 2.0}, "the change in both cores"
    )


@pytest.mark.parametrize("flags", [("-tp", "2"), ("-pp", "2")], ids=" ".join)
def test_a_rank_that_is_killed_ends_the_engine_by_name_and_requests_get_a_5xx(
    flags: tuple[str, ...], serve: Serve
) -> None:
    engine = serve(*flags)
    core = max(row["rank"] for row in engine.layout()["ranks"]) if flags[0] == "-pp" else 0
    victim = next(row for row in engine.layout()["ranks"] if row["rank"] != core)
    answers: list[httpx.Response] = []
    asking = threading.Thread(target=lambda: answers.append(engine.post("a", max_tokens=250)))
    asking.start()
    engine.wait_for(lambda: engine.metric("vllm:num_requests_running") == {"0": 1.0}, "the request to run")
    os.kill(victim["pid"], signal.SIGKILL)
    killed = time.monotonic()
    assert engine.process.wait(DEATH_SECONDS) == 1
    assert time.monotonic() - killed < DEATH_SECONDS
    asking.join(DEADLINE_SECONDS)
    assert [answer.status_code // 100 for answer in answers] == [5]
    last = engine.log.read_text().strip().splitlines()[-1]
    assert re.fullmatch(
        rf"trimtab-engine: .*rank {victim['rank']} \(.*pid {victim['pid']}\) was killed by SIGKILL", last
    )
    assert not Path(f"/proc/{victim['pid']}").exists()


@pytest.fixture
def second_node(tiny_model: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts the other node of two: the same flags, and nothing of its own."""
    nodes: list[subprocess.Popen[bytes]] = []

    def start(*flags: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "trimtab_engine.cli", "serve", str(tiny_model), "--load-format", "dummy"]
        command += [
            "--device",
            "cpu",
            "--cpu-threads",
            "1",
            "--max-model-len",
            "256",
            "--num-gpu-blocks-override",
            "40",
        ]
        command += ["--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--device-memory-bytes", "4Gi", *flags]
        with (tmp_path / "node").open("wb") as stream:
            nodes.append(subprocess.Popen([*command, "--node-rank", "1"], stderr=stream))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.poll() is None:
            node.kill()
        node.wait()


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def test_two_nodes_give_the_text_of_one_rank_and_end_together(
    serve: Serve, second_node: Callable[..., subprocess.Popen[bytes]], expected: list[str], tmp_path: Path
) -> None:
    flags = ("-pp", "2", "--nnodes", "2", "--master-port", free_port())
    node = second_node(*flags)  # it waits for node 0, whichever comes first
    engine = serve(*flags)
    assert engine.texts() == expected
    rows = engine.layout()["ranks"]
    assert [tuple(row["layers"]) for row in rows] == [(0, 0), (1, 1)]
    children = Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split()
    assert [str(rows[0]["pid"])] == children, "node 1 has the first stage"
    os.kill(int(children[0]), signal.SIGKILL)
    assert engine.process.wait(2 * DEATH_SECONDS) == 1
    assert node.wait(2 * DEATH_SECONDS) == 1
    assert "node 1 ends: a rank of the engine has ended" in (tmp_path / "node").read_text()
    assert "a rank of the engine died: rank 0 (" in engine.log.read_text().splitlines()[-1]


def test_a_node_whose_engine_core_is_gone_ends(
    serve: Serve, second_node: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    flags = ("-tp", "2", "--nnodes", "2", "--master-port", free_port())
    node = second_node(*flags)
    engine = serve(*flags)
    core = next(row for row in engine.layout()["ranks"] if row["rank"] == 0)
    os.kill(core["pid"], signal.SIGSTOP)  # as a node that is paused: nobody closes a connection
    try:
        assert node.wait(2 * DEATH_SECONDS) == 1
    finally:
        os.kill(core["pid"], signal.SIGKILL)
    assert "rank 1 ends: the engine core is gone" in (tmp_path / "node").read_text()


def test_a_node_that_is_told_to_end_serves_until_the_engine_has_drained(
    serve: Serve, second_node: Callable[..., subprocess.Popen[bytes]], expected: list[str]
) -> None:
    """All pods of a group get SIGTERM at once: the workers must not end before the leader's last request."""
    flags = ("-tp", "2", "--nnodes", "2", "--master-port", free_port(), "--rendezvous-id", "r1")
    node = second_node(*flags)
    engine = serve(*flags)
    node.terminate()
    assert engine.texts() == expected
    engine.process.terminate()
    assert engine.process.wait(2 * DEATH_SECONDS) == 0
    assert node.wait(2 * DEATH_SECONDS) == 0


def test_a_node_that_waits_for_its_engine_core_ends_when_told(
    second_node: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    node = second_node("-tp", "2", "--nnodes", "2", "--master-port", free_port())
    deadline = time.monotonic() + DEADLINE_SECONDS
    while "waiting for the engine core at" not in (tmp_path / "node").read_text():
        assert time.monotonic() < deadline
        assert node.poll() is None
        time.sleep(0.05)
    node.terminate()
    assert node.wait(2 * DEATH_SECONDS) == 0

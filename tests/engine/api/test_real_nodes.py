"""Layouts over several nodes, simulated by processes on the loopback interface that share nothing but the network."""

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import httpx
import pytest
import waiting
from trimtab_engine.ipc.network import ReservedPorts, interface_of

if TYPE_CHECKING:
    from tests.engine.api.conftest import RealEngine

DEADLINE_SECONDS = 120.0  # generous: several processes each load torch on a possibly busy machine
DEATH_SECONDS = 60.0  # for a dead core or node to stop the replica: usually seconds, more on a busy machine
Serve = Callable[..., "RealEngine"]
StartProgram = Callable[[list[str], BinaryIO], "subprocess.Popen[bytes]"]
FOUR_SLOTS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "64", "--device-memory-bytes", "4Gi")


class Node:
    """The second of two nodes, with the same flags."""

    def __init__(self, command: list[str], log: Path, start: StartProgram) -> None:
        self._log = log
        with log.open("wb") as stream:
            self.process = start([*command, "--node-rank", "1"], stream)

    @property
    def pids(self) -> list[int]:
        """Process IDs that it has started."""
        pid = self.process.pid
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]

    @property
    def text(self) -> str:
        return self._log.read_text()

    def wait_for_text(self, part: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while part not in self.text:
            assert time.monotonic() < deadline, self.text[-1000:]
            assert self.process.poll() is None, self.text[-1000:]
            time.sleep(0.05)

    @property
    def last_line(self) -> str:
        return self.text.strip().splitlines()[-1]


StartNode = Callable[..., Node]


@pytest.fixture
def second_node(
    tiny_model: Path, tmp_path: Path, node_command: Callable[[Path], list[str]], program: StartProgram
) -> Iterator[StartNode]:
    nodes: list[Node] = []

    def start(*flags: str, model: Path | None = None) -> Node:
        command = [*node_command(model or tiny_model), *FOUR_SLOTS, *flags]
        nodes.append(Node(command, tmp_path / f"node-{len(nodes)}", program))
        return nodes[-1]

    yield start
    for node in nodes:
        if node.process.poll() is None:
            node.process.kill()
        node.process.wait()


@pytest.fixture
def two_nodes() -> Iterator[tuple[str, ...]]:
    """Yield the flags of both nodes, with a port reserved for the test."""
    with ReservedPorts("127.0.0.1") as ports:
        yield "--nnodes", "2", "--master-port", str(ports.take())


class StartedEngine:
    """An engine that starts in the background."""

    def __init__(self, start: Callable[[], "RealEngine"]) -> None:
        self._started: list[RealEngine] = []
        self._thread = threading.Thread(target=lambda: self._started.append(start()))
        self._thread.start()

    def started(self) -> "RealEngine":
        self._thread.join()
        return self._started[0]


class RunningRequest:
    """A long running request; with many prompts it outlasts any change to its engine."""

    def __init__(self, engine: "RealEngine", rank: str, num_prompts: int = 16) -> None:
        self._answers: list[httpx.Response] = []
        prompts = ["a"] * num_prompts
        self._thread = threading.Thread(
            target=lambda: self._answers.append(engine.post(prompts, max_tokens=250, rank=rank))
        )
        self._thread.start()
        engine.wait_for(lambda: engine.metric("vllm:num_requests_running").get(rank, 0.0) > 0, "the request to run")

    def status(self) -> int:
        self._thread.join(DEADLINE_SECONDS)
        return self._answers[0].status_code

    def is_whole(self) -> bool:
        return self.status() == 200 and all(
            choice["finish_reason"] == "length" for choice in self._answers[0].json()["choices"]
        )


def test_ranks_on_two_nodes_give_same_text_and_stop_together(
    serve: Serve, second_node: StartNode, two_nodes: tuple[str, ...], expected: dict[str, str]
) -> None:
    node = second_node("-pp", "2", *two_nodes)  # waits for node 0, in any order
    engine = serve("-pp", "2", *two_nodes)
    assert engine.texts() == expected
    rows = engine.layout()["ranks"]
    assert [tuple(row["layers"]) for row in rows] == [(0, 0), (1, 1)]
    assert node.pids == [rows[0]["pid"]], "node 1 has the first stage"
    os.kill(node.pids[0], signal.SIGKILL)
    assert engine.process.wait(DEATH_SECONDS) == 1
    assert node.process.wait(DEATH_SECONDS) == 1
    assert "node 1 ends: a rank of the engine has ended" in node.last_line
    assert "a rank of the engine died: rank 0 (" in engine.log.read_text().splitlines()[-1]


@pytest.mark.skipif(interface_of("::1") is None, reason="this machine has IPv6 switched off")
@pytest.mark.parametrize("layout", ["-pp", "-dp"])  # ranks of one core, and cores
@pytest.mark.usefixtures("forked")
def test_nodes_connect_over_ipv6(
    serve: Serve, second_node: StartNode, two_nodes: tuple[str, ...], expected: dict[str, str], layout: str
) -> None:
    flags = (layout, "2", *two_nodes, "--master-addr", "::1")
    second_node(*flags)
    assert serve(*flags).texts() == expected


@pytest.mark.parametrize("layout", ["-tp", "-dp"])  # ranks of one core, and cores
@pytest.mark.usefixtures("forked")
def test_nodes_with_one_secret_connect_and_others_wait(
    serve: Serve,
    second_node: StartNode,
    two_nodes: tuple[str, ...],
    expected: dict[str, str],
    tmp_path: Path,
    layout: str,
) -> None:
    flags = {}
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(f"the secret that is {name}")
        flags[name] = (layout, "2", *two_nodes, "--rendezvous-secret-file", str(tmp_path / name))
    stranger = second_node(*flags["theirs"])
    engine = StartedEngine(lambda: serve(*flags["ours"]))
    stranger.wait_for_text("is not this node's replica: the secrets differ")
    node = second_node(*flags["ours"])
    assert engine.started().texts() == expected
    assert len(engine.started().layout()["ranks"]) == 2
    assert stranger.process.poll() is None
    engine.started().process.terminate()
    node.process.terminate()
    assert engine.started().process.wait(DEATH_SECONDS) == 0
    assert node.process.wait(DEATH_SECONDS) == 0


def test_node_without_engine_core_exits(serve: Serve, second_node: StartNode, two_nodes: tuple[str, ...]) -> None:
    node = second_node("-tp", "2", *two_nodes)
    engine = serve("-tp", "2", *two_nodes)
    core = next(row for row in engine.layout()["ranks"] if row["rank"] == 0)
    os.kill(core["pid"], signal.SIGSTOP)  # like a paused node: no connection is closed
    try:
        assert node.process.wait(DEATH_SECONDS) == 1
    finally:
        os.kill(core["pid"], signal.SIGKILL)


def test_terminated_worker_serves_until_engine_has_drained(
    serve: Serve, second_node: StartNode, expected: dict[str, str], two_nodes: tuple[str, ...]
) -> None:
    """All pods of a group get SIGTERM at once: the workers must not exit before the leader's last request."""
    flags = ("-tp", "2", "--rendezvous-id", "r1", *two_nodes)
    node = second_node(*flags)
    engine = serve(*flags)
    node.process.terminate()
    assert engine.texts() == expected
    engine.process.terminate()
    assert engine.process.wait(DEATH_SECONDS) == 0
    assert node.process.wait(DEATH_SECONDS) == 0


def test_worker_waits_for_its_signal_after_orderly_engine_exit(
    serve: Serve, second_node: StartNode, two_nodes: tuple[str, ...]
) -> None:
    """A container that exits before its pod is deleted is restarted, and could miss its SIGTERM."""
    node = second_node("-tp", "2", *two_nodes)
    engine = serve("-tp", "2", *two_nodes)
    engine.process.terminate()
    assert engine.process.wait(DEATH_SECONDS) == 0
    waiting.until(lambda: not node.pids, "the node's rank to exit")
    assert node.process.poll() is None
    node.process.terminate()
    assert node.process.wait(DEATH_SECONDS) == 0
    assert "the engine core does not answer" not in node.text, "the engine's last message was lost"


def test_worker_waiting_for_core_exits_on_signal(second_node: StartNode, two_nodes: tuple[str, ...]) -> None:
    node = second_node("-tp", "2", *two_nodes)
    node.wait_for_text("waiting for the engine core at")
    node.process.terminate()
    assert node.process.wait(DEATH_SECONDS) == 0


def test_cores_on_two_nodes_share_work_and_a_kill_stops_all(
    serve: Serve, second_node: StartNode, two_nodes: tuple[str, ...], expected: dict[str, str]
) -> None:
    stranger = second_node("-dp", "2", *two_nodes, "--max-num-seqs", "5")
    node = second_node("-dp", "2", *two_nodes)
    engine = serve("-dp", "2", *two_nodes)
    assert engine.texts() == expected
    rows = engine.layout()["ranks"]
    assert [(row["rank"], row["data"]) for row in rows] == [(0, 0), (1, 1)]
    assert node.pids == [rows[1]["pid"]]
    generated = engine.metric("vllm:generation_tokens_total")
    assert min(generated.values()) >= 20 * 3, "four slots each: neither core had all"
    assert stranger.process.wait(DEADLINE_SECONDS) == 2
    assert "node 1 ends: --max-num-seqs is 5 there and 4 on node 0; start all nodes with the same" in stranger.last_line

    running = RunningRequest(engine, rank="1", num_prompts=64)
    os.kill(node.pids[0], signal.SIGKILL)
    assert engine.process.wait(DEATH_SECONDS) == 1
    assert node.process.wait(DEATH_SECONDS) == 1
    assert running.status() // 100 == 5
    cause = rf"engine core 1 \(\S+, pid {rows[1]['pid']}\) ended unexpectedly \(killed by signal 9\), .*"
    assert re.fullmatch(f"trimtab-engine: {cause}", engine.log.read_text().strip().splitlines()[-1])
    assert re.fullmatch(f"trimtab-engine: node 1 ends: the engine has ended: {cause}", node.last_line)


def test_silent_node_stops_replica_with_its_name_and_5xx(
    serve: Serve, second_node: StartNode, two_nodes: tuple[str, ...]
) -> None:
    node = second_node("-dp", "2", *two_nodes)
    engine = serve("-dp", "2", *two_nodes)
    core = node.pids[0]
    for pid in (core, node.process.pid):  # like a paused machine: no connection is closed
        os.kill(pid, signal.SIGSTOP)
    answer = engine.post("a", rank="1")
    assert (answer.status_code // 100, engine.process.wait(DEATH_SECONDS)) == (5, 1)
    last = engine.log.read_text().strip().splitlines()[-1]
    assert re.fullmatch(
        rf"trimtab-engine: node 1 \(\S+, pid {node.process.pid}\) is lost: it has been silent for 5 s", last
    )
    os.kill(node.process.pid, signal.SIGCONT)
    assert node.process.wait(DEATH_SECONDS) == 1
    assert "node 1 ends: the engine has ended: node 1" in node.last_line
    waiting.until_gone([core])


def test_terminated_worker_drains_replica_before_leader_signal(
    serve: Serve, second_node: StartNode, two_nodes: tuple[str, ...]
) -> None:
    node = second_node("-dp", "2", *two_nodes)
    engine = serve("-dp", "2", *two_nodes)
    running = RunningRequest(engine, rank="1")
    node.process.terminate()
    time.sleep(0.3)  # its message has arrived by then, as when all pods of a replica are deleted
    engine.process.terminate()
    assert engine.process.wait(DEADLINE_SECONDS) == 0
    assert running.is_whole()
    assert node.process.wait(DEATH_SECONDS) == 0


def test_moe_over_two_nodes_equals_one_rank_and_stops_with_node_0(
    serve: Serve,
    second_node: StartNode,
    two_nodes: tuple[str, ...],
    tiny_moe: Path,
    expected_of_moe: dict[str, str],
) -> None:
    flags = ("-dp", "2", "--enable-expert-parallel", *two_nodes)
    node = second_node(*flags, model=tiny_moe)
    engine = serve(*flags, model=tiny_moe)
    assert engine.texts() == expected_of_moe
    rows = engine.layout()["ranks"]
    assert [row["experts"] for row in rows] == [[0, 1, 2], [3, 4, 5]]
    assert node.pids == [rows[1]["pid"]]
    engine.process.kill()
    assert node.process.wait(DEATH_SECONDS) == 1
    assert node.last_line == "trimtab-engine: node 1 ends: node 0, which runs the engine, is lost"

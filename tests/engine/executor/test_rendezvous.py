"""Ranks find their own core, wait for it as long as it takes, and never meet another's."""

import logging
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.executor import rendezvous
from trimtab_engine.executor.messages import Hello, RankTaken, ToHello, Welcome
from trimtab_engine.executor.rendezvous import announce_core, find_core, open_store
from trimtab_engine.executor.worker_monitor import WorkerMonitor
from trimtab_engine.ipc.network import ReservedPorts
from trimtab_engine.ipc.shared_secret import GREETING, SharedSecret

WAIT_SECONDS = 120.0


def a_config(rendezvous_id: str, secret_file: Path | None = None) -> EngineConfig:
    return EngineConfig(
        model="m",
        device="cpu",
        gpu_memory_utilization="0.9",
        gpu_memory_utilization_cap="0.9",
        max_num_seqs=1,
        max_num_seqs_cap=1,
        max_num_batched_tokens=16,
        max_num_batched_tokens_cap=16,
        rendezvous_id=rendezvous_id,
        tensor_parallel_size=2,
        nnodes=2,
        rendezvous_secret_file=None if secret_file is None else str(secret_file),
    )


@pytest.fixture
def address() -> Iterator[str]:
    """Yield an address reserved for a store."""
    with ReservedPorts("127.0.0.1") as ports:
        yield f"tcp:127.0.0.1:{ports.take()}"


class Searching:
    """find_core() in a thread."""

    def __init__(self, address: str, rendezvous_id: str, secret_file: Path | None = None) -> None:
        self.found: queue.Queue[str] = queue.Queue()
        config = a_config(rendezvous_id, secret_file)
        threading.Thread(target=self._run, args=(address, config), daemon=True).start()

    def _run(self, address: str, config: EngineConfig) -> None:
        self.found.put(find_core(address, config)[1])


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> Iterator["queue.Queue[str]"]:
    """Yield the log lines of the search."""
    lines: queue.Queue[str] = queue.Queue()
    handler = logging.Handler()
    handler.emit = lambda record: lines.put(record.getMessage())  # type: ignore[method-assign]
    monkeypatch.setattr(rendezvous, "RETRY_SECONDS", 0.05)
    rendezvous.logger.addHandler(handler)
    rendezvous.logger.setLevel(logging.INFO)
    yield lines
    rendezvous.logger.removeHandler(handler)


def await_words(said: "queue.Queue[str]", words: str) -> None:
    """Wait for a line; other lines may precede it because a busy core is queried more than once."""
    while words not in said.get(timeout=WAIT_SECONDS):
        pass


def test_rank_waits_for_late_core(said: "queue.Queue[str]", address: str) -> None:
    searching = Searching(address, "r1")
    await_words(said, "waiting for the engine core")
    store = open_store(address, serves=True)
    announce_core(store, a_config("r1"), "tcp://core")
    assert searching.found.get(timeout=WAIT_SECONDS) == "tcp://core"


def test_a_rank_never_meets_the_core_of_another_revision(said: "queue.Queue[str]", address: str) -> None:
    old = open_store(address, serves=True)
    announce_core(old, a_config("r1"), "tcp://old")
    searching = Searching(address, "r2")
    await_words(said, "has --rendezvous-id 'r1', this node 'r2'")
    assert searching.found.empty()
    del old  # the old leader's pod ends, and the new one gets the same address
    new = open_store(address, serves=True)
    announce_core(new, a_config("r2"), "tcp://new")
    assert searching.found.get(timeout=WAIT_SECONDS) == "tcp://new"


def test_guarded_store_is_reachable_with_secret(said: "queue.Queue[str]", address: str, tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.write_text("the secret of this replica")
    theirs.write_text("the secret of another one")
    store = open_store(address, serves=True, secret=SharedSecret.read(str(ours)))
    announce_core(store, a_config("r1", ours), "tcp://core")
    host, port = address.removeprefix("tcp:").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        assert stranger.recv(64).startswith(GREETING)
        stranger.sendall(b"\0" * 256)  # whatever torch's client would report
        assert stranger.recv(64) == b"", "the store does not answer"
    other = Searching(address, "r1", theirs)
    await_words(said, "is not this node's replica: the secrets differ")
    assert Searching(address, "r1", ours).found.get(timeout=WAIT_SECONDS) == "tcp://core"
    assert other.found.empty()
    theirs.write_text("the secret of this replica")  # given to it late
    assert other.found.get(timeout=WAIT_SECONDS) == "tcp://core"


def test_frozen_core_is_not_awaited(said: "queue.Queue[str]", address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a frozen node the kernel accepts connections; later the address moves."""
    monkeypatch.setattr(rendezvous, "CORE_REPLY_SECONDS", 0.5)
    frozen = socket.create_server(("127.0.0.1", int(address.rpartition(":")[2])))
    searching = Searching(address, "r1")
    await_words(said, "accepts connections and has not answered")
    frozen.close()
    monkeypatch.setattr(rendezvous, "CORE_REPLY_SECONDS", WAIT_SECONDS)
    store = open_store(address, serves=True)
    announce_core(store, a_config("r1"), "tcp://core")
    assert searching.found.get(timeout=WAIT_SECONDS) == "tcp://core"


def test_a_rank_is_given_away_once() -> None:
    """A pod considered dead that returns must not receive steps of its replacement."""
    context = zmq.Context()
    control = context.socket(zmq.ROUTER)
    port = control.bind_to_random_port("tcp://127.0.0.1")
    watch = WorkerMonitor(control, {}, 0, {1: "tcp://steps"}, None)
    answers = []
    try:
        for host in ("m-g0-w-0", "m-g0-w-0-of-before"):
            rank = context.socket(zmq.DEALER)
            rank.connect(f"tcp://127.0.0.1:{port}")
            rank.send(msgspec.msgpack.encode(Hello(1, host, 7)))
            assert rank.poll(int(WAIT_SECONDS * 1000))
            answers.append(msgspec.msgpack.decode(rank.recv(), type=ToHello))
            rank.close(linger=0)
        assert answers == [Welcome("tcp://steps"), RankTaken("m-g0-w-0, pid 7")]
        assert watch.inbox.qsize() == 1
        assert watch.failure is None
    finally:
        watch.close()
        control.close(linger=0)
        context.term()

"""The engine core's process, seen from the one that starts it."""

import asyncio
import sys

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client import started_core
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.launcher import CoreLauncher
from trimtab_engine.errors import EngineDead

READY = """
import json, sys
from trimtab_engine.core.clients import Clients
from trimtab_engine.messages.lifecycle import ClientAddresses, CoreReady
clients = Clients([ClientAddresses(**client) for client in json.loads(sys.stdin.readline())["clients"]])
clients.broadcast(CoreReady(64, 10, [1], 16, 4, {}))
while not clients.receive(100): pass
clients.close()
"""
DEADLINE_SECONDS = 120.0  # for a process to start and answer: machines are slow when much is built on them


async def test_closing_leaves_neither_process_nor_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_core, "CORE_COMMAND", (sys.executable, "-c", READY))
    launcher = CoreLauncher(EngineConfig(model="m"), num_clients=2)
    clients = [CoreClient(addresses, client_index=index) for index, addresses in enumerate(launcher.addresses)]
    for client in clients:
        client.open()
    await launcher.start(clients[0])
    for client in clients:
        await asyncio.wait_for(client.loaded.wait(), DEADLINE_SECONDS)
    await clients[1].close()
    await asyncio.wait_for(launcher.close(clients[0]), DEADLINE_SECONDS)
    assert launcher.process is not None
    assert launcher.process.returncode == 0
    assert not launcher._folder.exists()


async def test_a_core_that_cannot_be_started_is_a_dead_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(started_core, "CORE_COMMAND", ("/no/such/program",))
    launcher = CoreLauncher(EngineConfig(model="m"))
    client = CoreClient(launcher.addresses[0])
    with pytest.raises(EngineDead, match="cannot be started"):
        await launcher.start(client)
    await launcher.close(client)


KILLED = "import os, signal, sys; sys.stdin.readline(); os.kill(os.getpid(), signal.SIGKILL)"


async def test_core_killed_while_loading_reports_memory_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(started_core, "CORE_COMMAND", (sys.executable, "-c", KILLED))
    launcher = CoreLauncher(EngineConfig(model="m"))
    client = CoreClient(launcher.addresses[0])
    client.open()
    await launcher.start(client)
    await asyncio.wait_for(client.ended.wait(), DEADLINE_SECONDS)
    await launcher.close(client)
    assert client.failure is not None
    message = client.failure.message
    assert "killed (signal 9) in stage starting of loading" in message
    assert "raise its memory limit, or lower --max-num-batched-tokens" in message
    assert "\n" not in message


def test_core_killed_while_serving_reports_memory_advice() -> None:
    told = started_core.cause_of_end("the engine core", -9, None)
    assert "killed by signal 9" in told
    assert "memory ran out" in told
    assert "--gpu-memory-utilization" in told
    assert (
        started_core.cause_of_end("the engine core", -11, None)
        == "the engine core ended unexpectedly (killed by signal 11)"
    )


def test_core_with_truncated_file_reports_file_advice() -> None:
    told = started_core.cause_of_end("the engine core", -7, None)
    assert "a model file was truncated or overwritten" in told
    assert "renaming" in told

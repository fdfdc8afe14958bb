"""The engine core's process that the program starts before it parses its command line."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.engine_client import early_core
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.engine_client.early_core import end_early_core, start_early_core, take_early_core
from trimtab_engine.engine_client.launcher import CoreLauncher

DEADLINE_SECONDS = 120.0
READY = """
import json, sys
from trimtab_engine.core.clients import Clients
from trimtab_engine.messages.lifecycle import ClientAddresses, CoreReady
clients = Clients([ClientAddresses(**client) for client in json.loads(sys.stdin.readline())["clients"]])
clients.broadcast(CoreReady(64, 10, [1], 16, 4, {}))
while not clients.receive(100): pass
clients.close()
"""
ECHO = "import sys; sys.exit(len(sys.stdin.readline()))"


@pytest.fixture(autouse=True)
def no_early_core() -> None:
    assert take_early_core() is None


def use_program(monkeypatch: pytest.MonkeyPatch, program: str) -> None:
    monkeypatch.setattr(early_core, "CORE_COMMAND", (sys.executable, "-c", program))


async def launch(monkeypatch: pytest.MonkeyPatch, program: str) -> tuple[CoreLauncher, CoreClient]:
    """Start a program as the early core, and a launcher that takes it."""
    use_program(monkeypatch, program)
    start_early_core(["serve", "MODEL"])
    launcher = CoreLauncher(EngineConfig(model="m"))
    client = CoreClient(launcher.addresses[0])
    client.open()
    await launcher.start(client)
    return launcher, client


async def test_launcher_uses_the_early_core(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher, client = await launch(monkeypatch, READY)
    await asyncio.wait_for(client.loaded.wait(), DEADLINE_SECONDS)
    assert take_early_core() is None
    await asyncio.wait_for(launcher.close(client), DEADLINE_SECONDS)
    assert launcher.process is not None
    assert launcher.process.returncode == 0


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("import os, sys; sys.stdin.readline(); os._exit(3)", "ended unexpectedly (exit code 3)"),
        ("import os; os._exit(3)", "ended unexpectedly (exit code 3)"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "killed (signal 9) in stage starting of loading"),
    ],
)
async def test_early_core_that_dies_is_reported(monkeypatch: pytest.MonkeyPatch, program: str, message: str) -> None:
    launcher, client = await launch(monkeypatch, program)
    await asyncio.wait_for(client.ended.wait(), DEADLINE_SECONDS)
    await launcher.close(client)
    assert client.failure is not None
    assert message in client.failure.message


async def test_several_waits_see_the_same_end(monkeypatch: pytest.MonkeyPatch) -> None:
    use_program(monkeypatch, ECHO)
    start_early_core(["serve"])
    core = take_early_core()
    assert core is not None
    waits = [asyncio.create_task(core.wait()) for _ in range(2)]
    core.send(b"12\n")
    assert await asyncio.wait_for(asyncio.gather(*waits), DEADLINE_SECONDS) == [3, 3]
    assert await core.wait() == core.returncode == 3


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["bench", "serve"],
        ["serve", "--help"],
        ["serve", "m", "--headless"],
        ["serve", "m", "--node-rank", "1"],
        ["serve", "m", "--node_rank=1"],
    ],
)
def test_other_commands_start_no_core(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    use_program(monkeypatch, ECHO)
    start_early_core(arguments)
    assert take_early_core() is None


def test_unstartable_core_is_left_to_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_core, "CORE_COMMAND", ("/no/such/program",))
    start_early_core(["serve", "m"])
    assert take_early_core() is None


def test_untaken_core_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    use_program(monkeypatch, ECHO)
    start_early_core(["serve", "m"])
    (core,) = early_core._early
    end_early_core()
    assert core.returncode == -signal.SIGKILL


def test_invalid_command_leaves_no_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "trimtab_engine.command", "serve", "m", "--device", "typo"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "TRIMTAB_TEST_MARK": str(tmp_path)}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "invalid choice" in ended.stderr
    assert [folder for folder in Path("/proc").iterdir() if has_mark(folder, str(tmp_path))] == []


def has_mark(folder: Path, mark: str) -> bool:
    """Return True for the folder of a process that has the mark in its environment."""
    try:
        return folder.name.isdigit() and mark.encode() in (folder / "environ").read_bytes()
    except OSError:  # it has ended
        return False

"""Clean-up after a killed Docker daemon: its processes, and the order of unmounting."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from devtools import docker_cli
from offline import killed_daemon
from offline.killed_daemon import clear, descendants, mounts_below
from offline.leftovers import Process

FOLDER = Path("/home/a/.cache/trimtab/docker")
DEADLINE_SECONDS = 120.0


def test_descendants_include_containers_of_shims() -> None:
    shim = Process(7, 1, ("containerd-shim", "-address", f"{FOLDER}/exec/containerd.sock"), "/usr/bin/shim")
    init = Process(8, 7, ("/sbin/init",), "/usr/lib/systemd/systemd")
    kubelet = Process(9, 8, ("kubelet",), "/usr/bin/kubelet")
    another = Process(10, 1, ("containerd-shim", "-address", "/run/containerd.sock"), "/usr/bin/shim")
    caller = Process(11, 7, ("python3", f"{FOLDER}/exec/"), "/usr/bin/python3")
    assert descendants([init, kubelet, another, shim, caller], FOLDER, frozenset({11})) == [init, kubelet, shim]


def test_mounts_below_are_in_reverse_order() -> None:
    table = (
        f"overlay {FOLDER}/data ext4 rw 0 0\n"
        f"overlay {FOLDER}/data/overlay2/x/merged overlay rw 0 0\n"
        f"nsfs {FOLDER}/exec/with\\040space nsfs rw 0 0\n"
        "proc /proc proc rw 0 0\n"
        f"x {FOLDER}-other/data ext4 rw 0 0\n"
    )
    below = [f"{FOLDER}/exec/with space", f"{FOLDER}/data/overlay2/x/merged", f"{FOLDER}/data"]
    assert mounts_below(table, FOLDER) == below


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path))
    (tmp_path / "docker").mkdir()
    return tmp_path / "docker"


def await_command_line(pid: int, word: str) -> None:
    """Wait until /proc shows the process's new command line: Popen returns before the kernel has set it."""
    end = time.monotonic() + DEADLINE_SECONDS
    while word.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < end, f"process {pid} does not have {word} in its command line"
        time.sleep(0.01)


def test_clear_kills_processes_and_unmounts(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table, commands = tmp_path / "mounts", list[list[str]]()
    table.write_text(f"overlay {folder}/data ext4 rw 0 0\n")
    monkeypatch.setattr(killed_daemon, "MOUNTS", table)
    monkeypatch.setattr(docker_cli, "find", dict)

    def run(command: list[str], *, log: str) -> None:
        commands.append(command)

    monkeypatch.setattr(killed_daemon, "run", run)
    socket = f"{folder}/exec/c.sock"
    with subprocess.Popen([sys.executable, "-c", "input()", socket], stdin=subprocess.PIPE) as shim:
        await_command_line(shim.pid, socket)
        assert clear()
        assert shim.wait(120) == -9
    assert commands == [["umount", "--lazy", f"{folder}/data"]]
    table.write_text("")
    assert not clear(), "nothing is left for a second call"


def test_clear_ignores_running_daemon(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker_cli, "own_pid", os.getpid)
    monkeypatch.setattr(killed_daemon, "MOUNTS", tmp_path / "not-read")
    assert not clear()

"""Several engines with one cache: separate processes, like replicas."""

import os
import subprocess
import sys
import time
from pathlib import Path

from harness.hub_server import HubServer
from hub_repository import REPO
from trimtab_engine.sources.locks import FolderLock

FETCH = [sys.executable, "-m", "trimtab_engine.cli", "fetch", f"hf://{REPO}"]
SECONDS = 250  # a child imports for long on a loaded machine
LOOK_SECONDS = 0.1


def begun(hub: HubServer, cache: Path) -> "subprocess.Popen[str]":
    allowed = ("PATH", "HOME", "LANG")
    environment = {name: value for name, value in os.environ.items() if name in allowed}
    environment |= {"PYTHONPATH": os.pathsep.join(sys.path), "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_TELEMETRY": "1"}
    command = [*FETCH, "--download-dir", str(cache)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: "subprocess.Popen[str]") -> str:
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    return out.strip()


def test_two_engines_download_once(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.chunk_seconds = 0.3
    both = [begun(hub, tmp_path / "cache") for _ in range(2)]
    folders = {ended(process) for process in both}
    assert len(folders) == 1
    assert Path(folders.pop(), "config.json").exists()
    weights = [one for one in hub.asked if one.path.startswith("/large/") and one.path.endswith(".safetensors")]
    assert len(weights) == 2  # one per shard


def test_killed_download_keeps_bytes_and_releases_lock(hub: HubServer, tmp_path: Path) -> None:
    hub.faults.chunk_seconds = 0.5
    first = begun(hub, tmp_path / "cache")
    while not [one for one in hub.asked if one.path.startswith("/large/")]:
        assert first.poll() is None, first.communicate()
        time.sleep(LOOK_SECONDS)
    first.kill()
    first.communicate()
    hub.faults.chunk_seconds = 0.0
    ended(begun(hub, tmp_path / "cache"))


def test_a_lock_is_one_owners_or_shared(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "lock") as one, FolderLock(tmp_path / "lock") as other:
        assert one.take(shared=True)
        assert other.take(shared=True)
        assert not other.take()
        one.close()
        assert other.take()

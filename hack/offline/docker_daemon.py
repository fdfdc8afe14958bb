"""A Docker daemon started by these tools, with its socket and data in the cache, for machines where none is running."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from devtools.cache import locked
from devtools.docker_cli import find, own_folder, own_host, own_pid
from devtools.errors import ClusterError
from devtools.process import logs_folder, run, succeeds
from devtools.progress import log_line, wait_until

from . import debian, host_settings, runtime_shim

START_SECONDS = 60.0
STOP_SECONDS = 30.0
SHIM_PYTHON = "/usr/bin/python3"  # by its full name: what comes first on PATH may be a script


def start() -> dict[str, str]:
    """Start a daemon, and install it if it is missing. Return the environment with which docker reaches it."""
    host_settings.remember()
    if shutil.which("dockerd") is None or shutil.which("docker") is None:
        debian.install(["docker.io", "iptables"])
        found = find()  # where systemd runs, the package has started one
        if found is not None:
            return found
    if os.geteuid() != 0:
        raise ClusterError(
            f"No Docker daemon answers and only root can start one; start Docker, set DOCKER_HOST, "
            f"or {debian.ALTERNATIVES}"
        )
    folder = own_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # A daemon that was killed leaves its containerd's pid file, and a new one would wait for that process.
    shutil.rmtree(folder / "exec", ignore_errors=True)
    (folder / "dockerd.pid").unlink(missing_ok=True)
    command = [
        "dockerd",
        f"--host={own_host()}",
        f"--data-root={folder}/data",
        f"--exec-root={folder}/exec",
        f"--pidfile={folder}/dockerd.pid",
        *_runtime_options(folder),
    ]
    log = logs_folder() / "dockerd.log"
    with log.open("ab") as output:
        daemon = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True
        )
    environment = {"DOCKER_HOST": own_host()}

    def answers() -> bool:
        if daemon.poll() is not None:
            tail = "\n    ".join(log.read_text(errors="replace").splitlines()[-8:])
            raise ClusterError(f"dockerd ended with exit code {daemon.returncode}; its log is {log}\n    {tail}")
        return succeeds(["docker", "version"], environment=environment, timeout_seconds=10)

    if not wait_until("docker", START_SECONDS, answers, every_seconds=0.5):
        daemon.terminate()
        raise ClusterError(f"dockerd does not answer on {own_host()} after {START_SECONDS:g} s; its log is {log}")
    return environment


def _runtime_options(folder: Path) -> list[str]:
    if not runtime_shim.is_needed(Path("/proc/self/status").read_text()):
        return []
    shim = folder / "runtime"
    shim.write_text(f"#!{SHIM_PYTHON} -ISB\n" + Path(runtime_shim.__file__).read_text())
    shim.chmod(0o755)
    return [f"--add-runtime=fit={shim}", "--default-runtime=fit"]


def stop() -> bool:
    """Stop the daemon this tool started, and what it started; False when there was none."""
    with locked("docker"):
        pid = own_pid()
        if pid is None:
            return False
        with contextlib.suppress(ClusterError):  # its bridges go with its networks
            run(["docker", "network", "prune", "-f"], log="docker", environment={"DOCKER_HOST": own_host()})
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while own_pid() is not None and time.monotonic() < end:
            _reap(pid)
            time.sleep(0.2)
        if own_pid() is not None:
            log_line(f"docker: pid {pid} ignores SIGTERM after {STOP_SECONDS:g} s: killing it")
            os.kill(pid, signal.SIGKILL)
        (own_folder() / "dockerd.pid").unlink(missing_ok=True)
        delete_bridge()
        return True


def delete_bridge() -> None:
    """Docker's own bridge, which no daemon takes away at its end."""
    if Path("/sys/class/net/docker0").exists():
        run(["ip", "link", "delete", "docker0"], log="docker")


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # only our own child when `up` and `down` run in one process
        os.waitpid(pid, os.WNOHANG)

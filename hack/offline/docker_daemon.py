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
SHIM_PYTHON = "/usr/bin/python3"  # absolute, since the first python3 on PATH may be a script


def start() -> dict[str, str]:
    """Start a daemon, and install it if it is missing. Return the environment with which docker reaches it."""
    host_settings.save()
    if shutil.which("dockerd") is None or shutil.which("docker") is None:
        debian.install(["docker.io", "iptables"])
        found = find()  # with systemd, the package has started a daemon
        if found is not None:
            return found
    if os.geteuid() != 0:
        raise ClusterError(
            f"No Docker daemon is running and only root can start one; start Docker, set DOCKER_HOST, "
            f"or {debian.ALTERNATIVES}"
        )
    folder = own_folder()
    folder.mkdir(parents=True, exist_ok=True)
    # A killed daemon leaves its containerd's pid file, and a new daemon would wait for that process.
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
        raise ClusterError(f"dockerd does not respond on {own_host()} after {START_SECONDS:g} s; its log is {log}")
    return environment


def _runtime_options(folder: Path) -> list[str]:
    if not runtime_shim.is_needed(Path("/proc/self/status").read_text()):
        return []
    shim = folder / "runtime"
    shim.write_text(f"#!{SHIM_PYTHON} -ISB\n" + Path(runtime_shim.__file__).read_text())
    shim.chmod(0o755)
    return [f"--add-runtime=fit={shim}", "--default-runtime=fit"]


def stop() -> bool:
    """Stop the daemon that these tools started. Return False if there was none."""
    with locked("docker"):
        pid = own_pid()
        if pid is None:
            return False
        with contextlib.suppress(ClusterError):  # removes the networks' bridges
            run(["docker", "network", "prune", "-f"], log="docker", environment={"DOCKER_HOST": own_host()})
        os.kill(pid, signal.SIGTERM)
        end = time.monotonic() + STOP_SECONDS
        while own_pid() is not None and time.monotonic() < end:
            _reap(pid)
            time.sleep(0.2)
        if own_pid() is not None:
            log_line(f"docker: pid {pid} did not stop {STOP_SECONDS:g} s after SIGTERM; killing it")
            os.kill(pid, signal.SIGKILL)
        (own_folder() / "dockerd.pid").unlink(missing_ok=True)
        delete_bridge()
        return True


def delete_bridge() -> None:
    """Delete Docker's default bridge, which a daemon does not remove when it stops."""
    if Path("/sys/class/net/docker0").exists():
        run(["ip", "link", "delete", "docker0"], log="docker")


def _reap(pid: int) -> None:
    with contextlib.suppress(ChildProcessError):  # it is a child only if `up` and `down` run in the same process
        os.waitpid(pid, os.WNOHANG)

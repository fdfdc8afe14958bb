"""A Docker daemon: the one that already answers, else one of our own with its socket and data in the cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from devtools.cache import locked
from devtools.cache_root import cache_root
from devtools.errors import ClusterError
from devtools.process import logs_folder, output_of, run, succeeds
from devtools.progress import log_line, stage, wait_until

from . import debian, host_settings, runtime_shim

START_SECONDS = 60.0
STOP_SECONDS = 30.0
REGISTRY_PROBE_SECONDS = 20.0  # a pull of a few kB: longer means that images of 1 GB would not come either
REGISTRY_PROBE_IMAGE = "hello-world"
SHIM_PYTHON = "/usr/bin/python3"  # by its full name: what comes first on PATH may be a script


def own_folder() -> Path:
    return cache_root() / "docker"


def own_host() -> str:
    return f"unix://{own_folder()}/docker.sock"


def own_pid() -> int | None:
    """The process id of the daemon that this tool started, when it still runs."""
    try:
        pid = int((own_folder() / "dockerd.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"dockerd" in command.split(b"\0")[0] else None


def find() -> dict[str, str] | None:
    """The environment with which docker answers, or None: ours when it runs, else DOCKER_HOST's or the default."""
    candidates: list[dict[str, str]] = [{"DOCKER_HOST": own_host()}] if own_pid() is not None else []
    candidates.append({"DOCKER_HOST": os.environ["DOCKER_HOST"]} if os.environ.get("DOCKER_HOST") else {})
    for environment in candidates:
        if succeeds(["docker", "version"], environment=environment, timeout_seconds=15):
            return environment
    return None


def ensure() -> dict[str, str]:
    """A daemon that answers; returns the environment that docker and kind need to reach it."""
    with locked("docker"):
        found = find()
        if found is not None:
            return found
        with stage("docker: starting a daemon", 20):
            return _start()


def _start() -> dict[str, str]:
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


def has_image(environment: dict[str, str], image: str) -> bool:
    return succeeds(["docker", "image", "inspect", image], environment=environment)


def reaches_registry(environment: dict[str, str]) -> bool:
    """Whether images can be pulled: a pull of a few kB, with a short time-out."""
    command = ["docker", "pull", "--quiet", REGISTRY_PROBE_IMAGE]
    return succeeds(command, environment=environment, timeout_seconds=REGISTRY_PROBE_SECONDS)


def import_root(environment: dict[str, str], folder: Path, image: str) -> None:
    """Make the image `image` of a root file system."""
    with subprocess.Popen(["tar", "-C", str(folder), "-c", "."], stdout=subprocess.PIPE) as tar:
        done = subprocess.run(
            ["docker", "import", "-", image],
            stdin=tar.stdout,
            capture_output=True,
            env={**os.environ, **environment},
            check=False,
        )
    if done.returncode != 0 or tar.returncode != 0:
        raise ClusterError(f"docker import of {folder} as {image} failed: {done.stderr.decode().strip()}")


def image_id(environment: dict[str, str], image: str) -> str:
    """The digest of its configuration ("sha256:…"): the same in Docker and in a node's containerd."""
    return output_of(["docker", "image", "inspect", "--format", "{{.Id}}", image], environment=environment)


def forget_old_tags(environment: dict[str, str], image: str, *, keep: int) -> None:
    """Remove all but the `keep` newest tags of the image's repository, and never `image` itself."""
    repository = image.partition(":")[0]
    listed = output_of(
        ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository], environment=environment
    ).split()  # newest first
    for old in [name for name in listed if name != image and not name.endswith("<none>")][keep - 1 :]:
        succeeds(["docker", "image", "rm", old], environment=environment)  # one that is in use stays

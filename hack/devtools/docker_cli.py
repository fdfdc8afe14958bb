"""Docker: finding a daemon that responds, starting one if there is none, and its images."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from .cache import locked
from .cache_root import cache_root
from .errors import ClusterError
from .process import output_of, run, succeeds
from .progress import stage

REGISTRY_PROBE_SECONDS = 20.0  # for an image of a few kB; if it takes longer, images of 1 GB are impractical
REGISTRY_PROBE_IMAGE = "hello-world"


def own_folder() -> Path:
    return cache_root() / "docker"


def own_host() -> str:
    return f"unix://{own_folder()}/docker.sock"


def own_pid() -> int | None:
    """Return the process id of the daemon that these tools started, or None if it is not running."""
    try:
        pid = int((own_folder() / "dockerd.pid").read_text())
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, ValueError):
        return None
    return pid if b"dockerd" in command.split(b"\0")[0] else None


def find() -> dict[str, str] | None:
    """Return the environment of a daemon that responds, or None.

    The daemon started by these tools comes before DOCKER_HOST's or the default one.
    """
    candidates: list[dict[str, str]] = [{"DOCKER_HOST": own_host()}] if own_pid() is not None else []
    candidates.append({"DOCKER_HOST": os.environ["DOCKER_HOST"]} if os.environ.get("DOCKER_HOST") else {})
    for environment in candidates:
        if succeeds(["docker", "version"], environment=environment, timeout_seconds=15):
            return environment
    return None


def ensure() -> dict[str, str]:
    """Return the environment with which docker and kind reach a daemon; one is started if none responds."""
    with locked("docker"):
        found = find()
        if found is not None:
            return found
        from offline import docker_daemon  # imported only on machines without Docker

        with stage("docker: starting a daemon", 20):
            return docker_daemon.start()


def has_image(environment: dict[str, str], image: str) -> bool:
    return succeeds(["docker", "image", "inspect", image], environment=environment)


def reaches_registry(environment: dict[str, str]) -> bool:
    """Return True if images can be pulled, tested with an image of a few kB and a short timeout."""
    command = ["docker", "pull", "--quiet", REGISTRY_PROBE_IMAGE]
    return succeeds(command, environment=environment, timeout_seconds=REGISTRY_PROBE_SECONDS)


def import_root(environment: dict[str, str], folder: Path, image: str) -> None:
    """Import a root file system as the image `image`."""
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
    """Return the config digest ("sha256:…"), which is the same in Docker and in a node's containerd."""
    return output_of(["docker", "image", "inspect", "--format", "{{.Id}}", image], environment=environment)


def forget_old_tags(environment: dict[str, str], image: str, *, keep: int) -> None:
    """Remove all but the `keep` newest tags of the image's repository, and never `image` itself."""
    repository = image.partition(":")[0]
    listed = output_of(
        ["docker", "image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository], environment=environment
    ).split()  # newest first
    for old in [name for name in listed if name != image and not name.endswith("<none>")][keep - 1 :]:
        succeeds(["docker", "image", "rm", old], environment=environment)  # fails for images in use


def build(docker: dict[str, str], image: str, context: Path, dockerfile: Path, arguments: dict[str, str]) -> None:
    """Run docker build with the classic builder, which every Docker has."""
    options = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
    run(
        ["docker", "build", "--network", "none", "-t", image, "-f", dockerfile, *options, context],
        log=f"build-{image.partition(':')[0]}",
        environment={"DOCKER_BUILDKIT": "0", **docker},
    )

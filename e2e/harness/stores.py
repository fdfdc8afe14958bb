"""Model stores on this machine that the cluster's pods can reach: Debian's docker-registry, and the address for it.

The nodes of a kind cluster are containers of this machine's Docker: a server on this machine's address in Docker's
network can be reached from pods, and from nowhere else.
"""

from __future__ import annotations

import base64
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from offline import debian
from registry_server import IMAGE, TITLE, Layer, digest_of, manifest_of

from harness.kube import Kube, Manifest

PROGRAM = "docker-registry"
USER, PASSWORD = "scenario", "scenario-password"
HTPASSWD = f"{USER}:$2b$05$abcdefghijklmnopqrstuu01s4krBm8ar09qWJXQr8isE0zpMefQ6\n"
"""htpasswd file with PASSWORD as bcrypt, the only hash that docker-registry supports."""
START_SECONDS = 20.0
PUSH_SECONDS = 300.0  # half a gigabyte, on a machine that also runs the cluster


def registry_program() -> str:
    """Return docker-registry on PATH, else the program of Debian's package in the cache.

    Raises:
        ClusterError: there is no such package.
    """
    return shutil.which(PROGRAM) or str(debian.program(PROGRAM))


def own_address(kube: Kube) -> str:
    """Return this machine's address on the network of the cluster's nodes."""
    addresses = kube.items("nodes")[0]["status"]["addresses"]
    node = next(each["address"] for each in addresses if each["type"] == "InternalIP")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((node, 9))  # sends nothing: it only selects the route
        address: str = probe.getsockname()[0]
    return address


@dataclass(frozen=True, slots=True)
class Registry:
    """A registry that requires credentials."""

    host: str
    """ADDRESS:PORT."""

    def pull_secret(self, name: str) -> Manifest:
        """Return a kubernetes.io/dockerconfigjson Secret with the credentials."""
        both = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
        config = json.dumps({"auths": {self.host: {"auth": both}}})
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "type": "kubernetes.io/dockerconfigjson",
            "stringData": {".dockerconfigjson": config},
        }

    def push(self, repository: str, tag: str, folder: Path) -> str:
        """Push each file of the folder as its own layer, as ORAS does. Return the manifest's digest."""
        files = sorted(path for path in folder.iterdir() if path.is_file())
        layers = [Layer(path.read_bytes(), "application/octet-stream", {TITLE: path.name}) for path in files]
        url = f"http://{self.host}/v2/{repository}"
        with httpx.Client(auth=(USER, PASSWORD), timeout=PUSH_SECONDS) as client:
            for data in (b"{}", *(layer.data for layer in layers)):
                place = client.post(f"{url}/blobs/uploads/").raise_for_status().headers["Location"]
                where = httpx.URL(place).copy_add_param("digest", digest_of(data))
                client.put(where, content=data).raise_for_status()
            text = manifest_of(layers)
            response = client.put(f"{url}/manifests/{tag}", content=text, headers={"Content-Type": IMAGE})
            response.raise_for_status()
        return digest_of(text)


@contextmanager
def docker_registry(address: str, folder: Path) -> Iterator[Registry]:
    """Run a registry that stores its blobs in the folder."""
    with socket.socket() as chosen:
        chosen.bind((address, 0))
        host = f"{address}:{chosen.getsockname()[1]}"
    (folder / "htpasswd").write_text(HTPASSWD)
    settings = {
        "version": 0.1,
        "storage": {"filesystem": {"rootdirectory": str(folder / "blobs")}},
        "http": {"addr": host},
        "auth": {"htpasswd": {"realm": "scenario", "path": str(folder / "htpasswd")}},
    }
    (folder / "config.yml").write_text(json.dumps(settings))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([registry_program(), "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        _await_answer(process, host, folder / "log")
        yield Registry(host)
    finally:
        process.terminate()
        process.wait(START_SECONDS)


def _await_answer(process: subprocess.Popen[bytes], host: str, log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            break
        try:
            httpx.get(f"http://{host}/v2/")
        except httpx.TransportError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError(f"{PROGRAM} does not respond on {host}: {log.read_text(errors='replace')[-2000:]}")

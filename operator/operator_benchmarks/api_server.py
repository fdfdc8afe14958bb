"""Real API server on loopback for measurements: etcd and kube-apiserver as processes, without nodes and controllers.

Callers are distinguished by bearer token, and an audit log counts the operator's requests.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import ssl
import subprocess
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

OPERATOR, DRIVER = "operator", "driver"
READS = ("get", "list")
START_SECONDS = 600.0
AUDIT_POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "omitStages": ["RequestReceived"],
    "rules": [{"level": "Metadata", "users": [OPERATOR]}, {"level": "None"}],
}


@dataclass
class ApiServer:
    """One etcd and one kube-apiserver with their data in `folder`. The API server can also be paused."""

    etcd: Path
    apiserver: Path
    folder: Path
    port: int
    tokens: Mapping[str, str] = field(default_factory=lambda: {u: secrets.token_hex(16) for u in (OPERATOR, DRIVER)})
    _etcd: subprocess.Popen[bytes] | None = None
    _apiserver: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start both in an empty folder, and wait until they are ready."""
        self._prepare()
        client, peer = f"http://127.0.0.1:{self.port + 1}", f"http://127.0.0.1:{self.port + 2}"
        self._etcd = self._start_process(
            [
                str(self.etcd),
                f"--data-dir={self.folder / 'etcd'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
            ],
            "etcd",
        )
        await self.resume()

    async def resume(self) -> None:
        """Start kube-apiserver, and wait until it is ready."""
        self._apiserver = self._start_process(
            [
                str(self.apiserver),
                f"--etcd-servers=http://127.0.0.1:{self.port + 1}",
                f"--cert-dir={self.folder / 'certificates'}",
                "--bind-address=127.0.0.1",
                f"--secure-port={self.port}",
                "--service-cluster-ip-range=10.0.0.0/16",
                "--authorization-mode=AlwaysAllow",
                f"--token-auth-file={self.folder / 'tokens.csv'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={self.folder / 'accounts.pem'}",
                f"--service-account-signing-key-file={self.folder / 'accounts.pem'}",
                "--disable-admission-plugins=ServiceAccount",  # no controller creates token secrets here
                f"--audit-policy-file={self.folder / 'audit.yaml'}",
                f"--audit-log-path={self.audit_log}",
            ],
            "kube-apiserver",
        )
        async with Client(self.url, self.tokens[DRIVER]) as client:
            deadline = time.monotonic() + START_SECONDS
            while not await client.is_ready():
                if self._apiserver.poll() is not None or time.monotonic() > deadline:
                    log = (self.folder / "kube-apiserver.log").read_text().splitlines()
                    raise TimeoutError(f"kube-apiserver is not ready; last log line: {log[-1:]}")
                await asyncio.sleep(0.25)

    def _prepare(self) -> None:
        """Write the files that kube-apiserver reads."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "tokens.csv").write_text("".join(f"{t},{u},{u}\n" for u, t in self.tokens.items()))
        (self.folder / "audit.yaml").write_text(yaml.safe_dump(AUDIT_POLICY))
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
        (self.folder / "accounts.pem").write_bytes(pem)

    def pause(self) -> None:
        """Stop kube-apiserver; etcd keeps its data."""
        _end(self._apiserver)

    def stop(self) -> None:
        _end(self._apiserver)
        _end(self._etcd)

    def _start_process(self, command: list[str], name: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    @property
    def audit_log(self) -> Path:
        return self.folder / "audit.log"

    def kubeconfig(self, user: str) -> Path:
        path = self.folder / f"{user}.kubeconfig"
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "bench",
            "contexts": [{"name": "bench", "context": {"cluster": "bench", "user": user}}],
            "clusters": [{"name": "bench", "cluster": {"server": self.url, "insecure-skip-tls-verify": True}}],
            "users": [{"name": user, "user": {"token": self.tokens[user]}}],
        }
        path.write_text(yaml.safe_dump(body))
        return path


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class Audit:
    """Requests of the operator to the API server since the last read."""

    log: Path
    _offset: int = 0

    def since_last(self) -> Counter[tuple[str, str]]:
        """Return how often each verb was used on each resource; a watch counts once, when it starts."""
        found: Counter[tuple[str, str]] = Counter()
        if not self.log.exists():
            return found
        with self.log.open("rb") as lines:
            lines.seek(self._offset)
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                event = json.loads(line)
                about = event.get("objectRef") or {}
                resource = "/".join(
                    filter(None, (about.get("resource", event["requestURI"]), about.get("subresource")))
                )
                is_watch = event["verb"] == "watch"
                if is_watch == (event["stage"] == "ResponseStarted"):
                    found[event["verb"], resource] += 1
        return found


class Client:
    """JSON client of the API server. Use it as an async context manager."""

    def __init__(self, url: str, token: str) -> None:
        self._url, self._token = url, token
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connector = aiohttp.TCPConnector(ssl=context, limit=100)
        headers = {"Authorization": f"Bearer {self._token}"}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=120.0)
        self._session = aiohttp.ClientSession(self._url, connector=connector, headers=headers, timeout=timeout)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def is_ready(self) -> bool:
        assert self._session is not None
        try:
            async with self._session.get("/readyz") as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError):
            return False

    async def call(
        self, method: str, path: str, body: Any = None, *, patch: str = "merge-patch"
    ) -> tuple[int, dict[str, Any]]:
        """Make one request; return status and body."""
        assert self._session is not None
        kind = f"application/{patch}+json" if method == "PATCH" else "application/json"
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=data, headers={"Content-Type": kind}) as answer:
            text = await answer.text()
            found: dict[str, Any] = json.loads(text) if text.startswith("{") else {"message": text}
            return answer.status, found

    async def watch(self, path: str, *, selector: str = "") -> AsyncIterator[tuple[str, dict[str, Any], float]]:
        """Yield existing objects as ADDED, and then all changes: event type, object, time (monotonic)."""
        assert self._session is not None
        query = f"labelSelector={selector}" if selector else ""
        _, found = await self.call("GET", f"{path}?{query}")
        for item in found["items"]:
            yield "ADDED", item, time.monotonic()
        version = found["metadata"]["resourceVersion"]
        while True:
            url = f"{path}?{query}&watch=1&resourceVersion={version}&allowWatchBookmarks=true"
            async with self._session.get(url) as answer:
                buffer = b""
                async for chunk in answer.content.iter_any():
                    *lines, buffer = (buffer + chunk).split(b"\n")
                    for line in lines:
                        event = json.loads(line)
                        version = event["object"]["metadata"]["resourceVersion"]
                        if event["type"] != "BOOKMARK":
                            yield event["type"], event["object"], time.monotonic()

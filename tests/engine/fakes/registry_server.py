"""An OCI registry on loopback with injected faults.

It serves manifests by tag and digest with type and Docker-Content-Digest, blobs in ranges or from another address,
tokens of its own token server, and the specification's error codes.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import re
import socket
import tarfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

IMAGE = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"
TAR = "application/vnd.oci.image.layer.v1.tar"
TITLE = "org.opencontainers.image.title"
PATH = re.compile(r"/v2/(?P<name>[a-z0-9/._-]+)/(?P<kind>manifests|blobs)/(?P<reference>[^/]+)")
CHUNK_BYTES = 1 << 14


def digest_of(data: bytes) -> str:
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def tar_of(files: Mapping[str, bytes], *, links: Mapping[str, str] | None = None, compressed: bool = False) -> bytes:
    """An archive with the files, and hard links to them."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.LNKTYPE, target
            tar.addfile(member)
    return gzip.compress(out.getvalue(), 1) if compressed else out.getvalue()


@dataclass(frozen=True)
class Layer:
    """A layer before it is pushed."""

    data: bytes
    kind: str = TAR
    annotations: Mapping[str, str] = field(default_factory=dict)

    @property
    def described(self) -> dict[str, Any]:
        said = {"mediaType": self.kind, "digest": digest_of(self.data), "size": len(self.data)}
        return {**said, "annotations": dict(self.annotations)} if self.annotations else said


def manifest_of(layers: Sequence[Layer]) -> bytes:
    """The manifest of an image with these layers."""
    config = {"mediaType": "application/vnd.oci.empty.v1+json", "digest": digest_of(b"{}"), "size": 2}
    said = {"schemaVersion": 2, "mediaType": IMAGE, "config": config, "layers": [one.described for one in layers]}
    return json.dumps(said).encode()


@dataclass
class Faults:
    """Active faults."""

    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By blob digest: bytes after which the connection is reset; one entry per connection."""
    wrong: dict[str, int] = field(default_factory=dict)
    """By digest or tag: number of responses with one changed byte."""
    statuses: list[int] = field(default_factory=list)
    """The next answers are these."""
    account: str | None = None
    """Required USER:PASSWORD, by token or (`basic`) directly."""
    basic: bool = False
    ignores_range: bool = False
    redirects: bool = False
    """Blobs are at another address, which receives no credentials."""
    greedy: bool = False
    """That address requires credentials anyway, from its own token server."""
    busy_tokens: int = 0
    """Number of times the token server is busy."""


@dataclass(frozen=True)
class Asked:
    """A received request."""

    path: str
    range: str | None
    authorization: str | None


class RegistryServer:
    """Repositories in memory."""

    def __init__(self) -> None:
        self.faults = Faults()
        self.asked: list[Asked] = []
        self.manifests: dict[tuple[str, str], tuple[str, bytes]] = {}
        self.blobs: dict[str, bytes] = {}
        self.lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.registry = self
        self.host = f"127.0.0.1:{self._server.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[RegistryServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="registry", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def push(self, name: str, tag: str, layers: Sequence[Layer]) -> str:
        """The digest of the manifest."""
        for layer in layers:
            self.blobs[digest_of(layer.data)] = layer.data
        return self.push_manifest(name, tag, manifest_of(layers))

    def push_manifest(self, name: str, tag: str, text: bytes, kind: str = IMAGE) -> str:
        for reference in (tag, digest_of(text)):
            self.manifests[name, reference] = (kind, text)
        return digest_of(text)

    def asked_for(self, data: bytes) -> list[Asked]:
        """Requests for the bytes of one blob."""
        return [one for one in self.asked if one.path.endswith(digest_of(data))]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    registry: RegistryServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore errors of clients that disconnect, which tests provoke."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        registry, faults = self.server.registry, self.server.registry.faults
        authorization = self.headers.get("Authorization")
        with registry.lock:
            registry.asked.append(Asked(self.path, self.headers.get("Range"), authorization))
            status = faults.statuses.pop(0) if faults.statuses else None
        if status is not None:
            self._refuse(status, "UNKNOWN")
        elif self.path.startswith("/token?") and faults.busy_tokens:
            faults.busy_tokens -= 1
            self._refuse(503, "UNAVAILABLE")
        elif self.path.startswith("/token?"):
            self._give_token(authorization)
        elif self.path.startswith("/elsewhere/") and faults.greedy:
            host = registry.host.replace("127.0.0.1", "localhost")
            self._send(401, b"", {"WWW-Authenticate": f'Bearer realm="http://{host}/token?of=elsewhere"'})
        elif self.path.startswith("/elsewhere/"):
            self._give_blob(self.path.removeprefix("/elsewhere/"))
        elif (match := PATH.fullmatch(self.path)) is None:
            self._refuse(404, "UNSUPPORTED")
        elif not self._may_pull(authorization):
            self._refuse(401, "UNAUTHORIZED")
        elif match["kind"] == "manifests":
            self._give_manifest(match["name"], match["reference"])
        elif faults.redirects:
            host = registry.host.replace("127.0.0.1", "localhost")
            self._send(307, b"", {"Location": f"http://{host}/elsewhere/{match['reference']}"})
        else:
            self._give_blob(match["reference"])

    def _may_pull(self, authorization: str | None) -> bool:
        faults = self.server.registry.faults
        if faults.account is None:
            return True
        if faults.basic:
            return authorization == f"Basic {base64.b64encode(faults.account.encode()).decode()}"
        return authorization == f"Bearer for-{faults.account}"

    def _give_token(self, authorization: str | None) -> None:
        """Issue a token to every client; its permissions depend on the account."""
        account = base64.b64decode((authorization or "").removeprefix("Basic ")).decode()
        self._send(200, json.dumps({"token": f"for-{account}"}).encode(), {"Content-Type": "application/json"})

    def _give_manifest(self, name: str, reference: str) -> None:
        registry = self.server.registry
        if not any(known == name for known, _ in registry.manifests):
            self._refuse(404, "NAME_UNKNOWN")
        elif (name, reference) not in registry.manifests:
            self._refuse(404, "MANIFEST_UNKNOWN")
        else:
            kind, text = registry.manifests[name, reference]
            said = {"Content-Type": kind, "Docker-Content-Digest": digest_of(text)}
            self._send(200, self._changed(reference, text), said)

    def _changed(self, key: str, data: bytes) -> bytes:
        faults = self.server.registry.faults
        with self.server.registry.lock:
            if faults.wrong.get(key, 0) <= 0:
                return data
            faults.wrong[key] -= 1
        return data[:-1] + bytes([data[-1] ^ 1])

    def _give_blob(self, digest: str) -> None:
        registry, faults = self.server.registry, self.server.registry.faults
        if digest not in registry.blobs:
            self._refuse(404, "BLOB_UNKNOWN")
            return
        data = self._changed(digest, registry.blobs[digest])
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, len(data) - 1
        if asked is not None and not faults.ignores_range:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
            if first > last:
                self._send(416, b"", {})
                return
        with registry.lock:
            cuts = faults.cuts.get(digest, [])
            cut = cuts.pop(0) if cuts else None
        is_part = asked is not None and not faults.ignores_range
        self.send_response(206 if is_part else 200)
        if is_part:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.send_header("Content-Length", str(last - first + 1))
        self.end_headers()
        given = data[first : last + 1][:cut]
        for begin in range(0, len(given), CHUNK_BYTES):
            self.wfile.write(given[begin : begin + CHUNK_BYTES])
        if cut is not None:
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True

    def _refuse(self, status: int, code: str) -> None:
        headers = {"Content-Type": "application/json"}
        if status == 401:
            realm = f"http://{self.server.registry.host}/token"
            bearer = f'Bearer realm="{realm}",service="registry",scope="repository:x:pull"'
            headers["WWW-Authenticate"] = 'Basic realm="registry"' if self.server.registry.faults.basic else bearer
        self._send(status, json.dumps({"errors": [{"code": code, "message": "as asked"}]}).encode(), headers)

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Do nothing: requests are recorded in `asked`."""

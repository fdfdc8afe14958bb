"""A small server of the Hugging Face hub's protocol, backed by folders and with injectable faults. No dependencies.

As huggingface_hub expects: `/api/models/ORG/NAME/revision/REVISION?blobs=true` lists files with sizes and digests,
`/ORG/NAME/resolve/COMMIT/FILE` returns small files and redirects to large ones, which support range requests. Tests
run it in a thread; a scenario runs this file in a pod.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LARGE_BYTES = 1 << 20  # larger files are LFS files, whose digest is SHA-256
CHUNK_BYTES = 1 << 16
API = re.compile(r"/api/models/([^/]+/[^/]+)(?:/revision/(.+))?")
RESOLVE = re.compile(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)")
LARGE = re.compile(r"/large/([^/]+/[^/]+)/(.+)")


@dataclass(frozen=True)
class ReceivedRequest:
    """A request that the server received."""

    method: str
    path: str
    range: str | None
    has_token: bool


@dataclass
class Faults:
    """Faults to inject; a test may change them at any time."""

    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By file: byte counts after which the connection is reset; one entry per connection."""
    wrong: dict[str, int] = field(default_factory=dict)
    """By file: the number of responses with one corrupted byte."""
    statuses: list[int] = field(default_factory=list)
    """Status codes of the next responses to model requests."""
    token: str | None = None
    """Token that every request must have."""
    gated: bool = False
    """If True, requests with a token get 403 GatedRepo."""
    ignores_range: bool = False
    chunk_seconds: float = 0.0
    """Pause before each chunk of a large file, in seconds."""


class HubServer:
    """Repositories by name, each backed by a folder. Every known revision resolves to the same commit."""

    def __init__(
        self,
        repos: Mapping[str, Path],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        large_bytes: int = LARGE_BYTES,
        revisions: Sequence[str] = ("main",),
    ) -> None:
        self.repos, self.revisions, self.large_bytes = dict(repos), revisions, large_bytes
        self.faults = Faults()
        self.asked: list[ReceivedRequest] = []
        self.lock = threading.Lock()
        self._digests: dict[Path, str] = {}
        self._server = _Server((host, port), _Handler)
        self._server.hub = self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def commit(self, repo: str) -> str:
        """Return the commit hash, which depends on the files' contents."""
        lines = [f"{name} {self.digest(path)}" for name, path in self.files(repo)]
        return hashlib.sha1("\n".join(lines).encode()).hexdigest()

    def files(self, repo: str) -> list[tuple[str, Path]]:
        folder = self.repos[repo]
        return sorted((str(path.relative_to(folder)), path) for path in folder.rglob("*") if path.is_file())

    def is_large(self, path: Path) -> bool:
        return path.stat().st_size >= self.large_bytes

    def digest(self, path: Path) -> str:
        """Return the SHA-256 of a large file, or git's SHA-1 of a small one."""
        if path not in self._digests:
            size = path.stat().st_size
            hashed = hashlib.sha256() if self.is_large(path) else hashlib.sha1(b"blob %d\0" % size)
            with path.open("rb") as stream:
                while data := stream.read(1 << 20):
                    hashed.update(data)
            self._digests[path] = hashed.hexdigest()
        return self._digests[path]

    def description(self, repo: str) -> dict[str, object]:
        """Return the body of /api/models."""
        siblings = []
        for name, path in self.files(repo):
            size, digest = path.stat().st_size, self.digest(path)
            sibling: dict[str, object] = {"rfilename": name, "size": size, "blobId": digest[:40]}
            if self.is_large(path):
                sibling["lfs"] = {"sha256": digest, "size": size, "pointerSize": 135}
            siblings.append(sibling)
        return {"id": repo, "modelId": repo, "sha": self.commit(repo), "siblings": siblings}

    def asked_for(self, name: str) -> list[ReceivedRequest]:
        """Return the GET requests for one file."""
        return [one for one in self.asked if one.method == "GET" and one.path.endswith("/" + name)]

    def serve_forever(self) -> None:
        self._server.serve_forever(poll_interval=0.1)

    @contextmanager
    def running(self) -> Iterator[HubServer]:
        thread = threading.Thread(target=self.serve_forever, name="hub", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: HubServer

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore aborted connections, which tests cause on purpose."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def do_GET(self) -> None:
        hub, path = self.server.hub, unquote(urlsplit(self.path).path)
        has_token = self.headers.get("Authorization") is not None
        with hub.lock:
            hub.asked.append(ReceivedRequest(self.command, path, self.headers.get("Range"), has_token))
        large = LARGE.fullmatch(path)
        if large is not None:  # a redirect's target, which needs no token
            self._give(large[2], hub.repos[large[1]] / large[2])
            return
        api, resolve = API.fullmatch(path), RESOLVE.fullmatch(path)
        match = api or resolve
        if match is None:
            self._refuse(404, None)
            return
        refusal = self._refusal(match[1], match[2])
        if refusal is not None:
            self._refuse(*refusal)
            return
        if api is not None:
            self._send(200, json.dumps(hub.description(api[1])).encode(), {"Content-Type": "application/json"})
            return
        assert resolve is not None
        file = hub.repos[resolve[1]] / resolve[3]
        if not file.is_file():
            self._refuse(404, "EntryNotFound")
            return
        if hub.is_large(file):
            self._send(302, b"", {"Location": f"/large/{resolve[1]}/{resolve[3]}"})
        else:
            self._give(resolve[3], file)

    do_HEAD = do_GET

    def _refusal(self, repo: str, revision: str | None) -> tuple[int, str | None] | None:
        hub, faults = self.server.hub, self.server.hub.faults
        with hub.lock:
            if faults.statuses:
                return faults.statuses.pop(0), None
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token and faults.token is not None and token != faults.token:
            return 401, None
        if repo not in hub.repos or (faults.token is not None and not token):
            return 401, "RepoNotFound"
        if faults.gated:
            return 403, "GatedRepo"
        if revision is not None and revision not in (*hub.revisions, hub.commit(repo)):
            return 404, "RevisionNotFound"
        return None

    def _refuse(self, status: int, code: str | None) -> None:
        headers = {"X-Error-Message": "Invalid credentials in Authorization header"} if status == 401 else {}
        self._send(status, b"", headers if code is None else {"X-Error-Code": code})

    def _send(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _give(self, name: str, file: Path) -> None:
        hub, faults, size = self.server.hub, self.server.hub.faults, file.stat().st_size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        first, last = 0, size - 1
        if asked is not None and not faults.ignores_range:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
        if first > last and size:
            self._send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        with hub.lock:
            cuts = faults.cuts.get(name, [])
            cut = cuts.pop(0) if cuts else None
            is_wrong = faults.wrong.get(name, 0) > 0
            if is_wrong:
                faults.wrong[name] -= 1
        self.send_response(206 if (first, last) != (0, size - 1) else 200)
        if (first, last) != (0, size - 1):
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last - first + 1))
        self.send_header("ETag", f'"{hub.digest(file)}"')
        self.end_headers()
        if self.command != "HEAD":
            self._write(file, first, last, cut, is_wrong)

    def _write(self, file: Path, first: int, last: int, cut: int | None, is_wrong: bool) -> None:
        given, length = 0, last - first + 1
        with file.open("rb") as stream:
            stream.seek(first)
            while given < length:
                if cut is not None and given >= cut:
                    self.wfile.flush()
                    self.connection.shutdown(socket.SHUT_RDWR)
                    self.close_connection = True
                    return
                time.sleep(self.server.hub.faults.chunk_seconds)
                wanted = min(CHUNK_BYTES, length - given, (cut or length) - given)
                data = stream.read(wanted)
                self.wfile.write(bytes([data[0] ^ 1]) + data[1:] if is_wrong and not given else data)
                given += len(data)

    def log_message(self, format: str, *args: object) -> None:
        if self.server.server_address[0] != "127.0.0.1":  # in a pod, whose log scenarios read
            print(f"{self.command} {self.path} {self.headers.get('Range', '')} -> {args[1:]}", flush=True)


def main() -> None:
    """`hub_server.py ORG/NAME=FOLDER … --port 8080 --cut FILE=BYTES`: serve on all addresses."""
    parser = argparse.ArgumentParser()
    parser.add_argument("repos", nargs="+", metavar="ORG/NAME=FOLDER")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--cut", action="append", default=[], metavar="FILE=BYTES")
    parser.add_argument("--chunk-seconds", type=float, default=0.0, help="pause before each 64 KiB of a large file")
    arguments = parser.parse_args()
    repos = dict(repo.split("=", 1) for repo in arguments.repos)
    hub = HubServer({name: Path(folder) for name, folder in repos.items()}, host="", port=arguments.port)
    hub.faults.chunk_seconds = arguments.chunk_seconds
    for name in repos:
        hub.description(name)  # computes the digests before the server accepts requests
    for cut in arguments.cut:
        name, _, count = cut.partition("=")
        hub.faults.cuts.setdefault(name, []).append(int(count))
    print(f"serving {', '.join(repos)} on port {arguments.port}", flush=True)
    hub.serve_forever()


if __name__ == "__main__":
    main()

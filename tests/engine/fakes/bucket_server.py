"""moto's S3 on loopback behind injected network faults: cut transfers, changed bytes, rejections."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote

import botocore.session
from botocore.config import Config
from moto.moto_server.werkzeug_app import create_backend_app
from werkzeug.serving import make_server

if TYPE_CHECKING:
    from _typeshed.wsgi import StartResponse, WSGIEnvironment

KEYS = {"AWS_ACCESS_KEY_ID": "AKIDTESTS", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}
HELD_SECONDS = 50.0  # less than clients wait for
ERROR = '<?xml version="1.0"?><Error><Code>{code}</Code><Message>as asked</Message></Error>'


@dataclass(frozen=True)
class Asked:
    """A received request."""

    method: str
    path: str
    range: str | None
    query: dict[str, list[str]]
    is_signed: bool


@dataclass
class Faults:
    """Active faults."""

    cuts: dict[str, list[int]] = field(default_factory=dict)
    """By file: bytes after which the connection is closed; one entry per connection."""
    held: dict[str, threading.Event] = field(default_factory=dict)
    """By file: event before which the remaining content is held back, for at most HELD_SECONDS."""
    wrong: dict[str, int] = field(default_factory=dict)
    """By file: number of responses with one changed byte."""
    errors: list[tuple[int, str]] = field(default_factory=list)
    """Statuses and codes of the next answers."""
    ignores_range: bool = False


class _Cut(Exception):
    """The connection ends here."""


class BucketServer:
    """The store; `client` puts objects into it."""

    def __init__(self, address: str = "127.0.0.1") -> None:
        self.faults = Faults()
        self.asked: list[Asked] = []
        self._moto = create_backend_app("s3")
        self._server = make_server(address, 0, self._answer, threaded=True)
        self.url = f"http://{address}:{self._server.server_port}"
        self._lock = threading.Lock()
        self.client: Any = botocore.session.Session().create_client(
            "s3",
            region_name=KEYS["AWS_DEFAULT_REGION"],
            endpoint_url=self.url,
            aws_access_key_id=KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=KEYS["AWS_SECRET_ACCESS_KEY"],
            config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
        )

    @contextmanager
    def running(self) -> Iterator[BucketServer]:
        thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="bucket", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def put(self, bucket: str, prefix: str, folder: Path, **how: str) -> None:
        """All files of a folder, below the prefix; `how` are further parameters of PutObject."""
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                key = f"{prefix}/{path.relative_to(folder)}".lstrip("/")
                self.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes(), **how)

    def asked_for(self, name: str) -> list[Asked]:
        """Requests for the bytes of one file."""
        return [one for one in self.asked if one.method == "GET" and one.path.endswith(f"/{name}")]

    def _answer(self, environ: WSGIEnvironment, start: StartResponse) -> Iterable[bytes]:
        path, method = unquote(environ["PATH_INFO"]), environ["REQUEST_METHOD"]
        name = path.rsplit("/", 1)[-1]
        with self._lock:
            if method in ("GET", "HEAD"):
                query = parse_qs(environ.get("QUERY_STRING", ""), keep_blank_values=True)
                is_signed = "HTTP_AUTHORIZATION" in environ
                self.asked.append(Asked(method, path, environ.get("HTTP_RANGE"), query, is_signed))
                if self.faults.errors:
                    status, code = self.faults.errors.pop(0)
                    body = b"" if method == "HEAD" else ERROR.format(code=code).encode()
                    start(f"{status} {code}", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
                    return [body]
            is_wrong = method == "GET" and self.faults.wrong.get(name, 0) > 0
            if is_wrong:
                self.faults.wrong[name] -= 1
        if self.faults.ignores_range:
            environ.pop("HTTP_RANGE", None)
        body = b"".join(self._moto(environ, start))
        if is_wrong and body:
            body = bytes([body[0] ^ 1]) + body[1:]
        with self._lock:  # an answer that ends before the cut is none
            cuts = self.faults.cuts.get(name, []) if method == "GET" else []
            cut = cuts.pop(0) if cuts and len(body) > cuts[0] else None
        if cut is None and method == "GET" and name in self.faults.held:
            self.faults.held[name].wait(HELD_SECONDS)
        return [body] if cut is None else _cut_off(body, cut)


def _cut_off(body: bytes, at: int) -> Iterator[bytes]:
    yield body[:at]
    raise _Cut

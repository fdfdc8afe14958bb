"""Hostile clients of one API server, and the effect on a well-behaved one.

`watch` (a process of its own, so that the hostile clients' work is not measured) holds one stream after another and
sends probes. It prints the longest gap between two tokens of a stream, and the failed probes, as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

PROBE_SECONDS = 0.1
PROBE_TIMEOUT_SECONDS = 1.0
"""Kubernetes' default. On a machine with other work a test may need more."""
STREAM_TOKENS = 2000
LEXEMES = "|".join(f"[a-z]{{{1 + n % 7},{9 + n % 5}}}{chr(97 + n % 26)}[0-9]{{1,{3 + n % 4}}}" for n in range(60))
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Watched:
    """Measurements of a well-behaved client, in seconds."""

    longest_gap: float
    median_gap: float
    num_tokens: int
    num_probes: int
    failed_probes: int

    @classmethod
    def during(cls, port: int, seconds: float, probe_timeout: float = PROBE_TIMEOUT_SECONDS) -> Callable[[], Watched]:
        """Start watching. Return a function that waits for the result."""
        command = [sys.executable, __file__, str(port), str(seconds), str(probe_timeout)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        return lambda: cls(**json.loads(process.communicate(timeout=seconds + 120)[0]))


def watch(port: int, seconds: float, probe_timeout: float) -> Watched:
    until, gaps, failed, probes = time.monotonic() + seconds, [], 0, 0

    def probe() -> None:
        nonlocal failed, probes
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=probe_timeout) as client:
            while time.monotonic() < until:
                probes += 1
                try:
                    failed += client.get("/livez", headers={"Connection": "close"}).status_code != 200
                except httpx.HTTPError:
                    failed += 1
                time.sleep(PROBE_SECONDS)

    prober = threading.Thread(target=probe)
    prober.start()
    body = {"prompt": "ab", "max_tokens": STREAM_TOKENS, "ignore_eos": True, "stream": True, "temperature": 0}
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
        while time.monotonic() < until:
            last: float | None = None
            with client.stream("POST", "/v1/completions", json=body) as response:
                for line in response.iter_lines():
                    if not line:
                        continue
                    now = time.monotonic()
                    if last is not None:
                        gaps.append(now - last)
                    last = now
                    if now > until:
                        break
    prober.join()
    gaps.sort()
    return Watched(gaps[-1], gaps[len(gaps) // 2], len(gaps), probes, failed)


def resident_bytes(process: int) -> int:
    """Return the resident memory of a process and all its descendants."""
    total = 0
    with contextlib.suppress(OSError):
        total = int(Path(f"/proc/{process}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            total += resident_bytes(int(child))
    return total


class HostileClients:
    """Random attacks on the server at a port, by several threads with one seed each."""

    def __init__(self, port: int, seed: int, num_threads: int = 3) -> None:
        self._port, self._stop = port, threading.Event()
        self.counts: dict[str, int] = {}
        self.unexpected: list[str] = []
        """Responses other than success or a client's error."""
        self._threads = [
            threading.Thread(target=self._run, args=(random.Random(1000 * seed + number),))
            for number in range(num_threads)
        ]

    def __enter__(self) -> HostileClients:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(180)

    def _run(self, draw: random.Random) -> None:
        attacks = [self.bodies, self.bodies, self.requests, self.requests, self.leaving, self.connections]
        with httpx.Client(base_url=f"http://127.0.0.1:{self._port}", timeout=60) as client:
            while not self._stop.is_set():
                attack = draw.choice(attacks)
                self.counts[attack.__name__] = self.counts.get(attack.__name__, 0) + 1
                try:
                    attack(client, draw)
                except httpx.HTTPError as error:
                    if not self._stop.is_set():
                        self.unexpected.append(f"{attack.__name__}: {type(error).__name__}: {error}")

    def bodies(self, client: httpx.Client, draw: random.Random) -> None:
        """Large bodies of many values, of text, and of no JSON."""
        makers: list[Callable[[], str]] = [
            lambda: '{"prompt":[' + "[1]," * 2_000_000 + "[1]]}",
            lambda: '{"prompt":[' + "1," * 4_000_000 + "1]}",
            lambda: '{"prompt":[' + "{}," * 2_500_000 + "{}]}",
            lambda: '{"prompt":[' + '"",' * 240_000 + '""]}',
            lambda: '{"prompt":"' + "[{, " * 2_000_000 + '"}',
            lambda: '{"prompt":"' + "\\\\u0041" * 1_300_000 + '"}',
            lambda: "[" * 8_000_000,
            lambda: '{"messages":[' + '{"role":"user","content":[{"type":"text","text":""}]},' * 100_000 + "{}]}",
            lambda: '{"prompt":"a","logit_bias":{' + ",".join(f'"{n}":1' for n in range(20_000)) + "}}",
            lambda: "{" + ",".join(f'"x{n}":1' for n in range(9_000)) + "}",
            lambda: '{"prompt":"a","seed":' + "9" * 4_000_000 + "}",
        ]
        body = draw.choice(makers)()
        path = draw.choice(["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/detokenize"])
        self._check(client.post(path, content=body, headers={"Content-Type": "application/json"}))

    def requests(self, client: httpx.Client, draw: random.Random) -> None:
        """Valid requests with the largest allowed values."""
        self._check(client.post("/v1/completions", json=self._request(draw)))

    def leaving(self, client: httpx.Client, draw: random.Random) -> None:
        """The same as streams, whose client leaves in the middle."""
        with client.stream("POST", "/v1/completions", json=self._request(draw) | {"stream": True}) as response:
            for number, _ in enumerate(response.iter_raw()):
                if number >= draw.randrange(20):
                    break

    def _request(self, draw: random.Random) -> Json:
        number = draw.randrange(10**6)
        fields: Json = draw.choice(
            [
                {"stop": ["a" * 1023 + "!", *("b" + chr(99 + n) * 1023 for n in range(15))], "allowed_token_ids": [97]},
                {"stop": ["a" * n + "!" for n in range(1000, 1016)], "allowed_token_ids": [97]},
                {"allowed_token_ids": list(range(257))},
                {"logit_bias": {str(n): 1.0 for n in range(257)}},
                {"bad_words": [f"{n}{'x' * 200}" for n in range(256)]},
                {"presence_penalty": 1.0, "repetition_penalty": 1.3, "prompt": [n % 257 for n in range(1500)]},
                {"structured_outputs": {"regex": f"({LEXEMES}){{1,{20 + number % 50}}}"}, "temperature": 1.0},
                {"structured_outputs": {"json": {"type": "object", "properties": {f"f{number}": {"type": "integer"}}}}},
                {"logprobs": 20, "n": 18, "max_tokens": 200},
                {"prompt": [n % 257 for n in range(1500)], "prompt_logprobs": 20, "n": 2, "max_tokens": 1},
                {"prompt": [[n % 257] for n in range(100)], "n": 1},
            ]
        )
        most: Json = {"prompt": "ab", "n": draw.choice([1, 16, 64]), "max_tokens": draw.choice([8, 64])}
        return most | {"temperature": draw.choice([0, 1]), "ignore_eos": True} | fields

    def connections(self, client: httpx.Client, draw: random.Random) -> None:
        """Connections that send nothing, a part of a head, or a part of a body."""
        half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 8000000\r\n\r\n"
        data = draw.choice([b"", b"GET /li", half, half + b"x" * 1_000_000, b"\x16\x03", b"nonsense\r\n\r\n"])
        with contextlib.ExitStack() as stack:
            for _ in range(draw.choice([1, 50, 200])):
                with contextlib.suppress(OSError):
                    connection = stack.enter_context(socket.create_connection(("127.0.0.1", self._port), timeout=5))
                    connection.sendall(data)
            self._stop.wait(draw.random())

    def _check(self, response: httpx.Response) -> None:
        if response.status_code >= 500:
            self.unexpected.append(f"{response.status_code}: {response.text[:200]}")


def phases(
    port: int, process: int, seconds: float, seed: int, probe_timeout: float
) -> Iterator[tuple[str, Watched, int]]:
    """Yield (phase, measurements, resident bytes afterwards): undisturbed, then under attack, then undisturbed."""
    for phase in ("warm", "before", "attack", "after"):
        with HostileClients(port, seed) if phase in ("warm", "attack") else contextlib.nullcontext() as clients:
            seen = Watched.during(port, seconds if phase in ("warm", "attack") else seconds / 4, probe_timeout)()
        if isinstance(clients, HostileClients):
            assert clients.unexpected == []
        time.sleep(2.0)  # for the end of the last requests
        yield phase, seen, resident_bytes(process)


if __name__ == "__main__":
    seen = watch(int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]))
    print(json.dumps({name: getattr(seen, name) for name in Watched.__slots__}))

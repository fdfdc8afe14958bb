"""A router process whose clients read nothing of long answers."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from router_process import Router, SlowEngine, engine_in_thread

NUM_CLIENTS = 20
ANSWER_BYTES = 100 << 20
PIECE = bytes(1 << 16)


class EagerEngine(SlowEngine):
    """Answers with ANSWER_BYTES as fast as they are read."""

    num_pieces = 0
    begun: ClassVar[list[int]] = []  # a list, because several threads count
    ended: ClassVar[list[int]] = []

    def do_POST(self) -> None:  # noqa: N802
        self.rfile.read(int(self.headers["content-length"]))
        EagerEngine.begun.append(self.client_address[1])
        self.send_response(200)
        self.send_header("content-length", str(ANSWER_BYTES))
        self.end_headers()
        try:
            for _ in range(ANSWER_BYTES // len(PIECE)):
                self.wfile.write(PIECE)
                EagerEngine.num_pieces += 1
        except ConnectionError:
            self.close_connection = True
        EagerEngine.ended.append(self.client_address[1])


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_clients_that_read_nothing_stop_the_engine(start: Callable[..., Router]) -> None:
    """Answers of 100 MB stay in the engine but for the sockets' buffers, and end with their clients."""
    with engine_in_thread(EagerEngine) as port:
        router = start(f"--endpoint=http://127.0.0.1:{port}")
        before = resident_bytes(router.process.pid)
        with ExitStack() as clients:
            for _ in range(NUM_CLIENTS):
                client = clients.enter_context(socket.create_connection(("127.0.0.1", router.port)))
                client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: r\r\ncontent-length: 2\r\n\r\n{}")
            router.wait_for(lambda: len(EagerEngine.begun) == NUM_CLIENTS)
            seen = -1
            while seen != EagerEngine.num_pieces:
                seen = EagerEngine.num_pieces
                time.sleep(1.0)
            grown = resident_bytes(router.process.pid) - before
            print(f"router: {grown / 2**20:.1f} MiB more; engine: {seen * len(PIECE) / 2**20:.0f} MiB sent")
            assert EagerEngine.ended == []
            assert grown < NUM_CLIENTS << 20
            assert seen * len(PIECE) < NUM_CLIENTS * ANSWER_BYTES / 2
        router.wait_for(lambda: len(EagerEngine.ended) == NUM_CLIENTS)

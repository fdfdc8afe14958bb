"""Router processes whose engines lie about their state, or tell each router something else."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from router_process import Router, SlowEngine, engine_in_thread
from trimtab_router.protocol.messages import (
    Beat,
    Coefficients,
    Delta,
    Hello,
    KeyRule,
    Load,
    Message,
    Snapshot,
    encode_frame,
)
from trimtab_router.protocol.prefix_keys import CUT_BYTES, KEY_RULE

HELLO = Hello(1, "epoch", [0], 16, KeyRule(KEY_RULE, CUT_BYTES, ["base"]))
STEPS = Coefficients(0.01, 1e-4, 0.0, 0.0)
IDLE = Load(token_budget=1000, slots=64)
BUSY = Load(running=60, prefill_tokens=500_000, token_budget=1000, slots=64)
Script = Callable[[int], Iterator[bytes]]
"""Frames of the n-th connection to the state stream."""


def make_engine(script: Script) -> type[SlowEngine]:
    numbers = itertools.count()

    class Engine(SlowEngine):
        def do_GET(self) -> None:  # noqa: N802
            self.send_response(200)
            self.send_header("connection", "close")
            self.end_headers()
            for frame in script(next(numbers)):
                self.wfile.write(frame)
            self.close_connection = True

        def handle(self) -> None:
            try:
                super().handle()
            except ConnectionError:
                return

    return Engine


def frames(*messages: Message) -> bytes:
    return b"".join(map(encode_frame, messages))


def endlessly(*messages: Message) -> Script:
    def script(number: int) -> Iterator[bytes]:
        yield frames(*messages)
        while True:
            time.sleep(0.2)
            yield frames(Beat())

    return script


def at_once(number: int, call: Callable[[], tuple[int, str | None]]) -> list[tuple[int, str | None]]:
    answers: list[tuple[int, str | None]] = []
    threads = [threading.Thread(target=lambda: answers.append(call())) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_routers_that_disagree_answer_every_request(start: Callable[..., Router]) -> None:
    """One router sees a busy engine, another an old idle state of it, a third lost the stream of the other engine."""

    def lost(number: int) -> Iterator[bytes]:
        if number < 2:
            yield from endlessly(HELLO, Snapshot(0, 0, IDLE, b"", STEPS))(number)
        yield frames(HELLO, Snapshot(0, 0, IDLE, b"", STEPS)) if number == 2 else b""

    def stale(number: int) -> Iterator[bytes]:
        yield from endlessly(HELLO, Snapshot(0, 0, BUSY if number == 0 else IDLE, b"", STEPS))(number)

    with engine_in_thread(make_engine(stale)) as first, engine_in_thread(make_engine(lost)) as second:
        flags = [f"--endpoint=http://127.0.0.1:{port}?admin={port}" for port in (first, second)]
        routers = [start(*flags) for _ in range(3)]  # in this order they connect to the streams
        time.sleep(2.5)  # until a lost stream counts as lost
        answers = [at_once(12, partial(router.ask, 0.3)) for router in routers]
        replicas = [Counter(replica for _, replica in each) for each in answers]
        assert {status for each in answers for status, _ in each} == {200}
        assert replicas[0] == {f"127.0.0.1:{second}": 12}
        for spread in replicas[1:]:  # their own requests count, although the state does not change
            assert min(spread.values(), default=0) >= 3, replicas
        for router in routers:
            assert router.process.poll() is None
            assert "Traceback" not in router.log.read_text()


def random_keys(number: int) -> bytes:
    return os.urandom(8 * number)


def nonsense(number: int) -> Iterator[bytes]:
    """Begin each connection in another way, and never stop."""
    absurd = Load(2**62, 2**62, 0, -(2**62), 2**62, -1, 2**63 - 1, 2**63 - 1, 2**62, float("nan"), -1e300, 1e-300)
    many_cores = Hello(1, "epoch", list(range(64)), 16, HELLO.key_rule)
    match number % 5:
        case 0:
            yield frames(HELLO, Snapshot(0, 0, absurd, random_keys(1 << 20), Coefficients(1e308, -1.0, 0.0, 0.0)))
            for sequence in itertools.count(1):
                yield frames(Delta(sequence, 0, removed=random_keys(100_000), added=random_keys(100_000), load=absurd))
        case 1:
            keys = random_keys(1 << 18)
            yield frames(many_cores)
            for core in range(64):
                yield frames(Snapshot(0, core, absurd, keys))
        case 2:
            while True:
                yield frames(HELLO, Snapshot(0, 0, IDLE, random_keys(10), STEPS))
        case 3:
            body = b"\x82\xa4type\xacacknowledged\xa7numbers\xdd" + (10_000_000).to_bytes(4, "big") + bytes(10_000_000)
            yield frames(HELLO, Snapshot(0, 0, IDLE)) + len(body).to_bytes(4, "little") + body
        case _:
            yield frames(HELLO, Snapshot(0, 0, Load(adapters=["a" * 1_000_000] * 12)))
            yield b"\xff\xff\xff\x00" + b"\x00" * (16 << 20)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_lying_engines_cost_bounded_memory_and_fail_no_request(start: Callable[..., Router]) -> None:
    with ExitStack() as stack:
        honest = stack.enter_context(engine_in_thread(make_engine(endlessly(HELLO, Snapshot(0, 0, IDLE, b"", STEPS)))))
        liars = [stack.enter_context(engine_in_thread(make_engine(nonsense))) for _ in range(2)]
        router = start(*(f"--endpoint=http://127.0.0.1:{port}?admin={port}" for port in (honest, *liars)))
        for _ in range(50):
            assert router.post() == 200
            assert resident_bytes(router.process.pid) < 400 << 20
            time.sleep(0.1)
        assert "Traceback" not in router.log.read_text()

"""A rank is given up for its silence, and not for what this process has not read yet."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from trimtab_engine.executor import watch
from trimtab_engine.executor.messages import HEARTBEAT_SECONDS, SILENCE_SECONDS, FromWorker, Hello, RankAlive
from trimtab_engine.executor.watch import Watch

WAIT_SECONDS = 30.0
RANKS = (1, 2)


class ScriptedControl:
    """A control socket, and the clock that goes on while it is asked: `turns` are (seconds that the look at the socket
    takes, what came in meanwhile). Behind the last turn it stays quiet, a heartbeat at a time."""

    def __init__(self, turns: list[tuple[float, list[FromWorker]]]) -> None:
        self.now = 0.0
        self.quiet_looks = 0
        self.is_quiet = threading.Event()
        self._turns, self._unread = list(turns), list[FromWorker]()

    def poll(self, milliseconds: int) -> bool:
        if milliseconds and not self._unread:
            seconds, messages = self._turns.pop(0) if self._turns else (HEARTBEAT_SECONDS, [])
            self.now += seconds
            self._unread += messages
            if not self._unread:
                self.quiet_looks += 1
            if self.quiet_looks * HEARTBEAT_SECONDS >= 3 * SILENCE_SECONDS:
                self.is_quiet.set()
        return bool(self._unread)

    def recv_multipart(self) -> list[bytes]:
        return [b"rank", msgspec.msgpack.encode(self._unread.pop(0))]

    def send_multipart(self, parts: list[bytes]) -> None:
        pass


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs a Watch over a scripted socket until that was quiet for long; the failures it told."""

    def run(turns: list[tuple[float, list[FromWorker]]]) -> list[tuple[float, str]]:
        control, told = ScriptedControl(turns), list[tuple[float, str]]()
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: control.now))
        steps = {rank: f"tcp://{rank}" for rank in RANKS}
        rank_watch = Watch(
            cast("Any", control), {}, 0, steps, lambda failure: told.append((control.now, failure.message))
        )
        try:
            assert control.is_quiet.wait(WAIT_SECONDS)
        finally:
            rank_watch.close()
        return told

    return run


HELLOS: list[FromWorker] = [Hello(rank, "host", rank) for rank in RANKS]


def test_who_says_nothing_is_given_up(watched: Any) -> None:
    beats: list[tuple[float, list[FromWorker]]] = [(HEARTBEAT_SECONDS, [RankAlive(1)]) for _ in range(9)]
    at, words = watched([(0.0, HELLOS), *beats])[0]
    assert words == "rank 2 (host, pid 2) has been silent for 5 s"
    assert SILENCE_SECONDS < at <= SILENCE_SECONDS + 2 * HEARTBEAT_SECONDS


def test_words_that_lie_unread_are_read_before_anybody_is_given_up(watched: Any) -> None:
    late: tuple[float, list[FromWorker]] = (2 * SILENCE_SECONDS, [RankAlive(2), RankAlive(1)])
    at, _ = watched([(0.0, HELLOS), late])[0]
    assert at > 3 * SILENCE_SECONDS, "both spoke when this process was late: their silence begins there"

"""Silent ranks are reported dead, but not because of unread messages."""

import threading
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from trimtab_engine.executor import worker_monitor
from trimtab_engine.executor.messages import HEARTBEAT_SECONDS, SILENCE_SECONDS, FromWorker, Hello, RankAlive
from trimtab_engine.executor.worker_monitor import WorkerMonitor

WAIT_SECONDS = 30.0
RANKS = (1, 2)


class ScriptedControl:
    """A control socket with a clock that advances while polled: `turns` are (seconds per poll, messages received
    meanwhile). After the last turn it is silent, one heartbeat per poll.
    """

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
    """Run a monitor on a scripted socket until a long silence; return the reported failures."""

    def run(turns: list[tuple[float, list[FromWorker]]]) -> list[tuple[float, str]]:
        control, told = ScriptedControl(turns), list[tuple[float, str]]()
        monkeypatch.setattr(worker_monitor, "time", SimpleNamespace(monotonic=lambda: control.now))
        steps = {rank: f"tcp://{rank}" for rank in RANKS}
        rank_watch = WorkerMonitor(
            cast("Any", control), {}, 0, steps, lambda failure: told.append((control.now, failure.message))
        )
        try:
            assert control.is_quiet.wait(WAIT_SECONDS)
        finally:
            rank_watch.close()
        return told

    return run


HELLOS: list[FromWorker] = [Hello(rank, "host", rank) for rank in RANKS]


def test_silent_rank_is_reported_dead(watched: Any) -> None:
    beats: list[tuple[float, list[FromWorker]]] = [(HEARTBEAT_SECONDS, [RankAlive(1)]) for _ in range(9)]
    at, words = watched([(0.0, HELLOS), *beats])[0]
    assert words == "rank 2 (host, pid 2) has been silent for 5 s"
    assert SILENCE_SECONDS < at <= SILENCE_SECONDS + 2 * HEARTBEAT_SECONDS


def test_unread_heartbeats_are_read_before_judging(watched: Any) -> None:
    late: tuple[float, list[FromWorker]] = (2 * SILENCE_SECONDS, [RankAlive(2), RankAlive(1)])
    at, _ = watched([(0.0, HELLOS), late])[0]
    assert at > 3 * SILENCE_SECONDS, "both spoke when this process was late: their silence begins there"

"""Detection of dead ranks in a separate thread that receives heartbeats and polls processes.

A rank that ended, or was silent for SILENCE_SECONDS, is reported once with its cause. Other worker messages go into
`inbox`.
"""

import logging
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import zmq

from trimtab_engine.executor.messages import (
    HEARTBEAT_SECONDS,
    SILENCE_SECONDS,
    FromWorker,
    Hello,
    RankAlive,
    RankTaken,
    Welcome,
    WorkerFailed,
)
from trimtab_engine.ipc.heartbeat_timer import HeartbeatTimer

logger = logging.getLogger("trimtab_engine.core")

POLL_MILLISECONDS = 200
FINAL_MESSAGE_SECONDS = 0.5  # for a dead worker's last message with the cause to arrive


class WorkerMonitor:
    """Owner of the control socket. `processes`: this node's workers by rank; ranks on other nodes are known by their
    messages.

    A rank belongs to the first process that sends Hello for it: a pod that was considered dead and returns is rejected.
    """

    def __init__(
        self,
        control: "zmq.Socket[bytes]",
        processes: Mapping[int, "subprocess.Popen[bytes]"],
        own_rank: int,
        steps: Mapping[int, str],
        on_death: Callable[[WorkerFailed], None] | None,
    ) -> None:
        self.inbox: queue.Queue[FromWorker] = queue.Queue()
        self.failure: WorkerFailed | None = None
        """The first dead rank and its cause."""
        self.failed = threading.Event()
        self._control, self._processes, self._on_death = control, processes, on_death
        self._hosts = dict.fromkeys(processes, "this node")
        self._steps = steps
        self._welcomed: set[int] = set()
        self._alive = msgspec.msgpack.encode(RankAlive(own_rank))
        self._heard: dict[int, float] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop monitoring: ranks may end. Returns when the thread has ended."""
        self._closing.set()
        self._thread.join()

    def _run(self) -> None:
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromWorker)
        timer = HeartbeatTimer(time.monotonic(), every_seconds=HEARTBEAT_SECONDS)
        while not self._closing.is_set():
            if self._control.poll(POLL_MILLISECONDS):
                sender, *frames = self._control.recv_multipart()
                try:
                    message: FromWorker = decoder.decode(b"".join(frames))
                except msgspec.DecodeError as error:
                    logger.warning("invalid message on the control socket: %s", error)
                    continue
                if isinstance(message, Hello):
                    self._control.send_multipart([sender, self._answer(message)])
                else:
                    self._receive(message)
                if isinstance(message, RankAlive):
                    self._control.send_multipart([sender, self._alive])
            if self.failure is None:
                self._check_exits()
            now = time.monotonic()
            has_read_all = not self._control.poll(0)
            if timer.is_on_time(now) and has_read_all and self.failure is None:
                self._check_silence(now)

    def _answer(self, hello: Hello) -> bytes:
        """Assign the rank once."""
        rank, place = hello.rank, f"{hello.host}, pid {hello.pid}"
        if rank in self._welcomed:
            return msgspec.msgpack.encode(RankTaken(self._hosts[rank]))
        self._welcomed.add(rank)
        self._hosts[rank], self._heard[rank] = place, time.monotonic()
        self.inbox.put(hello)
        return msgspec.msgpack.encode(Welcome(self._steps[rank]))

    def _receive(self, message: FromWorker) -> None:
        rank = message.report.rank if hasattr(message, "report") else message.rank
        self._heard[rank] = time.monotonic()
        match message:
            case WorkerFailed():
                self._die(message)
            case RankAlive():
                pass
            case _:
                self.inbox.put(message)

    def _check_exits(self) -> None:
        for rank, process in self._processes.items():
            code = process.poll()
            if code is not None and not self._control.poll(int(FINAL_MESSAGE_SECONDS * 1000)):
                cause = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
                self._die(WorkerFailed(rank, f"rank {rank} ({self._hosts[rank]}) {cause}", 1))
                return

    def _check_silence(self, now: float) -> None:
        for rank, heard in self._heard.items():
            if now - heard > SILENCE_SECONDS:
                where = self._hosts.get(rank, "another node")
                self._die(WorkerFailed(rank, f"rank {rank} ({where}) has been silent for {SILENCE_SECONDS:.0f} s", 1))
                return

    def _die(self, failure: WorkerFailed) -> None:
        if self.failure is None and not self._closing.is_set():
            self.failure = failure
            self.failed.set()
            if self._on_death is not None:
                self._on_death(failure)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"

"""The other ranks of an engine from the core's side: processes, commands to all of them, answers."""

import contextlib
import logging
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec
import zmq

from trimtab_engine.config.core_environment import core_environment
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.errors import ConfigError, WorkerDied
from trimtab_engine.executor.messages import FromWorker, Hello, Join, Stop, ToWorker, WorkerFailed, WorkerStart
from trimtab_engine.executor.rendezvous import announce_core, join_groups, leave_groups, open_store, own_address_at
from trimtab_engine.executor.worker_monitor import WorkerMonitor
from trimtab_engine.ipc.network import in_url, is_ipv6_url
from trimtab_engine.ipc.parent_death import environment_with_parent
from trimtab_engine.ipc.private_folder import PrivateFolder
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.ranks import Layout

WORKER_COMMAND: tuple[str, ...] = (sys.executable, "-m", "trimtab_engine.executor.worker")
STOP_SECONDS = 3.0  # for a worker to leave before it is killed
STOP_LINGER_MILLISECONDS = 1000  # for Stop to leave before this process ends
CAUSE_SECONDS = 3.0  # for the monitor to report the rank whose connection broke
POLL_MILLISECONDS = 100
START_SECONDS = 600.0  # for a process on this node to start: it imports torch
LOAD_SECONDS = 3600.0  # for the slowest rank's weights
LOG_INTERVAL_SECONDS = 30.0  # between log lines about missing ranks of other nodes
OnDeath = Callable[[str, int], None]
"""Called from a separate thread with a message that names the rank and the cause, and an exit code."""
Answer = TypeVar("Answer", bound=FromWorker)

logger = logging.getLogger("trimtab_engine.core")


class Workers:
    """All ranks but the core's own. Call join() once, then send() and answers(); close() at the end."""

    def __init__(self, config: EngineConfig, layout: Layout, on_death: OnDeath | None = None) -> None:
        data = layout.data_rank(config)
        self.layout, self.rank = layout, layout.driver(data)
        self._num_others = layout.ranks_per_engine - 1
        self._uses_nccl = uses_nccl(config)
        self._private = PrivateFolder()
        self._folder = self._private.path
        self._rendezvous = rendezvous_of(config, layout, self._folder)
        """Rendezvous of all ranks of the world; it may span nodes even if this core's ranks do not."""
        self._core_is_on_one_node = config.nodes_per_core == 1
        self._context = zmq.Context()
        control = self._context.socket(zmq.ROUTER)
        self._secret = SharedSecret.read(config.rendezvous_secret_file)
        self._store = open_store(self._rendezvous, serves=data == 0, secret=self._secret)
        control_address = self._bind(control, "control")
        self._steps, addresses = [], {}
        for process in range(1, layout.ranks_per_engine):
            steps = self._context.socket(zmq.PUSH)
            steps.setsockopt(zmq.SNDHWM, 0)
            addresses[layout.rank_of_process(process, data)] = self._bind(steps, f"steps-{process}")
            self._steps.append(steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._closed = threading.Event()
        self._processes = start_processes(config, layout, range(1, config.ranks_per_node), self._rendezvous)
        by_rank = {layout.rank_of_process(index, data): process for index, process in self._processes.items()}
        tell = None if on_death is None else (lambda failure: on_death(_line(failure), failure.exit_code))
        self._watch = WorkerMonitor(control, by_rank, self.rank, addresses, tell)
        self._control = control
        announce_core(self._store, config, control_address)

    def join(self) -> RankGroups:
        """Wait for all ranks and create the groups. On other nodes ranks may have to be scheduled and pull their image
        first, so there is no timeout.

        Raises:
            WorkerDied: If a rank ends before.
        """
        self.answers(Hello, START_SECONDS if self._core_is_on_one_node else None)
        for steps in self._steps:
            while not steps.poll(POLL_MILLISECONDS, zmq.POLLOUT):  # welcomed but not connected yet
                self.check()
        self.send(Join())
        return join_groups(self._store, self.layout, self.rank, uses_nccl=self._uses_nccl, rendezvous=self._rendezvous)

    def send(self, message: ToWorker) -> None:
        """Send to every worker, in call order. Never waits."""
        body = self._encoder.encode(message)
        for steps in self._steps:
            try:
                steps.send(body, zmq.DONTWAIT)
            except zmq.Again:  # not connected: the rank has died
                raise self.cause_of(WorkerDied("a rank does not take messages")) from None

    def answers(self, kind: type[Answer], timeout: float | None = LOAD_SECONDS) -> list[Answer]:
        """Return one message of this kind from every worker, by rank. Without a timeout it logs periodically how many
        are missing.

        Raises:
            WorkerDied, ConfigError: With a rank's cause.
        """
        answers: dict[int, Answer] = {}
        began = said = time.monotonic()
        while len(answers) < len(self._steps):
            self.check()
            try:
                message = self._watch.inbox.get(timeout=0.1)
            except queue.Empty:
                now = time.monotonic()
                missing = f"{self._num_others - len(answers)} of {self._num_others} other ranks"
                if timeout is not None and now > began + timeout:
                    raise WorkerDied(f"{missing} did not report within {timeout:.0f} s") from None
                if timeout is None and now > said + LOG_INTERVAL_SECONDS:
                    logger.warning(
                        "%s have not reported for %.0f s; are the processes of all nodes running, with the same flags?",
                        missing,
                        now - began,
                    )
                    said = now
                continue
            assert isinstance(message, kind), message
            rank = message.report.rank if hasattr(message, "report") else message.rank
            answers[rank] = message
        return [answers[rank] for rank in sorted(answers)]

    def check(self) -> None:
        """Raise the failure of a rank, if one failed."""
        failure = self._watch.failure
        if failure is not None:
            raise _error(failure)

    def cause_of(self, error: Exception) -> Exception:
        """Return the cause of a failed collective: the dead rank if the monitor reports one soon, else the error
        itself.
        """
        self._watch.failed.wait(CAUSE_SECONDS)
        failure = self._watch.failure
        return WorkerDied(f"a collective failed: {error}") if failure is None else _error(failure)

    def close(self) -> None:
        """Stop the workers and forget the groups. Safe to call again."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._watch.close()
        with contextlib.suppress(WorkerDied, ConfigError):
            self.send(Stop())
        deadline = time.monotonic() + STOP_SECONDS
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for steps in self._steps:  # the message must reach other nodes, whose processes are not awaited here
            steps.close(linger=0 if self._watch.failed.is_set() else STOP_LINGER_MILLISECONDS)
        self._control.close(linger=0)
        self._context.term()
        leave_groups()
        self._private.remove()

    def _bind(self, socket: "zmq.Socket[bytes]", name: str) -> str:
        """Bind the socket and return the address that workers connect to."""
        if self._core_is_on_one_node:
            address = f"ipc://{self._folder}/{name}"
            socket.bind(address)
            return address
        url = f"tcp://{in_url(own_address_at(self._rendezvous))}"
        socket.setsockopt(zmq.IPV6, is_ipv6_url(url))
        if self._secret is not None:
            self._secret.set_curve_server(socket)
        return f"{url}:{socket.bind_to_random_port(url)}"


def rendezvous_of(config: EngineConfig, layout: Layout, folder: Path | None) -> str:
    """Return the rendezvous of the ranks. On one node it is a file: in the core's own folder, or in that of
    data-parallel cores.
    """
    if config.data_parallel_rendezvous is not None and layout.data > 1:
        return config.data_parallel_rendezvous
    return f"file:{folder}/store" if config.nodes_per_core == 1 else f"tcp:{config.master_addr}:{config.master_port}"


def start_processes(
    config: EngineConfig, layout: Layout, processes: range, rendezvous: str
) -> dict[int, "subprocess.Popen[bytes]"]:
    """Start this node's workers, by their number among the engine's processes."""
    started = {}
    for process in processes:
        local_index = config.first_local_rank + process % config.ranks_per_node
        start = WorkerStart(config, layout, process, local_index, config.num_local_ranks, rendezvous)
        worker = subprocess.Popen(
            WORKER_COMMAND,
            stdin=subprocess.PIPE,
            env=environment_with_parent(core_environment()),
            start_new_session=True,  # Ctrl-C is for the first process, which ends this one in order
        )
        assert worker.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already: the watch names it
            worker.stdin.write(msgspec.json.encode(start) + b"\n")
        with contextlib.suppress(ConnectionError):
            worker.stdin.close()
        started[process] = worker
    return started


def uses_nccl(config: EngineConfig) -> bool:
    """Return True if every rank of this node has its own GPU. Otherwise ranks share GPUs and communicate through host
    memory by gloo.
    """
    if config.device != "cuda":
        return False
    import torch

    return torch.cuda.device_count() >= config.num_local_ranks


def _line(failure: WorkerFailed) -> str:
    return f"a rank of the engine died: {failure.message}"


def _error(failure: WorkerFailed) -> Exception:
    return ConfigError(failure.message) if failure.exit_code == 2 else WorkerDied(_line(failure))

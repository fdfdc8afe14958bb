"""Worker process of one rank, `-m trimtab_engine.executor.worker`. It executes the engine core's commands.

It reads its start from stdin (JSON), joins the groups, loads its shard, then serves commands. A separate thread
exchanges heartbeats with the core; when the core is lost the process ends, even in the middle of a collective.
"""

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import zmq

from trimtab_engine.device.device import Device
from trimtab_engine.device.kv_commands import CopyBlocks, MapBlocks, SwapBlocks, UnmapAbove
from trimtab_engine.device.swap_cache import SwapCache
from trimtab_engine.errors import ConfigError
from trimtab_engine.executor.block_table_deltas import BlockTableReceiver
from trimtab_engine.executor.messages import (
    HEARTBEAT_SECONDS,
    SILENCE_SECONDS,
    AdapterLoaded,
    DropWeights,
    ForgetAdapter,
    FromWorker,
    GetLedger,
    Hello,
    InitKvCache,
    InitSwapSpace,
    Join,
    LedgerReport,
    LoadAdapter,
    Mapped,
    Profile,
    Profiled,
    RankAlive,
    RankLoaded,
    Reloaded,
    ReloadWeights,
    StartedSteps,
    StartSteps,
    Step,
    Stop,
    ToHello,
    ToWorker,
    UseWeights,
    Welcome,
    WorkerFailed,
    WorkerStart,
)
from trimtab_engine.executor.rendezvous import RETRY_SECONDS, find_core, join_groups
from trimtab_engine.executor.start import connect, measure, rank_report
from trimtab_engine.executor.workers import uses_nccl
from trimtab_engine.ipc.gc_freeze import freeze_startup_objects
from trimtab_engine.ipc.network import is_ipv6_url, is_on_network
from trimtab_engine.ipc.parent_death import exit_with_parent
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.runner.loading import load_model_runner
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.runner.rank_ledger import rank_ledger
from trimtab_engine.runner.start import start_device_steps
from trimtab_engine.runner.weights import WeightsUnavailable

OTHERS_FIRST_SECONDS = 2.0  # for the engine core to notice a rank that died before this one
LINGER_MILLISECONDS = 1000  # for the last message to leave before the process ends

logger = logging.getLogger("trimtab_engine.worker")


class Worker:
    """One rank: its sockets to the core and, once loaded, its runner."""

    def __init__(self, start: WorkerStart) -> None:
        self._start, self._config = start, start.config
        self.layout = start.layout
        self.rank = self.layout.rank_of_process(start.process, self.layout.data_rank(start.config))
        self._context = zmq.Context()
        self._secret: SharedSecret | None = None
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToWorker)
        steps = self._await_welcome()
        self._steps = self._connect(zmq.PULL, steps)
        self._steps.setsockopt(zmq.RCVHWM, 0)
        threading.Thread(target=self._exchange_heartbeats, name="heartbeat", daemon=True).start()

    def _await_welcome(self) -> str:
        """Wait for a core that assigns this rank to this process and return the address of its commands. SIGTERM ends
        the process only until then. Afterwards the core, which may be draining, ends it by Stop, or its loss does.
        """
        hello = msgspec.msgpack.encode(Hello(self.rank, socket.gethostname(), os.getpid()))
        decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(ToHello)
        holder = None
        while True:
            self._store, self._control_address = find_core(self._start.rendezvous, self._config)
            self._secret = SharedSecret.read(self._config.rendezvous_secret_file)
            self._control = self._connect(zmq.DEALER, self._control_address)
            while True:
                self._control.send(hello)
                if not self._control.poll(int(SILENCE_SECONDS * 1000)):
                    break  # the core ended; another one may have started
                answer: ToHello = decoder.decode(self._control.recv())
                if isinstance(answer, Welcome):
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
                    return answer.steps
                if holder != answer.holder:
                    logger.warning("rank %d is held by %s: waiting", self.rank, answer.holder)
                holder = answer.holder
                time.sleep(RETRY_SECONDS)
            self._control.close(linger=0)

    def _connect(self, kind: int, address: str) -> "zmq.Socket[bytes]":
        connected: zmq.Socket[bytes] = self._context.socket(kind)
        connected.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        connected.setsockopt(zmq.IPV6, is_ipv6_url(address))
        if self._secret is not None and is_on_network(address):
            self._secret.set_curve_client(connected)
        connected.connect(address)
        return connected

    def send(self, message: FromWorker) -> None:
        self._control.send(msgspec.msgpack.encode(message))

    def await_others(self) -> bool:
        """Return True if every rank has joined. False if the core ended because it cannot start."""
        return isinstance(self._next(), Join)

    def load(self) -> None:
        """Join the groups and read the shard."""
        config, start = self._config, self._start
        device = Device(
            config.device,
            memory_bytes=config.device_memory_bytes,
            cpu_threads=config.cpu_threads,
            local_index=start.local_index,
            local_count=start.local_count,
        )
        nccl = uses_nccl(config)
        groups = join_groups(self._store, self.layout, self.rank, uses_nccl=nccl, rendezvous=start.rendezvous)
        self._before = connect(groups, device)
        self._runner = load_model_runner(
            ModelRunner, config, device, lambda stage, percent: None, layout=self.layout, rank=self.rank, groups=groups
        )
        self._device = device
        self.send(RankLoaded(rank_report(self._runner, device, self.layout, self.rank)))

    def serve(self) -> None:
        """Execute the core's commands in order, until Stop."""
        runner = self._runner
        swap_cache: SwapCache | None = None
        tables = BlockTableReceiver()
        has_weights = True
        while True:
            message = self._next()
            match message:
                case Step():
                    runner.run(tables.read(message.inputs, message.tables), message.feed)
                case MapBlocks():
                    self.send(Mapped(self.rank, _error_of(partial(runner.kv_cache.map_blocks, message.num_blocks))))
                case UnmapAbove():
                    runner.kv_cache.unmap_above(message.num_blocks)
                case CopyBlocks():
                    runner.kv_cache.copy_blocks(message.pairs)
                case InitSwapSpace():
                    swap_cache = runner.new_swap_cache(message.num_blocks)
                case SwapBlocks():
                    assert swap_cache is not None  # without it the core's swap space has no blocks
                    swap_cache.copy(message.swap_out, message.swap_in)
                case Profile():
                    formula = measure(self._config, self._device, runner, self._before)
                    self.send(Profiled(self.rank, formula))
                case GetLedger():
                    ledger = rank_ledger(
                        formula,
                        self._device,
                        runner.kv_cache,
                        blocks_used=message.blocks_used,
                        has_weights=has_weights,
                    )
                    self.send(LedgerReport(self.rank, ledger))
                case InitKvCache():
                    runner.init_kv_cache(message.cap_blocks)
                case StartSteps():
                    runner.limit_model_len(message.max_model_len)
                    memory = start_device_steps(self._config, self._device, runner, lambda percent: None)
                    assert memory is not None  # the core's device, which is like this one, has such steps
                    formula = memory.added_to(formula)
                    self.send(StartedSteps(self.rank, memory.buffer_bytes, memory.graphs_bytes))
                case DropWeights():
                    if has_weights:
                        runner.drop_weights()
                    has_weights = False
                case ReloadWeights():
                    answer = self._reload_weights()
                    has_weights = not answer.error
                    self.send(answer)
                case UseWeights():
                    runner.use_weights()
                case LoadAdapter():
                    self.send(self._load_adapter(message))
                case ForgetAdapter():
                    runner.forget_adapter(message.slot)
                case Stop():
                    return
                case Join():
                    raise AssertionError("the groups are joined once")

    def _reload_weights(self) -> Reloaded:
        try:
            self._runner.read_weights()
        except WeightsUnavailable as error:
            return Reloaded(self.rank, str(error))
        return Reloaded(self.rank, adapters=[each.adapter.slot for each in self._runner.adapters])

    def _load_adapter(self, message: LoadAdapter) -> AdapterLoaded:
        try:
            return AdapterLoaded(self.rank, self._runner.load_adapter(message.slot, message.name, message.folder))
        except ConfigError as error:
            return AdapterLoaded(self.rank, error=str(error))
        except Exception as error:  # a client's input: the core reports it and goes on
            logger.exception("adapter %s: not loaded", message.name)
            return AdapterLoaded(self.rank, error=f"{type(error).__name__}: {error}")

    def _next(self) -> ToWorker:
        message: ToWorker = self._decoder.decode(self._steps.recv())
        return message

    def close(self) -> None:
        """Let the last message leave."""
        self._control.close()

    def _exchange_heartbeats(self) -> None:
        """Send heartbeats, and end the process when the core no longer answers."""
        line = self._connect(zmq.DEALER, self._control_address)
        body = msgspec.msgpack.encode(RankAlive(self.rank))
        unanswered = 0  # counted, not timed: while this process itself is suspended, silence does not count
        while unanswered * HEARTBEAT_SECONDS < SILENCE_SECONDS:
            line.send(body)
            if line.poll(int(HEARTBEAT_SECONDS * 1000)):
                while line.poll(0):  # drain late answers: they must not count for a core that ended since
                    line.recv()
                unanswered = 0
                time.sleep(HEARTBEAT_SECONDS)
            else:
                unanswered += 1
        print(f"trimtab-engine: rank {self.rank} ends: the engine core does not answer", file=sys.stderr, flush=True)
        os._exit(1)


def _error_of(work: Callable[[], None]) -> str:
    """Return why the device has no memory for this work. Empty on success."""
    try:
        work()
    except MemoryError as error:
        return str(error) or "out of memory"
    return ""


def main() -> int:
    """Read the start message from stdin, load, serve. Returns the exit code."""
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    worker = Worker(msgspec.json.decode(sys.stdin.readline(), type=WorkerStart))
    try:
        if worker.await_others():
            worker.load()
            freeze_startup_objects()
            worker.serve()
    except ConfigError as error:
        worker.send(WorkerFailed(worker.rank, str(error), exit_code=2))
        return 2
    except Exception as error:
        logger.exception("rank %d failed", worker.rank)
        if isinstance(error, RuntimeError):  # torch's, perhaps because another rank died: that one is to be named
            time.sleep(OTHERS_FIRST_SECONDS)
        message = f"rank {worker.rank} ({socket.gethostname()}) failed: {type(error).__name__}: {error}"
        worker.send(WorkerFailed(worker.rank, message, exit_code=1))
        return 1
    finally:
        worker.close()
    return 0


if __name__ == "__main__":
    code = main()
    os._exit(code)  # without waiting for collectives that will never end

"""The API server's side of the engine core: its process, its sockets, and who waits for which answer.

The API server binds both sockets in a private folder, starts the core with the addresses on stdin, and reads everything
the core sends in one task. It never imports torch.
"""

import asyncio
import contextlib
import json
import logging
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trimtab_engine.config import EngineConfig, core_environment
from trimtab_engine.errors import EngineDead
from trimtab_engine.messages import (
    AbortRequests,
    AddRequest,
    AdminCall,
    AdminReply,
    CoreFailed,
    CoreReady,
    FromCore,
    LoadProgress,
    RequestOutput,
    SamplingParams,
    Shutdown,
    StepOutputs,
    StepStats,
    ToCore,
)

CORE_COMMAND: tuple[str, ...] = (sys.executable, "-m", "trimtab_engine.core_process")
SHUTDOWN_SECONDS = 5.0  # for the core to leave its loop before it is killed
DEAD_GRACE_SECONDS = 0.5  # for the core's last message, which says why, to arrive after its process has ended

logger = logging.getLogger("trimtab_engine.api")


class CoreClient:
    """One engine core, as a process. `on_step` is called with the statistics of each step, in order."""

    def __init__(self, config: EngineConfig, on_step: Callable[[StepStats], None]) -> None:
        self._config = config
        self._on_step = on_step
        self._folder = Path(tempfile.mkdtemp(prefix="trimtab-"))  # mode 0700: nobody else can reach the sockets
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._process: asyncio.subprocess.Process | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._requests: dict[str, asyncio.Queue[RequestOutput | None]] = {}
        self._calls: dict[str, asyncio.Future[AdminReply]] = {}
        self._closing = False
        self.progress = LoadProgress("starting", 0.0)
        self.ready: CoreReady | None = None
        self.failure: CoreFailed | None = None
        self.loaded = asyncio.Event()
        """Set when the core is ready, or has failed."""
        self.ended = asyncio.Event()
        """Set when the core has failed or its process has ended."""

    async def start(self) -> None:
        """Start the core's process. Loading goes on in the background: see `progress`, `loaded`."""
        to_core, from_core = (f"ipc://{self._folder}/{name}" for name in ("to-core", "from-core"))
        for socket in (self._inbox, self._outbox):
            socket.setsockopt(zmq.LINGER, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.bind(to_core)
        self._inbox.bind(from_core)
        start = {"config": msgspec.to_builtins(self._config), "to_core": to_core, "from_core": from_core}
        self._process = await asyncio.create_subprocess_exec(
            *CORE_COMMAND, stdin=asyncio.subprocess.PIPE, env=core_environment()
        )
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already: the watch says so
            self._process.stdin.write(json.dumps(start).encode() + b"\n")
            await self._process.stdin.drain()
        self._tasks = [asyncio.create_task(self._read()), asyncio.create_task(self._watch())]

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def num_requests(self) -> int:
        """Sequences that the core works on for this server."""
        return len(self._requests)

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(
        self, request_id: str, prompt_token_ids: list[int], sampling: SamplingParams, arrival_time: float
    ) -> AsyncGenerator[RequestOutput, None]:
        """One sequence's outputs; the last has a finish_reason. Leaving early aborts. EngineDead if the core ends."""
        queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._requests[request_id] = queue
        finished = False
        try:
            self._raise_if_dead()
            self._send(AddRequest(request_id, prompt_token_ids, sampling, arrival_time))
            while not finished:
                output = await queue.get()
                if output is None:
                    self._raise_if_dead()
                    raise EngineDead("the engine core has ended")
                finished = output.finish_reason is not None
                yield output
        finally:
            self._requests.pop(request_id, None)
            if not finished:
                self.abort([request_id])

    def abort(self, request_ids: list[str]) -> None:
        """Free these requests at the next step boundary. Never waits, so that it is safe while being cancelled."""
        if self.is_alive and not self._closing:
            self._send(AbortRequests(request_ids))

    def abort_all(self) -> None:
        """End everything that runs: the waiting handlers see finish_reason abort."""
        request_ids = list(self._requests)
        self.abort(request_ids)
        for request_id in request_ids:
            self._requests[request_id].put_nowait(RequestOutput(request_id, [], "abort"))

    async def call(self, method: str, body: dict[str, Any]) -> AdminReply:
        """One admin call, answered between two steps. EngineDead if the core ends first."""
        self._raise_if_dead()
        call_id = uuid.uuid4().hex
        future: asyncio.Future[AdminReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(AdminCall(call_id, method, body))
            return await future
        finally:
            self._calls.pop(call_id, None)

    # --- the end --------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Tell the core to end, wait for it, and remove the sockets."""
        self._closing = True
        process = self._process
        if process is not None and process.returncode is None:
            if self.ready is not None and self.failure is None:
                self._send(Shutdown())
            else:
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), SHUTDOWN_SECONDS)
            except TimeoutError:
                process.kill()
                await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    # --- the inside -----------------------------------------------------------------------------------------------

    def _send(self, message: ToCore) -> None:
        """Hand a message to the socket, in order. It is not waited for: when the core has just died there is nobody to
        take it, and what tells the waiting is its end, not this socket.
        """
        self._outbox.send(self._encoder.encode(message))

    def _raise_if_dead(self) -> None:
        if not self.is_alive:
            raise EngineDead(self.failure.message if self.failure else "the engine core has ended")

    async def _read(self) -> None:
        try:
            while True:
                self._handle(self._decoder.decode(await self._inbox.recv()))
        except Exception as error:  # a defect of ours; without this every request would wait for ever
            logger.exception("cannot read what the engine core sends")
            self._fail(CoreFailed(f"cannot read what the engine core sends: {type(error).__name__}: {error}", 1))

    def _handle(self, message: FromCore) -> None:
        match message:
            case StepOutputs():
                for output in message.outputs:
                    queue = self._requests.get(output.request_id)
                    if queue is not None:  # none: aborted meanwhile
                        queue.put_nowait(output)
                self._on_step(message.stats)
            case AdminReply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case LoadProgress():
                self.progress = message
            case CoreReady():
                self.ready = message
                self.progress = LoadProgress("ready", 100.0)
                self.loaded.set()
            case CoreFailed():
                self._fail(message)

    async def _watch(self) -> None:
        """Notice that the process has ended, even when it could not say so."""
        assert self._process is not None
        code = await self._process.wait()
        if self._closing:
            return
        await asyncio.sleep(DEAD_GRACE_SECONDS)
        if self.failure is None:
            cause = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
            self._fail(CoreFailed(f"the engine core ended unexpectedly ({cause})", exit_code=1))

    def _fail(self, failure: CoreFailed) -> None:
        if self.failure is not None:
            return  # the first one is the cause
        self.failure = failure
        self.ended.set()
        self.loaded.set()
        for queue in self._requests.values():
            queue.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(failure.message))

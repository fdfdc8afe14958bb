"""An API server's side of the engine core: its two sockets, and who waits for which answer.

It binds both sockets in the launcher's private folder and reads everything the core sends in one task. It never imports
torch. The core's process is core_launcher.py's.
"""

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, Callable
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trimtab_engine.errors import EngineDead
from trimtab_engine.messages import (
    AbortRequests,
    AddRequest,
    AdminCall,
    AdminReply,
    ClientAddresses,
    ClientOutputs,
    CoreFailed,
    CoreReady,
    FromCore,
    LoadProgress,
    RequestOutput,
    Shutdown,
    StepOutputs,
    StepStats,
    ToCore,
)

logger = logging.getLogger("trimtab_engine.api")


class CoreClient:
    """One line to the core. `on_ready` is called when the core is ready, then `on_step` with the statistics of each
    step, in order; only client 0 gets those.
    """

    def __init__(
        self,
        addresses: ClientAddresses,
        *,
        client_index: int = 0,
        on_ready: Callable[[CoreReady], None] | None = None,
        on_step: Callable[[StepStats], None] | None = None,
    ) -> None:
        self._addresses, self._client_index = addresses, client_index
        self._on_ready, self._on_step = on_ready, on_step
        self._context = zmq.asyncio.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._outbox = self._context.socket(zmq.PUSH)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._reader: asyncio.Task[None] | None = None
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

    def open(self) -> None:
        """Bind the sockets and read what comes."""
        for socket in (self._inbox, self._outbox):
            socket.setsockopt(zmq.LINGER, 0)
        self._outbox.setsockopt(zmq.SNDHWM, 0)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._outbox.bind(self._addresses.to_core)
        self._inbox.bind(self._addresses.from_core)
        self._reader = asyncio.create_task(self._read())

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def num_requests(self) -> int:
        """Sequences that the core works on for this server."""
        return len(self._requests)

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """One sequence's outputs; the last has a finish_reason. Leaving early aborts. EngineDead if the core ends."""
        request_id = request.request_id
        request.client_index = self._client_index
        queue: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._requests[request_id] = queue
        finished = False
        try:
            self._raise_if_dead()
            self._send(request)
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
            self._send(AdminCall(call_id, method, body, self._client_index))
            return await future
        finally:
            self._calls.pop(call_id, None)

    # --- the end --------------------------------------------------------------------------------------------------

    def shut_down_core(self) -> None:
        """Ask the core to leave its loop."""
        self._closing = True
        self._send(Shutdown())

    async def close(self) -> None:
        """Remove the sockets."""
        self._closing = True
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
        self._context.destroy(linger=0)

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
            self.fail(CoreFailed(f"cannot read what the engine core sends: {type(error).__name__}: {error}", 1))

    def _handle(self, message: FromCore) -> None:
        match message:
            case StepOutputs():
                self._deliver(message.outputs)
                if self._on_step is not None:
                    self._on_step(message.stats)
            case ClientOutputs():
                self._deliver(message.outputs)
            case AdminReply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case LoadProgress():
                self.progress = message
            case CoreReady():
                self.ready = message
                self.progress = LoadProgress("ready", 100.0)
                if self._on_ready is not None:
                    self._on_ready(message)
                self.loaded.set()
            case CoreFailed():
                self.fail(message)

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            queue = self._requests.get(output.request_id)
            if queue is not None:  # none: aborted meanwhile
                queue.put_nowait(output)

    def fail(self, failure: CoreFailed) -> None:
        """The engine serves no more: whoever waits gets EngineDead. The first failure is the cause and stays."""
        if self.failure is not None:
            return
        self.failure = failure
        self.ended.set()
        self.loaded.set()
        for queue in self._requests.values():
            queue.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(failure.message))

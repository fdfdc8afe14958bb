"""An API server's side of the engine: two sockets to each core, and who waits for which answer.

There is one core, or one per data-parallel rank: then each request goes to one of them, each admin call to all. The
sockets are bound in the launcher's private folder, and one task reads each core. It never imports torch. The cores'
processes are core_launcher.py's.
"""

import asyncio
import logging
import operator
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from trimtab_engine.core_balancer import CoreBalancer
from trimtab_engine.core_replies import merge_replies, merge_states
from trimtab_engine.errors import EngineDead, InvalidRequest
from trimtab_engine.messages import (
    REFUSED,
    AbortRequests,
    AddRequest,
    AdminCall,
    AdminReply,
    ClientAddresses,
    ClientOutputs,
    CoreFailed,
    CoreReady,
    EngineState,
    FromCore,
    LoadProgress,
    RequestOutput,
    Shutdown,
    StartWave,
    StepOutputs,
    StepStats,
    ToCore,
)

logger = logging.getLogger("trimtab_engine.api")


@dataclass(slots=True)
class _Asked:
    """A request that a core works on: which one, and where its outputs go."""

    core: int
    outputs: asyncio.Queue[RequestOutput | None] = field(default_factory=asyncio.Queue)


class CoreClient:
    """One line to each core. `addresses`: one entry per core. `on_ready` is called when all cores are ready, then
    `on_step` with the statistics of each step, in order; only client 0 gets those. `on_state` is called whenever the
    state of all cores together is another.
    """

    def __init__(
        self,
        addresses: Sequence[ClientAddresses],
        *,
        client_index: int = 0,
        num_clients: int = 1,
        on_ready: Callable[[CoreReady], None] | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        on_state: Callable[[EngineState], None] | None = None,
    ) -> None:
        self._addresses, self._client_index = addresses, client_index
        self._on_ready, self._on_step, self._on_state = on_ready, on_step, on_state
        self._states: dict[int, EngineState] = {}
        self.state = EngineState()
        """Of all cores together."""
        self._context = zmq.asyncio.Context()
        self._inboxes = [self._context.socket(zmq.PULL) for _ in addresses]
        self._outboxes = [self._context.socket(zmq.PUSH) for _ in addresses]
        self._balancer = CoreBalancer(len(addresses), num_clients)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._readers: list[asyncio.Task[None]] = []
        self._requests: dict[str, _Asked] = {}
        self._calls: dict[str, asyncio.Future[AdminReply]] = {}
        self._closing = False
        self._stepped = asyncio.Event()
        self.last_steps = [0] * len(addresses)
        """The newest step of each core that anything has been heard of."""
        self._progress = [LoadProgress("starting", 0.0) for _ in addresses]
        self._readies: dict[int, CoreReady] = {}
        self.ready: CoreReady | None = None
        """Of the first core, once all are ready."""
        self.failure: CoreFailed | None = None
        self.loaded = asyncio.Event()
        """Set when all cores are ready, or one has failed."""
        self.ended = asyncio.Event()
        """Set when a core has failed or its process has ended: one lost, everything ends."""

    def open(self) -> None:
        """Bind the sockets and read what comes."""
        for index, (inbox, outbox, address) in enumerate(
            zip(self._inboxes, self._outboxes, self._addresses, strict=True)
        ):
            for socket in (inbox, outbox):
                socket.setsockopt(zmq.LINGER, 0)
            outbox.setsockopt(zmq.SNDHWM, 0)
            inbox.setsockopt(zmq.RCVHWM, 0)
            outbox.bind(address.to_core)
            inbox.bind(address.from_core)
            self._readers.append(asyncio.create_task(self._read(index)))

    @property
    def num_cores(self) -> int:
        return len(self._addresses)

    @property
    def progress(self) -> LoadProgress:
        """Of the core that is furthest behind."""
        return min(self._progress, key=lambda progress: progress.percent)

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def num_requests(self) -> int:
        """Sequences that the core works on for this server."""
        return len(self._requests)

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: AddRequest) -> AsyncGenerator[RequestOutput, None]:
        """One sequence's outputs; the last has a finish_reason. Leaving early aborts. EngineDead if a core ends.

        With several cores those are asked in turn who can run it at once; the last one has to queue it.
        """
        request_id = request.request_id
        request.client_index = self._client_index
        asked = self._requests[request_id] = _Asked(self._first_choice(request))
        self._balancer.sent(asked.core)
        refused: frozenset[int] = frozenset()
        finished = False
        try:
            self._raise_if_dead()
            self._send(request, asked.core)
            while not finished:
                output = await asked.outputs.get()
                if output is None:
                    self._raise_if_dead()
                    raise EngineDead("the engine core has ended")
                if output.finish_reason == REFUSED:
                    refused |= {asked.core}
                    self._ask_another(request, asked, refused)
                    continue
                finished = output.finish_reason is not None
                yield output
        finally:
            self._balancer.ended(asked.core)
            self._requests.pop(request_id, None)
            if not finished and self.is_alive and not self._closing:
                self._send(AbortRequests([request_id]), asked.core)

    def _first_choice(self, request: AddRequest) -> int:
        """The core that the request names, else the least loaded. Raises InvalidRequest for one that is not there."""
        pinned = request.data_parallel_rank
        if pinned is not None and not 0 <= pinned < self.num_cores:
            raise InvalidRequest(f"data-parallel rank {pinned} is not there; ranks are 0 to {self.num_cores - 1}")
        request.may_queue = pinned is not None or self.num_cores == 1
        return self._balancer.choose() if pinned is None else pinned

    def _ask_another(self, request: AddRequest, asked: _Asked, refused: frozenset[int]) -> None:
        self._balancer.ended(asked.core)
        asked.core = self._balancer.choose(refused)
        self._balancer.sent(asked.core)
        request.may_queue = len(refused) == self.num_cores
        self._send(request, asked.core)

    def abort(self, request_ids: list[str]) -> None:
        """Free these requests at the next step boundary. Never waits, so that it is safe while being cancelled."""
        if self.is_alive and not self._closing:
            self._send_all(AbortRequests(request_ids))

    def abort_all(self) -> None:
        """End everything that runs: the waiting handlers see finish_reason abort."""
        request_ids = list(self._requests)
        self.abort(request_ids)
        for request_id in request_ids:
            self._requests[request_id].outputs.put_nowait(RequestOutput(request_id, [], "abort"))

    async def call(self, method: str, body: dict[str, Any]) -> AdminReply:
        """One admin call, answered between two steps. EngineDead if a core ends first. With several cores a change is
        tried on all before it is made on any."""
        if method == "config_patch" and self.num_cores > 1 and not body.get("dry_run"):
            tried = await self._call_all(method, {**body, "dry_run": True})
            if tried.status != 200:
                return tried
        return await self._call_all(method, body)

    async def _call_all(self, method: str, body: dict[str, Any]) -> AdminReply:
        replies = await asyncio.gather(*(self._call(method, body, core) for core in range(self.num_cores)))
        return merge_replies(method, replies)

    async def _call(self, method: str, body: dict[str, Any], core: int) -> AdminReply:
        self._raise_if_dead()
        call_id = uuid.uuid4().hex
        future: asyncio.Future[AdminReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(AdminCall(call_id, method, body, self._client_index), core)
            return await future
        finally:
            self._calls.pop(call_id, None)

    async def heard_of(self, steps: Sequence[int]) -> None:
        """Return when these steps, one number per core, have been heard of."""
        while any(map(operator.lt, self.last_steps, steps)):
            self._stepped.clear()
            await self._stepped.wait()

    # --- the end --------------------------------------------------------------------------------------------------

    def shut_down_core(self) -> None:
        """Ask every core to leave its loop."""
        self._closing = True
        self._send_all(Shutdown())

    async def close(self) -> None:
        """Remove the sockets."""
        self._closing = True
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._context.destroy(linger=0)

    # --- the inside -----------------------------------------------------------------------------------------------

    def _send_all(self, message: ToCore) -> None:
        for core in range(self.num_cores):
            self._send(message, core)

    def _send(self, message: ToCore, core: int) -> None:
        """Hand a message to the socket, in order. It is not waited for: when the core has just died there is nobody to
        take it, and what tells the waiting is its end, not this socket.
        """
        self._outboxes[core].send(self._encoder.encode(message))

    def _raise_if_dead(self) -> None:
        if not self.is_alive:
            raise EngineDead(self.failure.message if self.failure else "the engine core has ended")

    async def _read(self, core: int) -> None:
        try:
            while True:
                self._handle(self._decoder.decode(await self._inboxes[core].recv()), core)
        except Exception as error:  # a defect of ours; without this every request would wait for ever
            logger.exception("cannot read what the engine core sends")
            self.fail(CoreFailed(f"cannot read what the engine core sends: {type(error).__name__}: {error}", 1))

    def _handle(self, message: FromCore, core: int) -> None:
        match message:
            case StepOutputs():
                self._note_step(message.stats.step, core)
                self._deliver(message.outputs)
                self._note_load(message.stats, core)
                if self._on_step is not None:
                    self._on_step(message.stats)
            case ClientOutputs():
                self._note_step(message.step, core)
                self._deliver(message.outputs)
            case EngineState():
                self._note_state(message, core)
            case AdminReply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case LoadProgress():
                self._progress[core] = message
            case CoreReady():
                self._progress[core] = LoadProgress("ready", 100.0)
                self._readies[core] = message
                if len(self._readies) == self.num_cores:
                    self._all_ready()
            case StartWave():
                for other in range(self.num_cores):
                    if other != core:
                        self._send(message, other)
            case CoreFailed(text, exit_code):
                is_one_of_many = self.num_cores > 1 and exit_code != 2  # 2: what is wrong is so for all cores
                self.fail(CoreFailed(f"engine core {core}: {text}", exit_code) if is_one_of_many else message)

    def _all_ready(self) -> None:
        self.ready = self._readies[0]
        if self._on_ready is not None:
            self._on_ready(self.ready)
        self.loaded.set()

    def _note_state(self, state: EngineState, core: int) -> None:
        self._states[core] = state
        self.state = merge_states(list(self._states.values()))
        if self._on_state is not None:
            self._on_state(self.state)

    def _note_load(self, stats: StepStats, core: int) -> None:
        stats.engine_index = core
        usage = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
        self._balancer.report(core, num_running=stats.num_running, num_waiting=stats.num_waiting, kv_usage=usage)

    def _note_step(self, step: int, core: int) -> None:
        self.last_steps[core] = max(self.last_steps[core], step)
        self._stepped.set()

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            asked = self._requests.get(output.request_id)
            if asked is not None:  # none: aborted meanwhile
                asked.outputs.put_nowait(output)

    def fail(self, failure: CoreFailed) -> None:
        """The engine serves no more: whoever waits gets EngineDead. The first failure is the cause and stays."""
        if self.failure is not None:
            return
        self.failure = failure
        self.ended.set()
        self.loaded.set()
        for asked in self._requests.values():
            asked.outputs.put_nowait(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(failure.message))

"""The API server's client of the engine cores: sockets, requests and pending replies. Never imports torch.

There is one core, or one per data-parallel rank: then each request goes to one of them, and each admin call to all.
Cores may join and retire while others serve (scaling.py). The sockets are bound at the launcher's addresses, and one
task reads each core. launcher.py owns the processes.
"""

import asyncio
import contextlib
import logging
import operator
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec
import zmq
import zmq.asyncio

from trimtab_engine.engine_client.balancer import CoreBalancer
from trimtab_engine.engine_client.core_registry import CoreRegistry
from trimtab_engine.engine_client.liveness import LivenessTracker, Silence
from trimtab_engine.engine_client.output_queue import OutputQueue, PlainRun
from trimtab_engine.engine_client.replies import merge_replies, merge_states
from trimtab_engine.errors import EngineDead, EngineUnresponsive, InvalidRequest
from trimtab_engine.ipc.network import is_ipv6_url, is_on_network
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.messages.admin import (
    AbandonPatch,
    AdminCall,
    AdminReply,
    Call,
    EngineState,
    LoadLora,
    PatchConfig,
    PreparePatch,
    Sleep,
    UnloadLora,
    WakeUp,
)
from trimtab_engine.messages.channel import FromCore, ToCore
from trimtab_engine.messages.lifecycle import (
    ClientAddresses,
    CoreBusy,
    CoreFailed,
    CoreLoaded,
    CoreReady,
    CoreRetiring,
    LoadProgress,
    RetireSeen,
    Shutdown,
    StartWave,
)
from trimtab_engine.messages.requests import (
    REFUSED,
    AbortRequests,
    AddRequest,
    ClientOutputs,
    ForgetMedia,
    PlainTokens,
    SequenceOutput,
    StepOutputs,
    StepStats,
)
from trimtab_engine.messages.state_stream import CoreReport, Dispatch, NoteDispatch, ReportState
from trimtab_engine.multimodal.sender_receiver_cache import Sender

MAX_MESSAGES_PER_READ = 64  # of a core, before the loop does something else
SILENCE_CHECK_SECONDS = 1.0  # interval of liveness checks while waiting for an admin call

logger = logging.getLogger("trimtab_engine.api")


@dataclass(slots=True)
class _Asked:
    """A request that a core works on: which one, and where its outputs go."""

    core: int
    outputs: OutputQueue = field(default_factory=OutputQueue)


class CoreClient:
    """A connection to each core.

    Args:
        addresses: One entry per possible core: data-parallel ranks from `first_rank` on; the first `num_initial` are
        started with the engine.
        on_ready: Called when all initial cores are ready.
        on_stage: Called with each stage that the first core's start reaches, also repeatedly.
        on_step: Called in order with the statistics of each step; only client 0 receives them.
        on_state: Called when the merged state of all cores changes.
        on_gone: Called with the rank of a core that has retired or could not join.
        on_report: Called with a core's rank, its report for the state stream and the report's time; only client 0.
        silence_timeout: Seconds without a message after which a core counts as hung; 0: never.
        secret: Shared secret for cores on other nodes.
        media_cache_bytes: Bytes of this client's images and videos that each core caches, as configured at its start.
    """

    def __init__(
        self,
        addresses: Sequence[ClientAddresses],
        *,
        client_index: int = 0,
        num_clients: int = 1,
        num_initial: int | None = None,
        first_rank: int = 0,
        silence_timeout: float = 0.0,
        secret: SharedSecret | None = None,
        media_cache_bytes: int = 0,
        on_ready: Callable[[CoreReady], None] | None = None,
        on_stage: Callable[[str], None] | None = None,
        on_step: Callable[[StepStats], None] | None = None,
        on_state: Callable[[EngineState], None] | None = None,
        on_gone: Callable[[int], None] = lambda rank: None,
        on_report: Callable[[int, CoreReport, float], None] | None = None,
    ) -> None:
        self._addresses, self._client_index, self.first_rank = addresses, client_index, first_rank
        self.core_registry = CoreRegistry(len(addresses), num_initial or len(addresses))
        self._liveness = LivenessTracker(silence_timeout)
        self._secret = secret
        self._media = [Sender(media_cache_bytes) for _ in addresses]
        self._media_cache_bytes = media_cache_bytes
        self._joining: dict[int, asyncio.Future[None]] = {}
        self._on_stage = on_stage
        self._on_ready, self._on_step, self._on_state, self._on_gone = on_ready, on_step, on_state, on_gone
        self._on_report, self._reports_state = on_report, False
        self._states: dict[int, EngineState] = {}
        self.state = EngineState()
        """The state of all cores together."""
        self._context = zmq.asyncio.Context()
        self._inboxes = [self._context.socket(zmq.PULL) for _ in addresses]
        self._outboxes = [self._context.socket(zmq.PUSH) for _ in addresses]
        self._balancer = CoreBalancer(len(addresses), num_clients)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[FromCore] = msgspec.msgpack.Decoder(FromCore)
        self._readers: list[asyncio.Task[None]] = []
        self._requests: dict[str, _Asked] = {}
        self._plain: list[list[OutputQueue]] = [[] for _ in addresses]
        """Queues of the requests with plain tokens, per core."""
        self._nobody = OutputQueue()
        """Placeholder queue for requests among them that were aborted."""
        self._calls: dict[str, asyncio.Future[AdminReply]] = {}
        self._closing = False
        self._stepped = asyncio.Event()
        self.last_steps = [0] * len(addresses)
        """The newest step received from each core."""
        self._progress = [LoadProgress("starting", 0.0) for _ in addresses]
        self._facts: CoreReady | None = None
        self.ready: CoreReady | None = None
        """The first core's CoreReady, once all are ready."""
        self.failure: CoreFailed | None = None
        self.loaded = asyncio.Event()
        """Set when all cores are ready, or one has failed."""
        self.ended = asyncio.Event()
        """Set when a core has failed or its process has ended: one lost, everything ends."""

    def open(self) -> None:
        """Bind the sockets and start reading."""
        for index, (inbox, outbox, address) in enumerate(
            zip(self._inboxes, self._outboxes, self._addresses, strict=True)
        ):
            for socket in (inbox, outbox):
                socket.setsockopt(zmq.LINGER, 0)
                socket.setsockopt(zmq.IPV6, is_ipv6_url(address.to_core))
                if self._secret is not None and is_on_network(address.to_core):
                    self._secret.set_curve_server(socket)
            outbox.setsockopt(zmq.SNDHWM, 0)
            inbox.setsockopt(zmq.RCVHWM, 0)
            outbox.bind(address.to_core)
            inbox.bind(address.from_core)
            self._readers.append(asyncio.create_task(self._read(index)))

    @property
    def ranks(self) -> list[int]:
        """The data-parallel ranks that take requests."""
        return [self.first_rank + core for core in self.core_registry.serving]

    @property
    def progress(self) -> LoadProgress:
        """Return the lowest load progress among cores that start with the engine."""
        needed = [self._progress[core] for core in self.core_registry.cores("loading", "serving")]
        return min(needed, key=lambda progress: progress.percent)

    def progress_of(self, core: int) -> LoadProgress:
        return self._progress[core]

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def silence(self) -> Silence | None:
        """Return a core that has been silent for too long. None if there is none."""
        return self._liveness.silence(time.monotonic())

    def silent_seconds(self) -> dict[int, float]:
        """Return the seconds since the last message of each serving core, by data-parallel rank."""
        return {self.first_rank + core: s for core, s in self._liveness.seconds(time.monotonic()).items()}

    @property
    def num_requests(self) -> int:
        """Sequences that the core works on for this server."""
        return len(self._requests)

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: AddRequest) -> AsyncGenerator[SequenceOutput | PlainRun, None]:
        """Yield one sequence's outputs; the last has a finish_reason. Closing the generator aborts the request. With
        several cores each is tried in turn for immediate execution; the last one must queue it.

        Raises:
            EngineDead: If a core ends.
        """
        request_id = request.request_id
        request.client_index = self._client_index
        asked = self._requests[request_id] = _Asked(self._first_choice(request))
        self._balancer.sent(asked.core)
        refused: frozenset[int] = frozenset()
        finished = False
        try:
            self._raise_if_dead()
            self._send_request(request, asked.core)
            while not finished:
                output = await asked.outputs.get()
                if output is None:
                    self._raise_if_dead()
                    raise EngineDead("the engine core has ended")
                if isinstance(output, PlainRun):
                    yield output
                    continue
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
        """Return the core that the request names, else the least loaded.

        Raises:
            InvalidRequest: If the named core does not exist.
        """
        rank, serving = request.data_parallel_rank, self.core_registry.serving
        if rank is None:
            request.may_queue = len(serving) == 1
            return self._balancer.choose(among=serving or None)
        if rank not in self.ranks:
            raise InvalidRequest(f"data-parallel rank {rank} is not there; ranks here are {self.ranks}")
        request.may_queue = True
        return rank - self.first_rank

    def _ask_another(self, request: AddRequest, asked: _Asked, refused: frozenset[int]) -> None:
        self._balancer.ended(asked.core)
        serving = self.core_registry.serving  # never empty: the last core does not retire
        asked.core = self._balancer.choose(refused, among=serving)
        self._balancer.sent(asked.core)
        request.may_queue = refused.issuperset(serving)
        self._send_request(request, asked.core)

    def _send_request(self, request: AddRequest, core: int) -> None:
        if request.spans:
            token_ids, spans = self._media[core].shortened(request.prompt_token_ids, request.spans)
            request = msgspec.structs.replace(request, prompt_token_ids=token_ids, spans=spans)
        self._send(request, core)

    def forget_media(self) -> None:
        """Have all cores forget this client's images and videos."""
        for core in self.core_registry.present:
            self._media[core].clear()
            self._send(ForgetMedia(self._client_index), core)

    def report_state(self, *, enabled: bool) -> None:
        """Have all cores report their state with every step, or stop. Cores that join later are included."""
        self._reports_state = enabled
        self._send_to(self.core_registry.serving, ReportState(enabled))

    def note_dispatch(self, dispatch: Dispatch) -> None:
        """Acknowledge a dispatch that ends without a request to a core."""
        if self.state.reports_state and self.is_alive and not self._closing:
            self._send_to(self.core_registry.serving[:1], NoteDispatch(dispatch))

    def abort(self, request_ids: list[str]) -> None:
        """Free these requests at the next step boundary. Never waits, so that it is safe while being cancelled."""
        if self.is_alive and not self._closing:
            self._send_to(self.core_registry.present, AbortRequests(request_ids))

    def abort_all(self) -> None:
        """End everything that runs: the waiting handlers see finish_reason abort."""
        request_ids = list(self._requests)
        self.abort(request_ids)
        for request_id in request_ids:
            self._requests[request_id].outputs.put(SequenceOutput(request_id, [], "abort"))

    async def call(self, call: Call) -> AdminReply:
        """Send one admin call, answered between two steps. With several cores a change is validated on all before it is
        applied to any.

        Raises:
            EngineDead: If a core ends first.
        """
        if len(self.core_registry.serving) > 1:
            match call:
                case PatchConfig(dry_run=False):
                    return await self._patch_all(call)
                case WakeUp() if self.state.sleep_level is not None:
                    return await self._wake_all(call, self.state.sleep_level)
                case LoadLora():
                    return await self._load_lora_on_all(call)
        return await self._call_all(call)

    async def _patch_all(self, call: PatchConfig) -> AdminReply:
        """Apply a PATCH to all cores or none: each validates it and maps memory, then all apply or abandon it."""
        cores = self.core_registry.serving
        prepare = PreparePatch(call.values, call.if_match)
        replies = await asyncio.gather(*(self.call_one(prepare, core) for core in cores))
        refused = [(core, reply) for core, reply in zip(cores, replies, strict=True) if reply.status != 200]
        if not refused:
            return await self._call_all(call)
        await self._call_all(AbandonPatch())
        core, reply = refused[0]
        if len(refused) < len(cores) and "message" in reply.body:
            reply.body["message"] = f"data-parallel rank {self.first_rank + core}: {reply.body['message']}"
        return reply

    async def _wake_all(self, call: WakeUp, level: int) -> AdminReply:
        """Wake up all cores or none; then all resume together."""
        memory = [tag for tag in call.tags if tag != "scheduling"]
        if memory:
            cores = self.core_registry.serving
            replies = await asyncio.gather(*(self.call_one(WakeUp(memory), core) for core in cores))
            refused = [(core, reply) for core, reply in zip(cores, replies, strict=True) if reply.status != 200]
            if refused:
                await self._call_all(Sleep(level, "keep"))
                core, reply = refused[0]
                message = f"data-parallel rank {self.first_rank + core}: {reply.body.get('message')}"
                return AdminReply(reply.call_id, reply.status, {**reply.body, "message": message})
            if "scheduling" not in call.tags:
                return merge_replies(call, replies)
        return await self._call_all(WakeUp(["scheduling"]))

    async def _load_lora_on_all(self, call: LoadLora) -> AdminReply:
        """Load the adapter on all cores or none: clients only see adapters that all cores have."""
        cores = self.core_registry.serving
        replies = await asyncio.gather(*(self.call_one(call, core) for core in cores))
        refused = [(core, reply) for core, reply in zip(cores, replies, strict=True) if reply.status != 200]
        if not refused:
            return merge_replies(call, replies)
        loaded = [core for core, reply in zip(cores, replies, strict=True) if reply.status == 200]
        await asyncio.gather(*(self.call_one(UnloadLora(call.name), core) for core in loaded))
        core, reply = refused[0]
        if loaded:
            reply.body["message"] = f"data-parallel rank {self.first_rank + core}: {reply.body['message']}"
        return reply

    async def _call_all(self, call: Call) -> AdminReply:
        self._raise_if_dead()
        cores = self.core_registry.serving
        return merge_replies(call, await asyncio.gather(*(self.call_one(call, core) for core in cores)))

    async def call_one(self, call: Call, core: int) -> AdminReply:
        """Send one admin call to one core."""
        self._raise_if_dead()
        call_id = uuid.uuid4().hex
        future: asyncio.Future[AdminReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = future
        try:
            self._send(AdminCall(call_id, call, self._client_index), core)
            return await self._answer(future)
        finally:
            self._calls.pop(call_id, None)

    async def _answer(self, future: "asyncio.Future[AdminReply]") -> AdminReply:
        """Wait for a reply.

        Raises:
            EngineSilent: If a core hangs.
        """
        while not future.done():
            await asyncio.wait({future}, timeout=SILENCE_CHECK_SECONDS)
            if not future.done() and (silence := self.silence) is not None:
                raise EngineUnresponsive(str(silence))
        return future.result()

    async def heard_of(self, steps: Sequence[int]) -> None:
        """Return when these steps, one number per core, have been received."""
        while any(map(operator.lt, self.last_steps, steps)):
            self._stepped.clear()
            await self._stepped.wait()

    # --- cores that join and retire (client 0) ----------------------------------------------------------------------

    def expect(self, core: int) -> "asyncio.Future[None]":
        """Register a core about to join. The future is done when the core has loaded, and fails with EngineDead if it
        ends before.
        """
        self.core_registry.mark_joining(core)
        self._media[core] = Sender(self._media_cache_bytes)  # a new process without any state
        self._progress[core] = LoadProgress("starting", 0.0)
        future = self._joining[core] = asyncio.get_running_loop().create_future()
        return future

    def core_ended(self, core: int, failure: CoreFailed | None) -> None:
        """Handle the end of a core's process; `failure` is None if it was requested. The others continue unless the
        core was required.
        """
        if failure is not None and self.core_registry.is_needed(core):
            self.fail(failure)
            return
        joining = self._joining.pop(core, None)
        if joining is not None and not joining.done():
            joining.set_exception(EngineDead("it was ended" if failure is None else failure.message))
        self.core_registry.mark_absent(core)
        self._liveness.stop(core)
        self._on_gone(self.first_rank + core)
        self._balancer.forget(core)

    # --- the end --------------------------------------------------------------------------------------------------

    def shut_down_core(self) -> None:
        """Ask every core to shut down."""
        self._closing = True
        self._send_to(self.core_registry.present, Shutdown())

    async def close(self) -> None:
        """Remove the sockets."""
        self._closing = True
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
        self._context.destroy(linger=0)

    # --- the inside -----------------------------------------------------------------------------------------------

    def _send_to(self, cores: Iterable[int], message: ToCore) -> None:
        for core in cores:
            self._send(message, core)

    def _send(self, message: ToCore, core: int) -> None:
        """Queue a message on the socket, in order, without waiting. If the core has just died, waiting callers learn it
        from its end, not from this socket.
        """
        self._outboxes[core].send(self._encoder.encode(message))

    def _raise_if_dead(self) -> None:
        if not self.is_alive:
            raise EngineDead(self.failure.message if self.failure else "the engine core has ended")

    async def _read(self, core: int) -> None:
        inbox = self._inboxes[core]
        ready: zmq.Socket[bytes] = zmq.Socket.shadow(inbox)
        try:
            while True:
                self._take(await inbox.recv(), core)
                with contextlib.suppress(zmq.Again):  # read further messages without one future each
                    for _ in range(MAX_MESSAGES_PER_READ):
                        self._take(ready.recv(zmq.NOBLOCK), core)
                    await asyncio.sleep(0)
        except Exception as error:  # an internal error; otherwise every request would hang
            logger.exception("failed to read a message from the engine core")
            self.fail(CoreFailed(f"failed to read a message from the engine core: {type(error).__name__}: {error}", 1))

    def _take(self, body: bytes, core: int) -> None:
        try:
            message = self._decoder.decode(body)
        except msgspec.DecodeError as error:
            if not is_on_network(self._addresses[core].from_core):
                raise
            logger.warning("something that is no engine core spoke on its address: %s", error)
            return
        self._handle(message, core)

    def _handle(self, message: FromCore, core: int) -> None:
        self._liveness.record_message(core, time.monotonic())
        match message:
            case StepOutputs():
                self._note_step(message.stats.step, core)
                self._deliver(message.request_outputs, core, message.stats.time)
                self._deliver_plain(message.plain, core, message.stats.time)
                self._note_load(message.stats, core)
                if self._on_step is not None and self.core_registry.is_needed(core):
                    self._on_step(message.stats)
                if self._on_report is not None and message.state is not None:
                    self._on_report(self.first_rank + core, message.state, message.stats.time)
            case ClientOutputs():
                self._note_step(message.step, core)
                self._deliver(message.outputs, core, message.time)
                self._deliver_plain(message.plain, core, message.time)
            case EngineState() if self.core_registry[core] in ("loading", "serving"):
                self._note_state(message, core)
            case AdminReply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case LoadProgress():
                self._progress[core] = message
                if core == 0 and self._on_stage is not None:
                    self._on_stage(message.stage)
                self.core_registry.mark_loading(core)
            case CoreLoaded():
                joining = self._joining.pop(core, None)
                if joining is not None and not joining.done():
                    joining.set_result(None)
            case CoreBusy(seconds):
                self._liveness.allow_silence_until(core, time.monotonic() + seconds)
            case CoreReady():
                self._liveness.start(core, time.monotonic())
                self._progress[core] = LoadProgress("ready", 100.0)
                self.core_registry.mark_serving(core)
                if self._reports_state:
                    self._send(ReportState(True), core)
                self._facts = message if core == 0 else self._facts
                if self.ready is None and self.core_registry.has_loaded:
                    self._all_ready()
            case CoreRetiring():
                self.core_registry.mark_retiring(core)
                self._states.pop(core, None)
                self._send(RetireSeen(self._client_index), core)
            case StartWave():
                self._send_to((other for other in self.core_registry.present if other != core), message)
            case CoreFailed(text, exit_code):
                # 2: a configuration error affects all cores
                is_one_of_many = len(self._addresses) > 1 and exit_code != 2
                self.core_ended(
                    core, CoreFailed(f"engine core {core}: {text}", exit_code) if is_one_of_many else message
                )

    def _all_ready(self) -> None:
        self.ready = self._facts
        assert self.ready is not None
        if self._on_ready is not None:
            self._on_ready(self.ready)
        self.loaded.set()

    def _note_state(self, state: EngineState, core: int) -> None:
        self._states[core] = state
        self._liveness.note_longest_step(core, state.longest_step_seconds)
        self.state = merge_states(list(self._states.values()))
        if self._on_state is not None:
            self._on_state(self.state)

    def _note_load(self, stats: StepStats, core: int) -> None:
        stats.engine_index = self.first_rank + core
        usage = stats.kv_blocks_used / max(stats.kv_blocks_total, 1)
        self._balancer.report(core, num_running=stats.num_running, num_waiting=stats.num_waiting, kv_usage=usage)

    def _note_step(self, step: int, core: int) -> None:
        self.last_steps[core] = max(self.last_steps[core], step)
        self._stepped.set()

    def _deliver(self, outputs: list[SequenceOutput], core: int, time: float) -> None:
        for output in outputs:
            output.engine_index, output.time = self.first_rank + core, time
            asked = self._requests.get(output.request_id)
            if asked is not None:  # none: aborted meanwhile
                asked.outputs.put(output)

    def _deliver_plain(self, plain: PlainTokens | None, core: int, time: float) -> None:
        if plain is None:
            return
        if plain.request_ids is not None:
            asked = [self._requests.get(request_id) for request_id in plain.request_ids]
            self._plain[core] = [self._nobody if own is None else own.outputs for own in asked]
        rank = self.first_rank + core
        for queue, token_id in zip(self._plain[core], plain.token_ids, strict=True):
            queue.put_plain(token_id, time, rank)
        self._nobody.clear()

    def fail(self, failure: CoreFailed) -> None:
        """Mark the engine as failed: all waiting callers get EngineDead. The first failure is kept as the cause."""
        if self.failure is not None:
            return
        self.failure = failure
        self.ended.set()
        self.loaded.set()
        for asked in self._requests.values():
            asked.outputs.put(None)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDead(failure.message))

"""An API server's side of the engine: two sockets to each core, and who waits for which answer.

There is one core, or one per data-parallel rank: then each request goes to one of them, each admin call to all. Cores
may join and retire while others serve (scaling.py). The sockets are bound where the launcher says, and one task
reads each core. It never imports torch. The cores' processes are launcher.py's.
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
from trimtab_engine.engine_client.mailbox import Mailbox, PlainRun
from trimtab_engine.engine_client.replies import merge_replies, merge_states
from trimtab_engine.engine_client.roster import CoreRoster
from trimtab_engine.engine_client.vital_signs import Silence, VitalSigns
from trimtab_engine.errors import EngineDead, EngineSilent, InvalidRequest
from trimtab_engine.ipc.network import is_ipv6_url, is_on_network
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.messages import (
    REFUSED,
    AbandonPatch,
    AbortRequests,
    AddRequest,
    AdminCall,
    AdminReply,
    Call,
    ClientAddresses,
    ClientOutputs,
    CoreBusy,
    CoreFailed,
    CoreLoaded,
    CoreReady,
    CoreRetiring,
    EngineState,
    ForgetMedia,
    FromCore,
    LoadLora,
    LoadProgress,
    PatchConfig,
    PlainTokens,
    PreparePatch,
    RetireSeen,
    SequenceOutput,
    Shutdown,
    Sleep,
    StartWave,
    StepOutputs,
    StepStats,
    ToCore,
    UnloadLora,
    WakeUp,
)
from trimtab_engine.multimodal.mirror import Sender

MESSAGES_AT_ONCE = 64  # of a core, before the loop does something else
SILENCE_LOOK_SECONDS = 1.0  # how often who waits for an admin call looks whether its core still lives

logger = logging.getLogger("trimtab_engine.api")


@dataclass(slots=True)
class _Asked:
    """A request that a core works on: which one, and where its outputs go."""

    core: int
    outputs: Mailbox = field(default_factory=Mailbox)


class CoreClient:
    """One line to each core.

    `addresses`: one entry per core that there can be, data-parallel ranks from `first_rank` on; the first `num_initial`
    are started with the engine. `on_ready` is called when all of these are ready, then
    `on_step` with the statistics of each step, in order; only client 0 gets those. `on_state` is called whenever the
    state of all cores together is another, `on_gone` with the rank of a core that has retired, or could not join.
    `silence_timeout`: seconds after which a core that says nothing counts as hung; 0: never. `secret`: what cores on
    other nodes have to know. `media_cache_bytes`: how much each core keeps of this client's images and videos, as it
    was told when it was started.
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
        on_step: Callable[[StepStats], None] | None = None,
        on_state: Callable[[EngineState], None] | None = None,
        on_gone: Callable[[int], None] = lambda rank: None,
    ) -> None:
        self._addresses, self._client_index, self.first_rank = addresses, client_index, first_rank
        self.roster = CoreRoster(len(addresses), num_initial or len(addresses))
        self._vital_signs = VitalSigns(silence_timeout)
        self._secret = secret
        self._media = [Sender(media_cache_bytes) for _ in addresses]
        self._media_cache_bytes = media_cache_bytes
        self._joining: dict[int, asyncio.Future[None]] = {}
        self._on_ready, self._on_step, self._on_state, self._on_gone = on_ready, on_step, on_state, on_gone
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
        self._plain: list[list[Mailbox]] = [[] for _ in addresses]
        """Whom the plain tokens of each core are for."""
        self._nobody = Mailbox()
        """Stands for those of them that were aborted meanwhile."""
        self._calls: dict[str, asyncio.Future[AdminReply]] = {}
        self._closing = False
        self._stepped = asyncio.Event()
        self.last_steps = [0] * len(addresses)
        """The newest step of each core that anything has been heard of."""
        self._progress = [LoadProgress("starting", 0.0) for _ in addresses]
        self._facts: CoreReady | None = None
        self.ready: CoreReady | None = None
        """What the first core said when it was ready, once all are."""
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
                socket.setsockopt(zmq.IPV6, is_ipv6_url(address.to_core))
                if self._secret is not None and is_on_network(address.to_core):
                    self._secret.guard_listener(socket)
            outbox.setsockopt(zmq.SNDHWM, 0)
            inbox.setsockopt(zmq.RCVHWM, 0)
            outbox.bind(address.to_core)
            inbox.bind(address.from_core)
            self._readers.append(asyncio.create_task(self._read(index)))

    @property
    def ranks(self) -> list[int]:
        """The data-parallel ranks that take requests."""
        return [self.first_rank + core for core in self.roster.serving]

    @property
    def progress(self) -> LoadProgress:
        """How far the core has come that is furthest behind, among those that start with the engine."""
        needed = [self._progress[core] for core in self.roster.cores("loading", "serving")]
        return min(needed, key=lambda progress: progress.percent)

    def progress_of(self, core: int) -> LoadProgress:
        return self._progress[core]

    @property
    def is_alive(self) -> bool:
        return not self.ended.is_set()

    @property
    def silence(self) -> Silence | None:
        """The words on a core that has said nothing for too long."""
        return self._vital_signs.silence(time.monotonic())

    def silent_seconds(self) -> dict[int, float]:
        """Seconds since anything was heard of each core that serves, by data-parallel rank."""
        return {self.first_rank + core: s for core, s in self._vital_signs.seconds(time.monotonic()).items()}

    @property
    def num_requests(self) -> int:
        """Sequences that the core works on for this server."""
        return len(self._requests)

    # --- requests -------------------------------------------------------------------------------------------------

    async def generate(self, request: AddRequest) -> AsyncGenerator[SequenceOutput | PlainRun, None]:
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
        """The core that the request names, else the least loaded. Raises InvalidRequest for one that is not there."""
        rank, serving = request.data_parallel_rank, self.roster.serving
        if rank is None:
            request.may_queue = len(serving) == 1
            return self._balancer.choose(among=serving or None)
        if rank not in self.ranks:
            raise InvalidRequest(f"data-parallel rank {rank} is not there; ranks here are {self.ranks}")
        request.may_queue = True
        return rank - self.first_rank

    def _ask_another(self, request: AddRequest, asked: _Asked, refused: frozenset[int]) -> None:
        self._balancer.ended(asked.core)
        serving = self.roster.serving  # never empty: the last core does not retire
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
        for core in self.roster.present:
            self._media[core].clear()
            self._send(ForgetMedia(self._client_index), core)

    def abort(self, request_ids: list[str]) -> None:
        """Free these requests at the next step boundary. Never waits, so that it is safe while being cancelled."""
        if self.is_alive and not self._closing:
            self._send_to(self.roster.present, AbortRequests(request_ids))

    def abort_all(self) -> None:
        """End everything that runs: the waiting handlers see finish_reason abort."""
        request_ids = list(self._requests)
        self.abort(request_ids)
        for request_id in request_ids:
            self._requests[request_id].outputs.put(SequenceOutput(request_id, [], "abort"))

    async def call(self, call: Call) -> AdminReply:
        """One admin call, answered between two steps. EngineDead if a core ends first. With several cores a change is
        tried on all before it is made on any."""
        if len(self.roster.serving) > 1:
            match call:
                case PatchConfig(dry_run=False):
                    return await self._patch_all(call)
                case WakeUp() if self.state.sleep_level is not None:
                    return await self._wake_all(call, self.state.sleep_level)
                case LoadLora():
                    return await self._load_lora_on_all(call)
        return await self._call_all(call)

    async def _patch_all(self, call: PatchConfig) -> AdminReply:
        """On all cores or on none: each judges the change and maps what it needs, then all make it, or give that up."""
        cores = self.roster.serving
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
        """All cores get back what they gave up, or none does; then all work again at once."""
        memory = [tag for tag in call.tags if tag != "scheduling"]
        if memory:
            cores = self.roster.serving
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
        """All cores have the adapter, or none has: clients are shown only what all have."""
        cores = self.roster.serving
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
        cores = self.roster.serving
        return merge_replies(call, await asyncio.gather(*(self.call_one(call, core) for core in cores)))

    async def call_one(self, call: Call, core: int) -> AdminReply:
        """One admin call to one core."""
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
        """EngineSilent when a core hangs: nobody would answer."""
        while not future.done():
            await asyncio.wait({future}, timeout=SILENCE_LOOK_SECONDS)
            if not future.done() and (silence := self.silence) is not None:
                raise EngineSilent(str(silence))
        return future.result()

    async def heard_of(self, steps: Sequence[int]) -> None:
        """Return when these steps, one number per core, have been heard of."""
        while any(map(operator.lt, self.last_steps, steps)):
            self._stepped.clear()
            await self._stepped.wait()

    # --- cores that join and retire (client 0) ----------------------------------------------------------------------

    def expect(self, core: int) -> "asyncio.Future[None]":
        """A core that is about to be started beside those that serve: done when it has loaded, EngineDead when it ends
        before."""
        self.roster.joins(core)
        self._media[core] = Sender(self._media_cache_bytes)  # another process, which has nothing yet
        self._progress[core] = LoadProgress("starting", 0.0)
        future = self._joining[core] = asyncio.get_running_loop().create_future()
        return future

    def core_ended(self, core: int, failure: CoreFailed | None) -> None:
        """A core's process has ended; None: as it was told. Unless it was needed, the others go on."""
        if failure is not None and self.roster.is_needed(core):
            self.fail(failure)
            return
        joining = self._joining.pop(core, None)
        if joining is not None and not joining.done():
            joining.set_exception(EngineDead("it was ended" if failure is None else failure.message))
        self.roster.leaves(core)
        self._vital_signs.ends(core)
        self._on_gone(self.first_rank + core)
        self._balancer.forget(core)

    # --- the end --------------------------------------------------------------------------------------------------

    def shut_down_core(self) -> None:
        """Ask every core to leave its loop."""
        self._closing = True
        self._send_to(self.roster.present, Shutdown())

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
        """Hand a message to the socket, in order. It is not waited for: when the core has just died there is nobody to
        take it, and what tells the waiting is its end, not this socket.
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
                with contextlib.suppress(zmq.Again):  # what else has come costs no future each
                    for _ in range(MESSAGES_AT_ONCE):
                        self._take(ready.recv(zmq.NOBLOCK), core)
                    await asyncio.sleep(0)
        except Exception as error:  # a defect of ours; without this every request would wait for ever
            logger.exception("cannot read what the engine core sends")
            self.fail(CoreFailed(f"cannot read what the engine core sends: {type(error).__name__}: {error}", 1))

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
        self._vital_signs.heard(core, time.monotonic())
        match message:
            case StepOutputs():
                self._note_step(message.stats.step, core)
                self._deliver(message.told, core, message.stats.time)
                self._deliver_plain(message.plain, core, message.stats.time)
                self._note_load(message.stats, core)
                if self._on_step is not None and self.roster.is_needed(core):
                    self._on_step(message.stats)
            case ClientOutputs():
                self._note_step(message.step, core)
                self._deliver(message.outputs, core, message.time)
                self._deliver_plain(message.plain, core, message.time)
            case EngineState() if self.roster[core] in ("loading", "serving"):
                self._note_state(message, core)
            case AdminReply():
                future = self._calls.get(message.call_id)
                if future is not None and not future.done():
                    future.set_result(message)
            case LoadProgress():
                self._progress[core] = message
                self.roster.loads(core)
            case CoreLoaded():
                joining = self._joining.pop(core, None)
                if joining is not None and not joining.done():
                    joining.set_result(None)
            case CoreBusy(seconds):
                self._vital_signs.excuse_until(core, time.monotonic() + seconds)
            case CoreReady():
                self._vital_signs.begins(core, time.monotonic())
                self._progress[core] = LoadProgress("ready", 100.0)
                self.roster.serves(core)
                self._facts = message if core == 0 else self._facts
                if self.ready is None and self.roster.has_loaded:
                    self._all_ready()
            case CoreRetiring():
                self.roster.retires(core)
                self._states.pop(core, None)
                self._send(RetireSeen(self._client_index), core)
            case StartWave():
                self._send_to((other for other in self.roster.present if other != core), message)
            case CoreFailed(text, exit_code):
                is_one_of_many = len(self._addresses) > 1 and exit_code != 2  # 2: what is wrong is so for all cores
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
        self._vital_signs.note_longest_step(core, state.longest_step_seconds)
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
        for mailbox, token_id in zip(self._plain[core], plain.token_ids, strict=True):
            mailbox.put_plain(token_id, time, rank)
        self._nobody.clear()

    def fail(self, failure: CoreFailed) -> None:
        """The engine serves no more: whoever waits gets EngineDead. The first failure is the cause and stays."""
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

"""The engine core's process, `-m trimtab_engine.core.process`: one loop between the sockets of its API servers.

It reads its configuration from stdin (JSON) and reports loading progress. Then it serves: drain the inbox (waiting only
when idle), run one step, send the outputs. It ends on request, when the API server dies, or with a CoreFailed message
on a fatal error.
"""

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import msgspec

from trimtab_engine.config.engine import EngineConfig, set_log_level
from trimtab_engine.core.clients import Clients, send_final_message
from trimtab_engine.core.engine import Engine
from trimtab_engine.core.startup import Progress, start_engine
from trimtab_engine.device.profiler import Profiler
from trimtab_engine.errors import ConfigError, TrimtabError
from trimtab_engine.ipc.gc_freeze import freeze_startup_objects
from trimtab_engine.ipc.parent_death import exit_with_parent
from trimtab_engine.ipc.process_exit import exit_process
from trimtab_engine.ipc.shared_secret import SharedSecret
from trimtab_engine.messages.admin import (
    AbandonPatch,
    AdminCall,
    AdminReply,
    AdoptConfig,
    Call,
    DrainCore,
    EngineState,
    GetConfig,
    GetLayout,
    GetLifecycle,
    GetMemory,
    GetRequests,
    LoadLora,
    PatchConfig,
    Pause,
    PlanMemory,
    PreparePatch,
    ResetPrefixCache,
    Resume,
    Retire,
    Sleep,
    StartProfile,
    StopProfile,
    UnloadLora,
    WakeUp,
)
from trimtab_engine.messages.channel import ToCore
from trimtab_engine.messages.lifecycle import (
    CoreBusy,
    CoreFailed,
    CoreLoaded,
    CoreReady,
    CoreRetiring,
    CoreStart,
    LoadProgress,
    RetireSeen,
    Shutdown,
    StartWave,
)
from trimtab_engine.messages.requests import AbortRequests, AddRequest
from trimtab_engine.messages.state_stream import NoteDispatch, ReportState

IDLE_REPORT_MILLISECONDS = 1000  # an idle engine reports its state this often, so that gauges stay true
HEARTBEAT_SECONDS = 1.0  # maximum interval between messages from a serving core
WEIGHTS_SECONDS, TRACE_SECONDS = 1800.0, 600.0  # for which moving weights, or writing a trace, may keep the loop
BUILDING_MILLISECONDS = 10  # how soon an idle engine looks again at a grammar that is being built

logger = logging.getLogger("trimtab_engine.core")


def serve(
    engine: Engine, clients: Clients, profiler: Profiler, clock: Callable[[], float], membership: "Membership"
) -> None:
    """Serve until Shutdown, or until a core that retires has finished. `clock` is the API servers'."""
    inbox = Inbox(engine, clients, membership, clock)
    reporter = StateReporter(engine, clients, clock, inbox)
    engine.follow_waves(lambda number: clients.send(StartWave(number)))
    while True:
        reporter.report()
        idle = BUILDING_MILLISECONDS if engine.is_building else IDLE_REPORT_MILLISECONDS
        for message in inbox.take(0 if engine.has_work else idle):
            match message:
                case AddRequest() | AbortRequests():
                    inbox.hand_over(message)
                case AdminCall(call_id, AdoptConfig() | Retire() as call, index):
                    clients.send(membership.call(engine, call, call_id), index)
                    reporter.forget()
                case RetireSeen(index):
                    membership.seen_by(index)
                case AdminCall(call_id, call, index):
                    if (seconds := busy_seconds(call)) is not None:
                        clients.broadcast(CoreBusy(seconds))
                    reply = answer(engine, profiler, call, call_id)
                    # First, so that the change is visible in the metrics when the reply arrives.
                    reporter.report()
                    clients.send_step(engine.report())
                    clients.send(reply, index)
                case StartWave():
                    engine.join_wave(message.number)
                case ReportState(enabled):
                    engine.report_state(enabled=enabled)
                case NoteDispatch(dispatch):
                    engine.note_dispatch(dispatch)
                case Shutdown():
                    engine.finish_wave()
                    return
        clients.send_step(engine.step(inbox.hand_over_requests))
        profiler.on_step()
        if membership.may_leave(engine):
            return


class Inbox:
    """Client messages in order of arrival."""

    def __init__(self, engine: Engine, clients: Clients, membership: "Membership", clock: Callable[[], float]) -> None:
        self._engine, self._clients, self._membership, self._clock = engine, clients, membership, clock
        self._held: list[ToCore] = []
        self.read_at = 0.0
        """Time of the last read: earlier messages have been handed over, or will be before the next report."""

    def take(self, timeout_milliseconds: int) -> list[ToCore]:
        """Take all pending messages; wait for the first one up to the timeout."""
        held, self._held = self._held, []
        messages = held + self._clients.receive(0 if held else timeout_milliseconds)
        self.read_at = self._clock()
        return messages

    def hand_over(self, message: AddRequest | AbortRequests) -> None:
        """Add or abort requests."""
        match message:
            case AbortRequests():
                self._engine.abort(message.request_ids)
            case AddRequest() if self._membership.is_retiring or not self._may_come(message):
                self._clients.refuse(message)
            case AddRequest():
                self._engine.add(message)

    def hand_over_requests(self) -> None:
        """Hand over request messages within a step, up to the first message of another kind, which waits for the end of
        the step with all later messages.
        """
        before, messages = self.read_at, self.take(0)
        for place, message in enumerate(messages):
            if not isinstance(message, AddRequest | AbortRequests):
                self._held, self.read_at = messages[place:], before
                return
            self.hand_over(message)

    def _may_come(self, message: AddRequest) -> bool:
        return message.may_queue or self._engine.has_room_for(message)


class Membership:
    """Joining and retirement of this core among others, without losing a request.

    A client that has acknowledged the retirement sends no further request; earlier ones are rejected, so that the
    client tries another core. When all clients have acknowledged and nothing runs, the core may leave.
    """

    def __init__(self, clients: Clients, num_clients: int, ready: CoreReady) -> None:
        self._clients, self._num_clients, self._ready = clients, num_clients, ready
        self._unseen: set[int] | None = None

    @property
    def is_retiring(self) -> bool:
        return self._unseen is not None

    def call(self, engine: Engine, call: AdoptConfig | Retire, call_id: str) -> AdminReply:
        """Take over the configuration in force and then serve, or take nothing new."""
        if isinstance(call, AdoptConfig):
            status, body = engine.adopt_config(call.values, call.generation)
            if status == 200:
                self._clients.broadcast(self._ready)
            return AdminReply(call_id, status, body)
        self._unseen = set(range(self._num_clients))
        self._clients.broadcast(CoreRetiring())
        return AdminReply(call_id, 200, {})

    def seen_by(self, client_index: int) -> None:
        if self._unseen is not None:
            self._unseen.discard(client_index)

    def may_leave(self, engine: Engine) -> bool:
        return self._unseen == set() and engine.is_empty


class StateReporter:
    """Sends the engine state to all API servers when it changes, and at least every HEARTBEAT_SECONDS."""

    def __init__(self, engine: Engine, clients: Clients, clock: Callable[[], float], inbox: Inbox) -> None:
        self._engine, self._clients, self._clock, self._inbox = engine, clients, clock, inbox
        self._told: EngineState | None = None
        self._told_at = 0.0

    def forget(self) -> None:
        """Send the full state next time: new listeners know nothing."""
        self._told = None

    def report(self) -> None:
        state, now = self._engine.state(), self._clock()
        if state != self._told or now - self._told_at >= HEARTBEAT_SECONDS:
            self._told, self._told_at = state, now
            self._clients.broadcast(msgspec.structs.replace(state, time=self._inbox.read_at))


def busy_seconds(call: Call) -> float | None:
    """Return for how long the call may block the loop. None if shorter than a step."""
    match call:
        case Sleep() | WakeUp() | LoadLora():
            return WEIGHTS_SECONDS
        case StopProfile():
            return TRACE_SECONDS
        case _:
            return None


def changed_state(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """Return the fields that have another value now, as "max_num_seqs 32 → 9"."""
    changed = [f"{name} {before.get(name)} → {value}" for name, value in after.items() if before.get(name) != value]
    return ", ".join(changed) or "the same values"


def answer(engine: Engine, profiler: Profiler, call: Call, call_id: str) -> AdminReply:
    """Carry out one admin call between two steps."""
    body: dict[str, Any]
    status = 200
    match call:
        case GetConfig():
            body = engine.config()
        case PatchConfig():
            before = engine.config()
            status, body = engine.patch_config(call)
            if status == 200 and body["generation"] != before["generation"]:
                changes = changed_state(before["desired"], body["desired"])
                logger.info("configuration generation %s: %s", body["generation"], changes)
        case PreparePatch():
            status, body = engine.prepare_patch(call)
        case AbandonPatch():
            engine.abandon_patch()
            body = {}
        case GetMemory():
            body = engine.memory()
        case PlanMemory(values):
            status, body = engine.memory_plan(values)
        case GetLayout():
            body = engine.layout()
        case GetRequests():
            body = engine.unfinished()
        case DrainCore(deadline_seconds):
            body = engine.drain(deadline_seconds)
        case Pause() | Resume() | Sleep() | WakeUp() | GetLifecycle():
            status, body = engine.lifecycle(call)
        case ResetPrefixCache(reset_running_requests):
            status, body = engine.reset_prefix_cache(reset_running_requests=reset_running_requests)
        case LoadLora():
            status, body = engine.load_adapter(call)
        case UnloadLora():
            status, body = engine.unload_adapter(call)
        case StartProfile():
            status, body = profiler.answer(profiler.start)
        case StopProfile():
            status, body = profiler.answer(profiler.stop)
        case AdoptConfig() | Retire():
            raise AssertionError("these concern the core's membership")
    return AdminReply(call_id, status, body)


def main() -> int:
    """Read the start message from stdin, load, serve. Returns the exit code."""
    exit_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API server decides
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    start = msgspec.json.decode(sys.stdin.readline(), type=CoreStart)
    clients = Clients(start.clients, _secret(start), media_cache_bytes=start.media_cache_bytes)
    try:
        config = msgspec.convert(start.config, EngineConfig)
        set_log_level(config.log_level)
        progress: Progress = lambda stage, percent: clients.broadcast(LoadProgress(stage, percent))  # noqa: E731
        clock: Callable[[], float] = lambda: time.monotonic() + start.clock_offset  # noqa: E731
        engine, ready = start_engine(config, progress, clock, partial(_end_with_rank, start))
        freeze_startup_objects()
        if start.joins:
            clients.send(CoreLoaded())
        else:
            clients.broadcast(ready)
        membership = Membership(clients, len(start.clients), ready)
        serve(engine, clients, Profiler(config.profiler_dir), clock, membership)
        engine.close()
    except ConfigError as error:
        clients.broadcast(CoreFailed(str(error), exit_code=2))
        return 2
    except (TrimtabError, MemoryError) as error:
        clients.broadcast(CoreFailed(f"the engine core failed: {error}", exit_code=1))
        return 1
    except Exception as error:
        logger.exception("the engine core failed")
        clients.broadcast(CoreFailed(f"the engine core failed: {type(error).__name__}: {error}", exit_code=1))
        return 1
    finally:
        clients.close()
    return 0


def _end_with_rank(start: CoreStart, cause: str, exit_code: int) -> None:
    """End this process because one of its ranks ended: the main thread may wait for that rank forever."""
    send_final_message(start.clients, CoreFailed(cause, exit_code), _secret(start))
    os._exit(exit_code)


def _secret(start: CoreStart) -> SharedSecret | None:
    """Return the secret shared with the API servers' node. None if both are the same node."""
    return SharedSecret.read(start.config.get("rendezvous_secret_file"))


if __name__ == "__main__":
    exit_process(main())

"""The engine core's process, `-m trimtab_engine.core_process`: one loop between two sockets to the API server.

It reads its configuration from stdin (JSON), says how far loading is, then serves: drain the inbox (waiting only when
idle), run one step, send what it brought. It ends when it is told to, when the API server dies, or with one CoreFailed
line when it cannot go on.
"""

import ctypes
import json
import logging
import signal
import sys
import time
from typing import Any

import msgspec
import zmq

from trimtab_engine.config import EngineConfig
from trimtab_engine.engine import Engine
from trimtab_engine.errors import ConfigError, TrimtabError
from trimtab_engine.messages import (
    AbortRequests,
    AddRequest,
    AdminCall,
    AdminReply,
    CoreFailed,
    FromCore,
    LoadProgress,
    Shutdown,
    ToCore,
)
from trimtab_engine.startup import Progress, start_engine

IDLE_REPORT_MILLISECONDS = 1000  # an idle engine reports its state this often, so that gauges stay true
LINGER_MILLISECONDS = 2000  # for the last message to leave before the process ends
PR_SET_PDEATHSIG = 1  # linux/prctl.h

logger = logging.getLogger("trimtab_engine.core")


class Link:
    """The two one-way sockets to the API server. The API server binds, the core connects."""

    def __init__(self, to_core: str, from_core: str) -> None:
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.PULL)
        self._inbox.connect(to_core)
        self._outbox = self._context.socket(zmq.PUSH)
        self._outbox.setsockopt(zmq.LINGER, LINGER_MILLISECONDS)
        self._outbox.setsockopt(zmq.SNDHWM, 0)  # outputs are never dropped: the API server reads all of them
        self._outbox.connect(from_core)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[ToCore] = msgspec.msgpack.Decoder(ToCore)

    def send(self, message: FromCore) -> None:
        self._outbox.send(self._encoder.encode(message))

    def receive(self, timeout_milliseconds: int) -> list[ToCore]:
        """All messages that are there; waits for the first one up to the timeout."""
        messages: list[ToCore] = []
        while self._inbox.poll(0 if messages else timeout_milliseconds):
            messages.append(self._decoder.decode(self._inbox.recv()))
        return messages

    def close(self) -> None:
        self._inbox.close(linger=0)
        self._outbox.close()
        self._context.term()


def serve(engine: Engine, link: Link) -> None:
    """Serve until Shutdown."""
    while True:
        for message in link.receive(0 if engine.has_work else IDLE_REPORT_MILLISECONDS):
            match message:
                case AddRequest():
                    engine.add(message)
                case AbortRequests():
                    engine.abort(message.request_ids)
                case AdminCall():
                    link.send(answer(engine, message))
                case Shutdown():
                    return
        link.send(engine.step())


def answer(engine: Engine, call: AdminCall) -> AdminReply:
    """Carry out one admin call, between two steps."""
    body: dict[str, Any]
    status = 200
    match call.method:
        case "config_get":
            body = engine.config()
        case "config_patch":
            status, body = engine.patch_config(call.body)
            if status == 200 and not call.body.get("dry_run"):
                logger.info("configuration is now at generation %s: %s", body["generation"], body["desired"])
        case "memory":
            body = engine.ledger().to_json()
        case "layout":
            body = engine.layout()
        case "drain":
            body = engine.drain(float(call.body["deadline_seconds"]))
        case _:
            status, body = 404, {"message": f"there is no admin call {call.method!r}"}
    return AdminReply(call.call_id, status, body)


def main() -> int:
    """Read the start message from stdin, load, serve. Returns the exit code."""
    _end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the API server tells us what to do
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(asctime)s %(name)s: %(message)s", stream=sys.stderr)
    start = json.loads(sys.stdin.readline())
    link = Link(start["to_core"], start["from_core"])
    try:
        config = msgspec.convert(start["config"], EngineConfig)
        progress: Progress = lambda stage, percent: link.send(LoadProgress(stage, percent))  # noqa: E731
        engine, ready = start_engine(config, progress, time.monotonic)
        link.send(ready)
        serve(engine, link)
    except ConfigError as error:
        link.send(CoreFailed(str(error), exit_code=2))
        return 2
    except (TrimtabError, MemoryError) as error:
        link.send(CoreFailed(f"the engine core failed: {error}", exit_code=1))
        return 1
    except Exception as error:
        logger.exception("the engine core failed")
        link.send(CoreFailed(f"the engine core failed: {type(error).__name__}: {error}", exit_code=1))
        return 1
    finally:
        link.close()
    return 0


def _end_with_parent() -> None:
    """Ask the kernel to end this process with the API server's, however that dies."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())

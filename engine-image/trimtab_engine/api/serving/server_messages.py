"""Messages between the first process and its API servers, on a stream socket inherited by each."""

import msgspec

from trimtab_engine.api.metrics.observations import Observations
from trimtab_engine.api.openai.state import ServerOptions
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.messages.lifecycle import ClientAddresses, CoreFailed

# --- first process -> server --------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start"):
    """First message. `listen_fd` is the inherited listening socket, `client_index` the server's index at the core."""

    client_index: int
    addresses: list[ClientAddresses]
    """Socket address of each engine core."""
    num_clients: int
    listen_fd: int
    config: EngineConfig
    options: ServerOptions


class Serve(msgspec.Struct, tag="serve"):
    """All servers have loaded: accept requests."""


class BecomeNotReady(msgspec.Struct, tag="leave"):
    """Become not ready, but serve requests that still arrive."""


class Drain(msgspec.Struct, tag="drain"):
    """Reject new requests; running ones continue."""


class DropMediaCache(msgspec.Struct, tag="forget_all_media"):
    """Drop all cached images and videos, here and in the cores."""


class AbortAll(msgspec.Struct, tag="abort_all"):
    """Abort all running requests."""


class Failed(msgspec.Struct, tag="engine_failed"):
    """The engine has failed: pending requests get an error, new ones 503."""

    failure: CoreFailed


class End(msgspec.Struct, tag="end"):
    """Close within `seconds` and exit."""

    seconds: int


class Flush(msgspec.Struct, tag="flush"):
    """Metrics are being scraped: send all observations, then Flushed with the same ID."""

    flush_id: int


class QueryResult(msgspec.Struct, tag="answer"):
    """Answer to an Ask."""

    query_id: int
    body: bytes


ToServer = Start | Serve | BecomeNotReady | Drain | DropMediaCache | AbortAll | Failed | End | Flush | QueryResult

# --- server -> first process --------------------------------------------------------------------------------------


class ServerLoaded(msgspec.Struct, tag="loaded"):
    """The tokenizer is loaded and the core is ready."""


class LoadFailed(msgspec.Struct, tag="load_failed"):
    """This server cannot start; has the line to print."""

    message: str


class Flushed(msgspec.Struct, tag="flushed"):
    """All observations are sent. `steps` has the newest step of each core that this server has seen."""

    flush_id: int
    steps: list[int]


class Query(msgspec.Struct, tag="ask"):
    """Request for engine-wide data: metrics, or load (requests in progress on all servers)."""

    query_id: int
    what: str


FromServer = ServerLoaded | LoadFailed | Observations | Flushed | Query

"""What the first process and its API servers say to each other, on a stream socket that each inherits at its start."""

import msgspec

from trimtab_engine.api.metrics.observations import Observations
from trimtab_engine.api.openai.state import ServerOptions
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.messages import ClientAddresses, CoreFailed

# --- first process -> server --------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start"):
    """The first message. `listen_fd` is the inherited listening socket, `client_index` the server's at the core."""

    client_index: int
    addresses: list[ClientAddresses]
    """Where it meets each engine core."""
    num_clients: int
    listen_fd: int
    config: EngineConfig
    options: ServerOptions


class Serve(msgspec.Struct, tag="serve"):
    """All servers have loaded: accept requests."""


class Leave(msgspec.Struct, tag="leave"):
    """Be ready no more, and serve who comes all the same."""


class Drain(msgspec.Struct, tag="drain"):
    """Accept nothing new; what runs goes on."""


class ForgetAllMedia(msgspec.Struct, tag="forget_all_media"):
    """Forget all images and videos, here and in the cores."""


class AbortAll(msgspec.Struct, tag="abort_all"):
    """End what still runs."""


class Failed(msgspec.Struct, tag="engine_failed"):
    """The engine serves no more: everything that waits gets an error, and what comes gets 503."""

    failure: CoreFailed


class End(msgspec.Struct, tag="end"):
    """Close within `seconds` and end the process."""

    seconds: int


class Flush(msgspec.Struct, tag="flush"):
    """Somebody asks for the metrics: send what you have seen, then Flushed with the same id."""

    flush_id: int


class Answer(msgspec.Struct, tag="answer"):
    """The answer to an Ask."""

    ask_id: int
    body: bytes


ToServer = Start | Serve | Leave | Drain | ForgetAllMedia | AbortAll | Failed | End | Flush | Answer

# --- server -> first process --------------------------------------------------------------------------------------


class ServerLoaded(msgspec.Struct, tag="loaded"):
    """The tokenizer is read and the core is ready."""


class LoadFailed(msgspec.Struct, tag="load_failed"):
    """This server cannot serve: the line to print."""

    message: str


class Flushed(msgspec.Struct, tag="flushed"):
    """All is sent. `steps`: up to which step of each core this server has had outputs."""

    flush_id: int
    steps: list[int]


class Ask(msgspec.Struct, tag="ask"):
    """A question that only the first process can answer: metrics, or load (requests being answered by all servers)."""

    ask_id: int
    what: str


FromServer = ServerLoaded | LoadFailed | Observations | Flushed | Ask

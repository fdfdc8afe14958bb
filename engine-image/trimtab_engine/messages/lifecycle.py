"""Messages about an engine core's process: start, load progress, readiness, retirement and shutdown."""

from typing import Any

import msgspec

from trimtab_engine.config.pooling import GENERATE_ONLY, Tasks
from trimtab_engine.multimodal.items import Modality


class ClientAddresses(msgspec.Struct, frozen=True):
    """Addresses of a client's two one-way sockets, which the client binds and the core connects to."""

    to_core: str
    from_core: str


class CoreStart(msgspec.Struct):
    """Start parameters that the core reads from stdin as one line of JSON. Client 0 receives the statistics; it may be
    the only client.
    """

    config: dict[str, Any]
    clients: list[ClientAddresses]
    clock_offset: float = 0.0
    """Seconds to add to this host's CLOCK_MONOTONIC to get that of the API servers on another host."""
    media_cache_bytes: int = 0
    """Bytes of images and videos that the core caches per client; the client then sends only their hashes."""
    joins: bool = False
    """True if it joins serving cores: it reports when it has loaded, and waits for AdoptConfig."""


class StartWave(msgspec.Struct, tag="wave"):
    """A data-parallel core has begun this wave: the others take part (parallel/wave.py). The client passes it on."""

    number: int


class RetireSeen(msgspec.Struct, tag="retire_seen"):
    """The answer to CoreRetiring: this client sends the core no further request."""

    client_index: int


class Shutdown(msgspec.Struct, tag="shutdown"):
    """Leave the loop; requests that still run are aborted."""


class LoadProgress(msgspec.Struct, tag="progress"):
    """Start-up progress; stages as in docs/reference/contract.md section 3. `percent` is of the whole
    start-up, 0..100.
    """

    stage: str
    percent: float


class CoreReady(msgspec.Struct, tag="ready"):
    """Start-up is done: requests are accepted from now on."""

    max_model_len: int
    vocab_size: int
    eos_token_ids: list[int]
    block_size: int
    num_blocks: int
    cache_config: dict[str, str]
    """Label values of vllm:cache_config_info."""
    num_ranks: int = 1
    """Number of running ranks of this core."""
    modalities: list[Modality] = []
    """Supported modalities besides text."""
    tasks: Tasks = GENERATE_ONLY
    """Supported tasks."""


class CoreBusy(msgspec.Struct, tag="busy"):
    """The core starts an operation during which it sends nothing, for up to `seconds`."""

    seconds: float


class CoreLoaded(msgspec.Struct, tag="loaded"):
    """A joining core has loaded. CoreReady follows after AdoptConfig."""


class CoreRetiring(msgspec.Struct, tag="retiring"):
    """This core accepts no new request; every client answers with RetireSeen. The core ends when running requests have
    finished.
    """


class CoreFailed(msgspec.Struct, tag="failed"):
    """Start-up or the loop failed: the one line to print, and the process's exit code."""

    message: str
    exit_code: int

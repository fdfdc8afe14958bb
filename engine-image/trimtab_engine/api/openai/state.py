"""State shared by all routes of one server: the core, the tokenizer, and whether requests are accepted."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.metrics.exporter import Exporter
from trimtab_engine.api.openai.admission import Admission
from trimtab_engine.api.openai.chat_renderer import ChatRenderer
from trimtab_engine.api.openai.embedding import Embedder
from trimtab_engine.api.openai.generation import Generator
from trimtab_engine.api.openai.grammar_validation import GrammarValidator
from trimtab_engine.api.openai.media import PromptMedia
from trimtab_engine.config.sampling_defaults import NO_DEFAULTS, SamplingDefaults
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.messages.admin import AdapterCard, EngineState
from trimtab_engine.messages.lifecycle import CoreReady
from trimtab_engine.multimodal.sources import NOTHING_ELSE, AllowedSources
from trimtab_engine.sources.progress import Downloaded
from trimtab_engine.text.tokenizer import Tokenizer

RETRY_SECONDS = 5  # for Retry-After; about the time until a drain or a finished load propagates


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """Command line options that only the API server needs."""

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_token_sha256: str | None = None
    state_token_sha256: str | None = None
    """SHA-256 of the routers' token, which opens the state stream only."""
    max_logprobs: int = 20
    api_server_count: int = 1
    stream_interval: int = 1
    log_requests: bool = False
    otlp_traces_endpoint: str | None = None
    chat_template: str | None = None
    """Text that replaces the model's chat template."""
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    """Reasoning parser of the model's output, or None."""
    custom_histogram_buckets: dict[str, list[float]] | None = None
    core_silence_timeout: float = 30.0
    """Seconds without a core heartbeat until probes fail; 0 disables the check."""
    api_key_for_metrics: bool = False
    """True if /metrics and /load require the API key too."""
    media_sources: AllowedSources = NOTHING_ELSE
    """Allowed external sources of images and videos."""
    allow_runtime_lora_updating: bool = False
    """True if clients may load and unload adapters."""
    sampling_defaults: SamplingDefaults = NO_DEFAULTS
    """Values of sampling parameters that requests do not set."""
    allowed_origins: tuple[str, ...] = ("*",)
    """Origins of web pages that may call the API; * is any. Empty: no page of another origin."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    """True if browsers may send cookies and other credentials of their users."""
    batch_dir: str | None = None
    """Directory of files and batches. None without the Files and Batches APIs."""
    downloaded: Downloaded | None = None
    """Download that this start has made, if any."""


@dataclass(frozen=True, slots=True)
class Serving:
    """Objects that exist once the core is ready."""

    facts: CoreReady
    tokenizer: Tokenizer
    generator: Generator
    embedder: Embedder
    trials: GrammarValidator
    renderer: ChatRenderer
    media: PromptMedia | None = None
    """None for text-only models."""

    async def close(self) -> None:
        """Stop the worker processes."""
        if self.media is not None:
            await self.media.close()
        await self.trials.close()
        await self.renderer.close()


@dataclass(slots=True)
class ServerState:
    """State of one server. `serving` is set when loading is done; `leaving` and `draining` are never reset."""

    options: ServerOptions
    core: CoreClient
    exporter: Exporter
    serving: Serving | None = None
    terminating: bool = False
    """Terminating: not ready, so that traffic moves away; arriving requests are still served."""
    draining: bool = False
    """Draining: new requests are rejected."""
    num_arrivals: int = 0
    """Number of requests received so far, except probes and scrapes."""
    num_http_requests: int = 0
    """Generation requests in progress."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while no request is in progress."""
    started: float = field(default_factory=time.time)
    on_drain: Callable[[], None] = lambda: None
    """Called once, when the drain begins."""
    on_drop_media_cache: Callable[[], None] = lambda: None
    """Called when all servers must drop their cached images and videos."""
    long_responses: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    """Held while a response of many values is serialized in a thread: one at a time bounds memory, and the share of
    Python's global lock that the event loop loses."""
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self.idle.set()
        self.admission = Admission(lambda: self.core.state, self.options.api_server_count)

    @property
    def is_ending(self) -> bool:
        return self.terminating or self.draining

    def count_request(self) -> None:
        """Count a received request."""
        self.num_arrivals += 1

    def begin_drain(self) -> None:
        """Reject new requests from now on, in this server and all others of the engine."""
        if not self.draining:
            self.draining = True
            self.on_drain()

    def drop_media_cache(self) -> None:
        """Drop cached images and videos of this server, and of each core for it."""
        if self.serving is not None and self.serving.media is not None:
            self.serving.media.reader.cache.clear()
            self.core.forget_media()

    @contextmanager
    def track_generation(self) -> Iterator[ExitStack]:
        """Count a generation request as in progress; a drain waits for it. It counts until the stack is closed: at the
        end of the block, or by the code that takes it over with pop_all().
        """
        self.num_http_requests += 1
        self.idle.clear()
        with ExitStack() as until:
            until.callback(self._finish_generation)
            yield until

    def _finish_generation(self) -> None:
        self.num_http_requests -= 1
        if self.num_http_requests == 0:
            self.idle.set()

    @property
    def not_ready_reason(self) -> str | None:
        """Return the reason why this server is not ready, or None if it is."""
        reason = self._rejection_reason
        if reason is None and self.terminating:
            return "the engine is terminating: it serves until traffic stops"
        return reason

    @property
    def _rejection_reason(self) -> str | None:
        """Return the reason why requests are rejected, or None if they are accepted."""
        if not self.core.is_alive:
            return f"the engine has failed: {self.core.failure.message if self.core.failure else 'its core has ended'}"
        if self.serving is None:
            progress = self.core.progress
            return f"the engine is loading: {progress.stage}, {progress.percent:.0f}%"
        if (silence := self.core.silence) is not None:
            return f"the engine does not respond: {silence}"
        if self.draining:
            return "the engine is draining: running requests finish, new ones are rejected"
        return paused_reason(self.core.state)

    def loading_reason(self) -> str | None:
        """Return the reason why only probes are served yet, or None if the engine has loaded or failed."""
        return self.not_ready_reason if self.serving is None else None

    def require_serving(self) -> Serving:
        """Return the serving state of a generation request, or raise 503 with the reason. While paused with kept
        requests, new ones queue up too.
        """
        reason = self._rejection_reason
        if self.core.state.pause_mode == "keep" and reason == paused_reason(self.core.state):
            reason = None
        if reason is not None or self.serving is None:
            raise ApiError(503, reason or "the engine is loading", retry_after=RETRY_SECONDS)
        return self.serving

    def require_generation(self) -> Serving:
        """Return the serving state for token generation. Raises 400 if the engine does not generate."""
        serving = self.require_serving()
        if serving.facts.tasks.no_generation:
            raise ApiError(400, f"this engine does not generate text: {serving.facts.tasks.no_generation}")
        return serving

    @property
    def adapters(self) -> tuple[AdapterCard, ...]:
        """Adapters available on every core."""
        return self.core.state.adapters

    def adapter_of(self, name: str | None) -> str:
        """Return the adapter of a requested model name, or an empty string for the base model."""
        is_one = name not in self.options.served_model_names and any(card.name == name for card in self.adapters)
        return name if name is not None and is_one else ""

    def check_model(self, name: str | None) -> str:
        """Return the model name of the response. Raises 404 for a model or adapter that is not served."""
        names = self.options.served_model_names
        if name is None or name in names or self.adapter_of(name):
            return name or names[0]
        shown = name if len(name) <= 100 else name[:100] + "..."
        served = ", ".join([*names, *(card.name for card in self.adapters)])
        raise ApiError(
            404,
            f"the model {shown!r} does not exist; served models: {served}",
            param="model",
            code="model_not_found",
        )


def paused_reason(state: EngineState) -> str | None:
    """Return the reason why the engine is sleeping or paused, or None."""
    if state.sleep_level is not None:
        return f"the engine is asleep at level {state.sleep_level}; POST /admin/v1/wake_up"
    if state.pause_mode is not None:
        return f"the engine is paused with mode {state.pause_mode}; POST /admin/v1/resume"
    return None

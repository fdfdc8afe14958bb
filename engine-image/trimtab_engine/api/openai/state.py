"""What all routes of one server share: the core, the tokenizer, and whether requests are accepted."""

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
from trimtab_engine.api.openai.grammar_trials import GrammarTrials
from trimtab_engine.api.openai.media import PromptMedia
from trimtab_engine.engine_client.client import CoreClient
from trimtab_engine.messages import AdapterCard, CoreReady, EngineState
from trimtab_engine.multimodal.sources import NOTHING_ELSE, AllowedSources
from trimtab_engine.sources.progress import Downloaded
from trimtab_engine.text.tokenizer import Tokenizer

RETRY_SECONDS = 5  # in Retry-After: about what a drain or the end of a load takes to show elsewhere


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """The part of the command line that only the API server needs."""

    served_model_names: tuple[str, ...]
    api_keys: tuple[str, ...] = ()
    admin_token_sha256: str | None = None
    max_logprobs: int = 20
    api_server_count: int = 1
    stream_interval: int = 1
    log_requests: bool = False
    otlp_traces_endpoint: str | None = None
    chat_template: str | None = None
    """The text that takes the place of the model's own."""
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    """How the model writes its thoughts; None: whatever it writes is its answer."""
    custom_histogram_buckets: dict[str, list[float]] | None = None
    core_silence_timeout: float = 30.0
    """Seconds; 0: a core may be silent for ever."""
    api_key_for_metrics: bool = False
    """Whether /metrics and /load ask for the API key too."""
    media_sources: AllowedSources = NOTHING_ELSE
    """Where images and videos may come from besides the request itself."""
    allow_runtime_lora_updating: bool = False
    """Whether clients load and unload adapters."""
    downloaded: Downloaded | None = None
    """What was fetched of the model before it was loaded."""


@dataclass(frozen=True, slots=True)
class Serving:
    """What exists once the core is ready."""

    facts: CoreReady
    tokenizer: Tokenizer
    generator: Generator
    embedder: Embedder
    trials: GrammarTrials
    renderer: ChatRenderer
    media: PromptMedia | None = None
    """None: the model takes text alone."""

    async def close(self) -> None:
        """End the processes that it has started."""
        if self.media is not None:
            await self.media.close()
        await self.trials.close()
        await self.renderer.close()


@dataclass(slots=True)
class ServerState:
    """One server's state. `serving` comes when loading is done; `leaving` and `draining` never go back."""

    options: ServerOptions
    core: CoreClient
    exporter: Exporter
    serving: Serving | None = None
    leaving: bool = False
    """To end when nobody comes any more: not ready, so that nobody is sent here; who comes all the same is served."""
    draining: bool = False
    """Nothing new is accepted."""
    num_arrivals: int = 0
    """Requests that have come so far, but for probes and scrapes."""
    num_http_requests: int = 0
    """Generation requests that are being answered."""
    idle: asyncio.Event = field(default_factory=asyncio.Event)
    """Set while none is."""
    started: float = field(default_factory=time.time)
    on_drain: Callable[[], None] = lambda: None
    """Called once, when it begins to drain."""
    on_forget_media: Callable[[], None] = lambda: None
    """Called when all servers are to forget their images and videos."""
    admission: Admission = field(init=False)

    def __post_init__(self) -> None:
        self.idle.set()
        self.admission = Admission(lambda: self.core.state, self.options.api_server_count)

    @property
    def is_ending(self) -> bool:
        return self.leaving or self.draining

    def arrived(self) -> None:
        """One more request has come."""
        self.num_arrivals += 1

    def begin_drain(self) -> None:
        """Accept nothing new from now on, in this server and in all others of the engine."""
        if not self.draining:
            self.draining = True
            self.on_drain()

    def forget_media(self) -> None:
        """Forget what this server, and each core for it, keeps of images and videos."""
        if self.serving is not None and self.serving.media is not None:
            self.serving.media.reader.cache.clear()
            self.core.forget_media()

    @contextmanager
    def answering(self) -> Iterator[ExitStack]:
        """One generation request is being answered: what a drain waits for. It counts until the stack is closed: at the
        end of the block, or by whoever takes it over with pop_all()."""
        self.num_http_requests += 1
        self.idle.clear()
        with ExitStack() as until:
            until.callback(self._answered)
            yield until

    def _answered(self) -> None:
        self.num_http_requests -= 1
        if self.num_http_requests == 0:
            self.idle.set()

    @property
    def not_ready_reason(self) -> str | None:
        """Why nobody is to be sent here; None: anybody may."""
        reason = self._refusal_reason
        if reason is None and self.leaving:
            return "the engine is to end: it serves on until nobody comes any more"
        return reason

    @property
    def _refusal_reason(self) -> str | None:
        """Why requests are not accepted; None: they are."""
        if not self.core.is_alive:
            return f"the engine has failed: {self.core.failure.message if self.core.failure else 'its core has ended'}"
        if self.serving is None:
            progress = self.core.progress
            return f"the engine is loading: {progress.stage}, {progress.percent:.0f}%"
        if (silence := self.core.silence) is not None:
            return f"the engine hangs: {silence}"
        if self.draining:
            return "the engine is draining: it finishes what runs and accepts nothing new"
        return resting_reason(self.core.state)

    def loading_reason(self) -> str | None:
        """Why nothing but probes can be answered yet; None: the engine has loaded, or has failed."""
        return self.not_ready_reason if self.serving is None else None

    def require_serving(self) -> Serving:
        """What a generation request needs, or 503 with the reason. While requests are kept, new ones queue up too."""
        reason = self._refusal_reason
        if self.core.state.pause_mode == "keep" and reason == resting_reason(self.core.state):
            reason = None
        if reason is not None or self.serving is None:
            raise ApiError(503, reason or "the engine is loading", retry_after=RETRY_SECONDS)
        return self.serving

    def require_generation(self) -> Serving:
        """The same for requests that are to have tokens. 400 where the engine generates none."""
        serving = self.require_serving()
        if serving.facts.tasks.no_generation:
            raise ApiError(400, f"no tokens are generated here: {serving.facts.tasks.no_generation}")
        return serving

    @property
    def adapters(self) -> tuple[AdapterCard, ...]:
        """Those that requests may ask for now, on every core."""
        return self.core.state.adapters

    def adapter_of(self, name: str | None) -> str:
        """The adapter that a request for this model asks for; empty: the model alone."""
        is_one = name not in self.options.served_model_names and any(card.name == name for card in self.adapters)
        return name if name is not None and is_one else ""

    def check_model(self, name: str | None) -> str:
        """The name to answer with. 404 for a model, or an adapter of it, that is not served here."""
        names = self.options.served_model_names
        if name is None or name in names or self.adapter_of(name):
            return name or names[0]
        shown = name if len(name) <= 100 else name[:100] + "..."
        served = ", ".join([*names, *(card.name for card in self.adapters)])
        raise ApiError(
            404,
            f"the model {shown!r} does not exist; served here: {served}",
            param="model",
            code="model_not_found",
        )


def resting_reason(state: EngineState) -> str | None:
    """Why an engine that could work does not."""
    if state.sleep_level is not None:
        return f"the engine sleeps at level {state.sleep_level}: POST /admin/v1/wake_up"
    if state.pause_mode is not None:
        return f"the engine is paused with mode {state.pause_mode}: POST /admin/v1/resume"
    return None

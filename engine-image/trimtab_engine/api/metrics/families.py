"""The engine's Prometheus metrics (docs/reference/contract.md section 4): vLLM's families and buckets, and Trimtab's
own.

Updated from the core's StepStats and from finished sequences; one registry per server, so that tests can have several.
"""

from collections.abc import Mapping, Sequence

from prometheus_client import Counter, Gauge, Metric, generate_latest

from trimtab_engine.api.metrics.cache import CacheMetrics
from trimtab_engine.api.metrics.collectors import (
    AdapterMetrics,
    ExpertMetrics,
    GraphMetrics,
    SaturationMetrics,
    SpeculationMetrics,
    WorkMetrics,
)
from trimtab_engine.api.metrics.factory import (
    LATENCY_BUCKETS,
    Buckets,
    BulkHistogram,
    FamilyFactory,
    Labelled,
    LazyRegistry,
)
from trimtab_engine.api.metrics.observations import FinishedSequence
from trimtab_engine.messages.requests import StepStats

TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
ITL_BUCKETS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
N_BUCKETS = (1, 2, 5, 10, 20)
ITL_BATCH_SIZE = 1000  # inter-token times counted per batch, within a fraction of a millisecond
STEP_BATCH_SIZE = 100  # steps counted per batch
PREEMPTION_BUCKETS = (1, 2, 3, 4, 5, 10, 20)


def length_buckets(max_model_len: int) -> list[int]:
    """Return 1, 2, 5, 10, … up to max_model_len, as in vLLM."""
    return [m * 10**e for e in range(12) for m in (1, 2, 5) if m * 10**e <= max_model_len]


class EngineMetrics:
    """All families of one engine core. `max_model_len` is the upper end of the length histograms; `engine` is the label
    of the data-parallel core.
    """

    def __init__(
        self, model_name: str, max_model_len: int, engine: str = "0", custom_buckets: Buckets | None = None
    ) -> None:
        self.registry = LazyRegistry(self._count_all)
        self.is_gone = False
        """True if the core has ended while others still serve: its gauges are hidden."""
        self._families = FamilyFactory(self.registry, model_name, engine, custom_buckets or {})
        self._engine = engine
        self._gaps: list[float] = []
        """Inter-token times that are not counted yet."""
        self._steps: list[StepStats] = []
        """Step statistics that are not counted yet."""
        self._build_gauges()
        self._build_counters()
        self._build_histograms(length_buckets(max_model_len))
        self._cache = CacheMetrics(self._families)
        self._saturation = SaturationMetrics(self._families)
        self._work = WorkMetrics(self._families)
        self._graphs = GraphMetrics(self._families)
        self._experts = ExpertMetrics(self._families)
        self._adapters = AdapterMetrics(self._families)
        self._families.check_all_used()

    def exposition(self) -> bytes:
        return generate_latest(self.registry)

    # --- events
    # --------------------------------------------------------------------------------------------------------

    def cache_config(self, values: dict[str, str]) -> None:
        """Set vllm:cache_config_info: the configuration as labels of a gauge with value 1."""
        names = [*values, "engine"]
        info = Gauge(
            "vllm:cache_config_info", "Information of the KV cache's configuration", names, registry=self.registry
        )
        info.labels(*values.values(), self._engine).set(1)

    def layout(self, num_ranks: int) -> None:
        """Set trimtab_layout_ranks, the number of running ranks of this core."""
        self._layout_ranks.set(num_ranks)

    def silent_for(self, seconds: float) -> None:
        """Set trimtab_core_silence_seconds, the time since the core's last message."""
        self._silence.set(seconds)

    def start_stages(self, seconds: Mapping[str, float]) -> None:
        """Set trimtab_start_seconds, the duration of each stage of the engine's start."""
        for stage, duration in seconds.items():
            self._start.of(stage).set(duration)

    def on_step(self, stats: StepStats) -> None:
        """Record one step's statistics. Hundreds arrive per second, for dozens of families: they are counted in
        batches.
        """
        self._steps.append(stats)
        if len(self._steps) >= STEP_BATCH_SIZE:
            self._count_steps()

    def _count_all(self) -> None:
        """Count everything that is pending, before a scrape."""
        self._count_gaps()
        self._count_steps()

    def _count_steps(self) -> None:
        steps, self._steps = self._steps, []
        if not steps:
            return
        parts = (self._cache, self._saturation, self._work, self._graphs, self._experts, self._adapters)
        for part in (*parts, self._speculation):
            part.on_steps(steps)
        self._generation_tokens.inc(sum(stats.num_generation_tokens for stats in steps))
        self._prompt_tokens.inc(sum(stats.num_prompt_tokens for stats in steps))
        self._recomputed.inc(sum(stats.recomputed_tokens for stats in steps))
        self._iteration.observe_all([stats.num_scheduled_tokens for stats in steps if stats.num_scheduled_tokens])
        for stats in steps:
            self._count(stats)
        self._show(steps[-1])

    def _show(self, stats: StepStats) -> None:
        """Set the gauges to the latest step's values."""
        self._running.set(stats.num_running)
        self._waiting.set(stats.num_waiting)
        total = max(stats.kv_blocks_total, 1)
        self._kv_usage.set(stats.kv_blocks_used / total)
        for state, blocks in (
            ("total", stats.kv_blocks_total),
            ("used", stats.kv_blocks_used),
            ("free", stats.kv_blocks_total - stats.kv_blocks_used),
            ("cached", stats.kv_blocks_cached),
            ("cap", stats.kv_blocks_cap),
        ):
            self._kv_blocks.of(state).set(blocks)
        self._generation.set(stats.config_generation)

    def _count(self, stats: StepStats) -> None:
        """Count events that most steps do not have."""
        for name, value in (stats.config_values or {}).items():
            self._config_value.of(name).set(value)
        for kind, size in (stats.memory_bytes or {}).items():
            self._memory.of(kind).set(size)
        for mode, reason, count in ((m, r, n) for m, reasons in stats.preempted.items() for r, n in reasons.items()):
            self._preemptions.inc(count)
            self._preempted.of(mode, reason).inc(count)
        if stats.num_encoded_items:
            self._encoded_items.inc(stats.num_encoded_items)
            self._encoded_tokens.inc(stats.num_encoded_tokens)
        for collective, num_bytes in stats.wire_bytes.items():
            self._wire.of(collective).inc(num_bytes)
        for reason, seconds in stats.blocked_seconds.items():
            self._blocked.of(reason).inc(seconds)
        for seconds in stats.preempt_stall_seconds:
            self._stall.observe(seconds)
        for reason, count in stats.failed_requests.items():
            self._failed.of(reason).inc(count)

    def sleep_level(self, level: int | None) -> None:
        """Set vLLM's sleep state of the engine; a paused engine (level 0) has discarded nothing."""
        now = {1: "weights_offloaded", 2: "discard_all"}.get(level or 0, "awake")
        for name in SLEEP_STATES:
            self._sleep_state.of(name).set(name == now)

    def rejected(self, reason: str) -> None:
        """Count a request rejected because the queue is full."""
        self._rejections.of(reason).inc()

    def media_looked_up(self, queries: int, hits: int) -> None:
        """Count lookups in the processor cache."""
        self._cache.media_looked_up(queries, hits)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def next_tokens(self, seconds: Sequence[float]) -> None:
        """Record inter-token times; one per token, so they are counted in batches."""
        self._gaps += seconds
        if len(self._gaps) >= ITL_BATCH_SIZE:
            self._count_gaps()

    def _count_gaps(self) -> None:
        gaps, self._gaps = self._gaps, []
        self._itl.observe_all(gaps)

    def finished(self, sequence: FinishedSequence) -> None:
        self._success.of(sequence.reason).inc()
        self._e2e.observe(sequence.end - sequence.arrival)
        self._length_prompt.observe(sequence.num_prompt_tokens)
        self._length_computed.observe(sequence.num_prompt_tokens - sequence.num_cached_tokens)
        self._num_preemptions.observe(sequence.num_preemptions)
        if sequence.is_pooled:
            self._pooled(sequence)
            return
        self._length_generation.observe(sequence.num_generation_tokens)
        self._params_max_tokens.observe(sequence.max_tokens)
        if sequence.scheduled is None or sequence.first_token is None or sequence.last_token is None:
            return
        self._queue.observe(sequence.scheduled - sequence.arrival)
        self._prefill.observe(sequence.first_token - sequence.scheduled)
        self._decode.observe(sequence.last_token - sequence.first_token)
        self._inference.observe(sequence.last_token - sequence.scheduled)
        if sequence.num_generation_tokens > 1:
            self._tpot.observe((sequence.last_token - sequence.first_token) / (sequence.num_generation_tokens - 1))

    def _pooled(self, sequence: FinishedSequence) -> None:
        """Count a pooling request: only its prefill, because it has no output tokens."""
        if sequence.scheduled is not None and sequence.reason == "stop":
            self._queue.observe(sequence.scheduled - sequence.arrival)
            self._prefill.observe(sequence.end - sequence.scheduled)
            self._inference.observe(sequence.end - sequence.scheduled)

    def request_finished(self, n: int, max_num_generation_tokens: int) -> None:
        """Count a finished HTTP request with n sequences; `max_num_generation_tokens` is the longest sequence's
        length.
        """
        self._params_n.observe(n)
        self._length_max_generation.observe(max_num_generation_tokens)

    # --- families
    # ------------------------------------------------------------------------------------------------------

    def _build_gauges(self) -> None:
        self._running = self._gauge("vllm:num_requests_running", "Number of running requests")
        self._waiting = self._gauge("vllm:num_requests_waiting", "Number of waiting requests")
        self._kv_usage = self._gauge("vllm:kv_cache_usage_perc", "KV cache usage; 1 means 100 percent")
        self._generation = self._gauge("trimtab_config_generation", "Generation of the applied configuration")
        self._silence = self._gauge("trimtab_core_silence_seconds", "Seconds since the core's last message")
        self._layout_ranks = self._gauge("trimtab_layout_ranks", "Number of running ranks")
        self._start = self._labelled_gauge("trimtab_start_seconds", "Seconds of each stage of the start", "stage")
        self._kv_blocks = self._labelled_gauge("trimtab_kv_blocks", "KV blocks by state", "state")
        self._config_value = self._labelled_gauge("trimtab_config_value", "Applied value of each live field", "field")
        self._sleep_state = self._labelled_gauge(
            "vllm:engine_sleep_state", "1 for the current sleep state, else 0", "sleep_state"
        )
        self.sleep_level(None)
        self._memory = self._labelled_gauge("trimtab_memory_bytes", "Device memory in bytes by owner", "kind")

    def _build_counters(self) -> None:
        self._preemptions = self._counter("vllm:num_preemptions", "Preemptions")
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens processed")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated")
        self._recomputed = self._counter("trimtab_recomputed_tokens", "Tokens computed again because of preemption")
        self._encoded_items = self._counter("trimtab_encoded_items", "Images and videos computed by the vision encoder")
        self._encoded_tokens = self._counter(
            "trimtab_encoded_tokens", "Tokens of images and videos computed by the vision encoder"
        )
        self._success = self._labelled_counter("vllm:request_success", "Finished requests", "finished_reason")
        self._preempted = self._labelled_counter("trimtab_preempted_requests", "Preempted requests", "mode", "reason")
        self._wire = self._labelled_counter(
            "trimtab_wire_bytes", "Bytes between the core's own rank and other ranks", "collective"
        )
        self._blocked = self._labelled_counter(
            "trimtab_blocked_seconds", "Seconds in which the first waiting request could not be admitted", "reason"
        )
        self._rejections = self._labelled_counter(
            "vllm:admission_rejections", "Requests rejected because the queue is full", "reason"
        )
        for reason in ("max_num_queued_reqs", "max_num_queued_tokens"):
            self._rejections.of(reason)
        for reason in ("stop", "length", "abort", "error"):
            self._success.of(reason)
        for mode in ("recompute", "swap"):
            for reason in ("capacity", "resize", "reset"):
                self._preempted.of(mode, reason)
        self._failed = self._labelled_counter(
            "trimtab_failed_requests", "Requests failed because no token could be sampled", "reason"
        )
        for reason in ("nan", "nothing_left"):
            self._failed.of(reason)
        for reason in ("kv", "seqs", "tokens"):
            self._blocked.of(reason)

        self._speculation = SpeculationMetrics(self._families)

    def _build_histograms(self, lengths: list[int]) -> None:
        self._ttft = self._histogram("vllm:time_to_first_token_seconds", "Time to first token", TTFT_BUCKETS)
        self._itl = self._histogram("vllm:inter_token_latency_seconds", "Time between two tokens", ITL_BUCKETS)
        self._tpot = self._histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between two tokens of a request", ITL_BUCKETS
        )
        self._e2e = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from arrival to the last token", LATENCY_BUCKETS
        )
        self._queue = self._histogram("vllm:request_queue_time_seconds", "Time in the queue", LATENCY_BUCKETS)
        self._inference = self._histogram("vllm:request_inference_time_seconds", "Running", LATENCY_BUCKETS)
        self._prefill = self._histogram("vllm:request_prefill_time_seconds", "Time in prefill", LATENCY_BUCKETS)
        self._decode = self._histogram("vllm:request_decode_time_seconds", "Time in decode", LATENCY_BUCKETS)
        self._length_prompt = self._histogram("vllm:request_prompt_tokens", "Prompt tokens of a request", lengths)
        self._length_computed = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Computed prompt tokens of a request", lengths
        )
        self._length_generation = self._histogram(
            "vllm:request_generation_tokens", "Generated tokens of a request", lengths
        )
        self._length_max_generation = self._histogram(
            "vllm:request_max_num_generation_tokens", "Maximum generated tokens over a request's choices", lengths
        )
        self._params_max_tokens = self._histogram("vllm:request_params_max_tokens", "Requested max_tokens", lengths)
        self._params_n = self._histogram("vllm:request_params_n", "Requested n", N_BUCKETS)
        self._iteration = self._histogram("vllm:iteration_tokens_total", "Tokens in one step", ITERATION_BUCKETS)
        self._num_preemptions = self._histogram(
            "vllm:request_num_preemptions", "Preemptions of one request", PREEMPTION_BUCKETS
        )
        self._stall = self._histogram(
            "trimtab_preempt_stall_seconds", "Time from preemption to running again", LATENCY_BUCKETS
        )

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._families.gauge(name, text)

    def _labelled_gauge(self, name: str, text: str, label: str) -> Labelled[Gauge]:
        return self._families.labelled_gauge(name, text, label)

    def _counter(self, name: str, text: str) -> Counter:
        return self._families.counter(name, text)

    def _labelled_counter(self, name: str, text: str, *labels: str) -> Labelled[Counter]:
        return self._families.labelled_counter(name, text, *labels)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> BulkHistogram:
        return self._families.histogram(name, text, buckets)


class MergedRegistry:
    """Registry that merges several cores' families: each family once, with the samples of all running cores and the
    counters of ended ones.
    """

    def __init__(self, engines: Sequence[EngineMetrics]) -> None:
        self._engines = engines

    def collect(self) -> list[Metric]:
        families: dict[str, Metric] = {}
        for engine in self._engines:
            for family in engine.registry.collect():
                if engine.is_gone and family.type == "gauge":
                    continue
                if family.name in families:
                    families[family.name].samples += family.samples
                else:
                    families[family.name] = family
        return list(families.values())

"""Start-up of an engine: weights, profiling (which also warms up), the number of KV blocks, the envelope of live
values.

The order matters: each part is measured after everything that it must be measured with exists.
"""

import logging
import os
import time
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import msgspec
from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.live.patch import LiveConfig
from trimtab_engine.config.live.values import Envelope, FixedCoreCount, LiveValues
from trimtab_engine.core.engine import Engine, EngineParts
from trimtab_engine.core.execution import Execution
from trimtab_engine.device.device import is_out_of_memory
from trimtab_engine.device.host_memory import family_bytes, room_bytes
from trimtab_engine.errors import ConfigError
from trimtab_engine.executor.messages import RankReport
from trimtab_engine.executor.start import LoadedRank, load_rank
from trimtab_engine.executor.workers import OnDeath
from trimtab_engine.memory.encoder import EncoderLimits
from trimtab_engine.memory.plan import PlanBase
from trimtab_engine.memory.sizing import KVSize, longest_that_fits, memory_warning, out_of_memory, size_kv_cache
from trimtab_engine.messages.lifecycle import CoreReady
from trimtab_engine.models.registry import kv_groups_of, vision_encoder_of
from trimtab_engine.multimodal.items import Modality
from trimtab_engine.runner.model_runner import ModelRunner
from trimtab_engine.runner.start import GRAPHS_STAGE
from trimtab_engine.scheduling.block_manager import BlockManager
from trimtab_engine.scheduling.encoder_cache import EncoderCache
from trimtab_engine.scheduling.scheduler import Scheduler
from trimtab_engine.scheduling.swap_space import SwapSpace
from trimtab_engine.speculative.loading import Speculation
from trimtab_engine.structured.compiler import GrammarCompiler
from trimtab_engine.structured.vocabulary import read_vocabulary

Progress = Callable[[str, float], None]
"""Called with the stage of docs/reference/contract.md section 3 and the percentage of the whole start-up."""

LOG_INTERVAL_SECONDS = 5.0  # between two lines of one stage
WEIGHTS_PERCENT = (5.0, 70.0)  # loading weights is by far the longest stage
PROFILE_PERCENT = 75.0
KV_CACHE_PERCENT = 80.0
GRAPHS_PERCENT = (82.0, 99.0)

logger = logging.getLogger("trimtab_engine.core")


def start_engine(
    config: EngineConfig,
    progress: Progress,
    clock: Callable[[], float],
    on_rank_death: OnDeath | None = None,
) -> tuple[Engine, CoreReady]:
    """Load the model, profile, size the KV cache, warm up, and start the processes of other ranks.

    Args:
        on_rank_death: Called from another thread when a rank dies, even while this thread waits for it. Without it the
        next step raises WorkerDied.

    Raises:
        ConfigError: With the numbers and the flags to change.
    """
    stage = "starting"
    log = LoadingLog(time.monotonic)

    def note(name: str, percent: float) -> None:
        nonlocal stage
        stage = name
        log.note(name, percent)
        progress(name, percent)

    try:
        return _start(config, note, clock, on_rank_death)
    except (MemoryError, OSError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ConfigError(out_of_memory(config, stage)) from error


def _start(
    config: EngineConfig, progress: Progress, clock: Callable[[], float], on_rank_death: OnDeath | None
) -> tuple[Engine, CoreReady]:
    began = time.monotonic()
    progress("starting", 0.0)
    low, high = WEIGHTS_PERCENT
    rank = load_rank(config, lambda stage, percent: progress(stage, low + percent / 100 * (high - low)), on_rank_death)
    try:
        return _build(config, rank, progress, clock, began)
    except BaseException:
        rank.runner.close()  # the other ranks end as well
        raise


def _build(
    config: EngineConfig, rank: LoadedRank, progress: Progress, clock: Callable[[], float], began: float
) -> tuple[Engine, CoreReady]:
    """Build the engine from loaded ranks."""
    device, runner = rank.device, rank.runner
    speculation = Speculation.load(config, device, runner)
    progress("profile", PROFILE_PERCENT)
    formula = rank.measure(config)
    if speculation is not None:
        formula = speculation.measure(config, formula)
    if config.max_model_len == "auto":
        formula = longest_that_fits(config, formula)
        runner.limit_model_len(formula.max_model_len)
    size = size_kv_cache(config, formula)
    progress("kv_cache", KV_CACHE_PERCENT)
    runner.init_kv_cache(size.cap_blocks, None if speculation is None else speculation.kv_layers)
    formula = start_steps(config, rank, formula, progress)
    # Memory measured from here on reduces the formula's blocks: the addresses stay, the cap is lowered.
    size = size_kv_cache(config, formula)
    runner.kv_cache.limit(size.cap_blocks)
    runner.kv_cache.map_blocks(size.num_blocks)
    _log_size(config, formula, size, time.monotonic() - began)
    _warn_low_memory(config, formula, size)
    parts = EngineParts(
        device=device,
        runner=runner,
        weights=runner if speculation is None else speculation.weights(runner),
        kv_cache=runner.kv_cache,
        scheduler=_scheduler(config, runner, formula, size),
        formula=formula,
        execution=_execution(config, runner, formula, speculation),
        live=_live_config(config, runner, formula, size),
        plan=_plan_base(config, runner, formula),
        layout=_layout(config, rank.reports),
        grammars=_grammars(config, runner),
        adapters=config.adapters,
    )
    runner.take_graph_counts()  # from here on they are of serving
    progress("ready", 100.0)
    return Engine(parts, clock), _ready(config, runner, formula, size, len(rank.reports))


def start_steps(config: EngineConfig, rank: LoadedRank, formula: MemoryFormula, progress: Progress) -> MemoryFormula:
    """On CUDA, on every rank: allocate fixed step inputs, compile kernels, capture graphs. Return the formula with
    their memory; unchanged on the CPU.
    """
    low, high = GRAPHS_PERCENT
    return rank.start_steps(config, formula, lambda percent: progress(GRAPHS_STAGE, low + percent / 100 * (high - low)))


def _scheduler(config: EngineConfig, runner: ModelRunner, formula: MemoryFormula, size: KVSize) -> Scheduler:
    bytes_per_block = formula.widest_block_bytes
    swap_space = SwapSpace(
        config.swap_space_bytes // bytes_per_block,
        config.swap_space_bytes_cap // bytes_per_block,
        config.kv_offload_bytes // bytes_per_block,
        config.kv_offload_bytes_cap // bytes_per_block,
    )
    return Scheduler(
        BlockManager(
            size.num_blocks,
            size.cap_blocks,
            config.block_size,
            swap_space,
            attention_windows=[group.attention_window for group in runner.facts.kv_groups],
            max_num_batched_tokens=config.max_num_batched_tokens_cap,
        ),
        _start_values(config).policy(),
        max_model_len=runner.facts.max_model_len,
        enable_chunked_prefill=config.enable_chunked_prefill,
        eos_token_ids=runner.facts.eos_token_ids,
        num_stages=num_stages(config, runner),
        encoder=_encoder_cache(config, runner),
        max_adapters=None if config.adapters is None else config.adapters.max_loras,
    )


def _encoder_cache(config: EngineConfig, runner: ModelRunner) -> EncoderCache | None:
    """Return the cache for images and videos. None if none are computed."""
    if runner.facts.vision is None:
        return None
    limits = EncoderLimits.of(config, runner.facts.max_model_len)
    return EncoderCache(limits.num_kept_tokens, limits.step_budget)


def _live_config(config: EngineConfig, runner: ModelRunner, formula: MemoryFormula, size: KVSize) -> LiveConfig:
    envelope = Envelope(
        max_num_seqs_cap=config.max_num_seqs_cap,
        max_num_batched_tokens_cap=config.max_num_batched_tokens_cap,
        gpu_memory_utilization_cap=config.gpu_memory_utilization_cap,
        max_model_len=formula.max_model_len,
        block_size=config.block_size,
        enable_chunked_prefill=config.enable_chunked_prefill,
        min_utilization=formula.min_utilization or config.gpu_memory_utilization_cap,
        num_blocks_cap=size.cap_blocks,
        swap_space_bytes_cap=config.swap_space_bytes_cap,
        kv_offload_bytes_cap=config.kv_offload_bytes_cap,
        num_speculative_tokens_cap=config.num_speculative_tokens_cap,
        data_parallel_size_cap=config.max_cores,
        fixed_core_count=_fixed_core_count(config, runner),
        kv_fixed_by=size.fixed_by,
        kv_memory="mapped" if runner.kv_cache.releases_memory else "allocated",
        restart_fields=(
            ("model", config.model),
            ("dtype", runner.facts.dtype),
            ("device", config.device),
            ("device_memory_bytes", formula.device_bytes),
            ("tensor_parallel_size", config.tensor_parallel_size),
            ("pipeline_parallel_size", config.pipeline_parallel_size),
            ("kv_cache_dtype", runner.facts.kv_cache_dtype),
            ("quantization", runner.facts.quantization),
            ("speculative_method", None if config.speculative is None else config.speculative.method),
        ),
    )
    return LiveConfig(envelope, _start_values(config))


def _fixed_core_count(config: EngineConfig, runner: ModelRunner) -> FixedCoreCount | None:
    """Return the reason why engine cores cannot join or retire. None if they can."""
    size, moe = config.data_parallel_size, runner.facts.whole.moe
    if moe is not None and config.enable_expert_parallel:
        num_places = moe.num_experts + (config.num_redundant_experts or 0)
        places = -(-num_places // (config.tensor_parallel_size * size)) * config.tensor_parallel_size
        reason = (
            f"the {moe.num_experts} experts are spread over tensor x data parallel ranks, {places} on each core's; "
            f"with data_parallel_size {{asked}} there would be {{places}} places, which needs {{redundant}} redundant "
            f"experts (below 0: not all would have room); start the engine again to change it"
        )
        return FixedCoreCount(size, reason, moe.num_experts, places)
    if moe is not None:
        return FixedCoreCount(size, "every expert's width is split over all ranks; start the engine again to change it")
    if config.nnodes > 1:
        return FixedCoreCount(size, "the cores are spread over nodes; start the engine again to change it")
    return None


def _start_values(config: EngineConfig) -> LiveValues:
    """Return the initial live values: configuration fields of the same names."""
    return LiveValues(**{field.name: getattr(config, field.name) for field in fields(LiveValues)})


def _plan_base(config: EngineConfig, runner: ModelRunner, formula: MemoryFormula) -> PlanBase:
    facts = runner.facts
    return PlanBase(
        formula=formula,
        max_num_seqs=config.max_num_seqs_cap,
        max_num_batched_tokens=config.max_num_batched_tokens_cap,
        num_layers=facts.whole.num_layers,
        num_attention_heads=facts.whole.num_attention_heads,
        num_kv_heads=facts.whole.num_kv_heads,
        kv_groups=kv_groups_of(facts.whole),
        vocab_size=facts.vocab_size,
        model_max_len=facts.whole.max_model_len,
        dtype=facts.dtype,
        kv_cache_dtype=facts.kv_cache_dtype,
        swap_space_bytes=config.swap_space_bytes_cap,
        swap_is_on_device=config.device == "cpu",
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
    )


def _layout(config: EngineConfig, ranks: list[RankReport]) -> dict[str, Any]:
    """Return the actual layout; every row comes from the rank itself."""
    return {
        "world_size": len(ranks),
        "tensor_parallel_size": config.tensor_parallel_size,
        "pipeline_parallel_size": config.pipeline_parallel_size,
        "data_parallel_size": config.data_parallel_size,
        "expert_parallel": config.enable_expert_parallel,
        "ranks": [msgspec.to_builtins(rank) for rank in sorted(ranks, key=lambda report: report.rank)],
    }


def _execution(
    config: EngineConfig, runner: ModelRunner, formula: MemoryFormula, speculation: Speculation | None
) -> Execution:
    block_bytes = formula.widest_block_bytes
    num_blocks = config.swap_space_bytes_cap // block_bytes + config.kv_offload_bytes_cap // block_bytes
    overlaps = config.device == "cuda" if config.async_scheduling is None else config.async_scheduling
    stages = num_stages(config, runner)
    return Execution(
        runner,
        runner.new_swap_cache(num_blocks) if num_blocks else None,
        in_thread=overlaps and stages == 1 and runner.steps is None,
        on_stream=overlaps and stages == 1 and runner.steps is not None,
        num_stages=stages,
        proposer=None if speculation is None else speculation.proposer(config, runner),
    )


def num_stages(config: EngineConfig, runner: ModelRunner) -> int:
    """Return the number of steps in flight. It is one for cores in lockstep, which agree on each step before it starts,
    and for drafts, which continue a known token.
    """
    return 1 if runner.wave is not None or config.speculative is not None else config.pipeline_parallel_size


def _grammars(config: EngineConfig, runner: ModelRunner) -> GrammarCompiler:
    """Return the grammar compiler. The tokenizer is read when the first grammar arrives."""
    facts = runner.facts
    path = config.tokenizer or config.model
    return GrammarCompiler(partial(read_vocabulary, path, facts.vocab_size, facts.eos_token_ids))


def _ready(
    config: EngineConfig, runner: ModelRunner, formula: MemoryFormula, size: KVSize, num_ranks: int
) -> CoreReady:
    return CoreReady(
        max_model_len=formula.max_model_len,
        vocab_size=runner.facts.vocab_size,
        eos_token_ids=list(runner.facts.eos_token_ids),
        block_size=config.block_size,
        num_blocks=size.num_blocks,
        cache_config={
            "block_size": str(config.block_size),
            "num_gpu_blocks": str(size.num_blocks),
            "num_gpu_blocks_cap": str(size.cap_blocks),
            "gpu_memory_utilization": config.gpu_memory_utilization,
            "cache_dtype": runner.facts.dtype,
            "enable_prefix_caching": str(config.enable_prefix_caching),
            "kv_cache_size_tokens": str(formula.tokens_of(size.num_blocks)),
        },
        num_ranks=num_ranks,
        modalities=_modalities(config, runner),
        tasks=runner.facts.tasks,
    )


def _modalities(config: EngineConfig, runner: ModelRunner) -> list[Modality]:
    """Return the supported modalities besides text, limited by the configuration."""
    kind = vision_encoder_of(runner.facts.whole)
    if kind is None or runner.facts.vision is None:
        return []
    return [modality for modality in config.modalities if modality in kind.modalities]


def _warn_low_memory(config: EngineConfig, formula: MemoryFormula, size: KVSize) -> None:
    """Warn if other processes leave less memory than the engine may use. Only a node's first engine core warns."""
    if config.device == "cpu" and config.first_local_rank == 0:
        first_process = os.getppid() if config.api_server_count else os.getpid()
        warning = memory_warning(config, formula, size, room_bytes(family_bytes(first_process)))
        if warning is not None:
            logger.warning(warning)


def _log_size(config: EngineConfig, formula: MemoryFormula, size: KVSize, seconds: float) -> None:
    """Log vLLM's size lines, which dashboards and users search for; on the CPU no GPU is mentioned."""
    gib = size.num_blocks * formula.bytes_per_block / (1 << 30)
    tokens = formula.tokens_of(size.num_blocks)
    logger.info("Available KV cache memory: %.2f GiB", gib)
    logger.info(
        "%sKV cache size: %s tokens, Maximum concurrency for %s tokens per request: %.2fx",
        "" if config.device == "cpu" else "GPU ",
        f"{tokens:,}",
        f"{formula.max_model_len:,}",
        size.num_blocks / formula.blocks_per_request,
    )
    logger.info("init engine (profile, create kv cache, warmup model) took %.2f s (compilation: 0.00 s)", seconds)


class LoadingLog:
    """Logs few lines of frequent progress updates. `clock` is in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._stage = ""
        self._said = clock()

    def note(self, stage: str, percent: float) -> None:
        """Log progress if it is due. `percent` is of the whole start-up."""
        now = self._clock()
        if stage == self._stage and now - self._said < LOG_INTERVAL_SECONDS:
            return
        if stage not in ("starting", "ready"):  # covered by the lines before and after
            logger.info("loading: %s, %.0f%%", stage, percent)
        self._stage, self._said = stage, now

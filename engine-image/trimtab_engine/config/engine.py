"""The engine's configuration: one frozen value, passed from the command line to every process.

No code outside this file reads the environment. Checks that need only the values are in `EngineConfig.__post_init__`;
checks that need the model or the device are made where those are read.
"""

import logging
import os
import shutil
from typing import Any, Literal

import msgspec

from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.config.experts import EplbConfig
from trimtab_engine.config.graphs import DEFAULT_LEVEL, MODES_BY_LEVEL, CompilationConfig
from trimtab_engine.config.pooling import PoolerConfig, Runner
from trimtab_engine.config.speculation import SpeculativeConfig
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.multimodal.items import MODALITIES, Modality
from trimtab_engine.scheduling.policy import PreemptionMode, QueueOrder

BLOCK_SIZES = (8, 16, 32, 64, 128, 256)
MAX_BATCHED_TOKENS = 1 << 20  # tokens in a step; 64 times the largest default in the field
MM_PROCESSOR_CACHE_BYTES = 4 << 30  # default per process that caches images and videos: the guide's value
MEDIA_CACHE_SHARE = 8  # all caches together take at most this fraction (1/n) of CPU memory
FLAGS = {"swap_space_bytes": "swap-space", "kv_offload_bytes": "kv-offload-size"}
"""The flag of a field where it is not the field's name."""
MIN_STATS_INTERVAL_SECONDS = 1.0  # a shorter interval costs much and shows little
MAX_STATS_INTERVAL_SECONDS = 3600.0
MAX_WATERMARK = 0.9  # above it almost nothing would be admitted while requests run
MIN_TTFT_TARGET = 0.001  # of the policy deadline: less is not attainable
MAX_TTFT_TARGET = 86_400.0  # seconds, also per prompt token: no client waits longer
MAX_QUEUE_LIMIT = 1_000_000_000  # of requests or tokens: no queue is as long
RANGES: dict[str, tuple[float, float]] = {
    "long_prefill_token_threshold": (0, MAX_BATCHED_TOKENS),
    "watermark": (0, MAX_WATERMARK),
    "ttft_target": (0, MAX_TTFT_TARGET),
    "ttft_target_per_prompt_token": (0, MAX_TTFT_TARGET),
    "max_num_queued_reqs": (0, MAX_QUEUE_LIMIT),
    "max_num_queued_tokens": (0, MAX_QUEUE_LIMIT),
    "stats_interval_seconds": (MIN_STATS_INTERVAL_SECONDS, MAX_STATS_INTERVAL_SECONDS),
}
"""Fields with fixed bounds."""
KVCacheDtype = Literal["auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
EncoderMode = Literal["weights", "data"]
LogLevel = Literal["debug", "info", "warning", "error"]
LOOPBACK_INTERFACE = "lo"
MAX_RANKS = 4096  # per degree: far above any machine; rejects absurd values early


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Start-up configuration of the engine core. Sizes in bytes per rank, lengths in tokens. None means decided at
    start-up.

    The caps are the envelope that start-up reserves. Initial values lie inside it and are live parameters
    (docs/reference/contract.md). `gpu_memory_utilization` is a decimal string, so that 0.29 of 100 bytes is 29 bytes.
    """

    model: str
    tokenizer: str | None = None
    load_format: Literal["auto", "safetensors", "gguf", "dummy"] = "auto"
    runner: Runner = "auto"
    """Task of the engine. auto: by the checkpoint."""
    pooler: PoolerConfig = PoolerConfig()
    """Pooling overrides of the checkpoint's settings."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    device: Literal["cpu", "cuda"] = "cpu"
    device_memory_bytes: int | None = None
    cpu_threads: int | None = None
    max_model_len: int | Literal["auto"] | None = None
    """None means the model's maximum. auto: the longest request that fits into the KV cache."""
    block_size: int = 16
    kv_cache_dtype: KVCacheDtype = "auto"
    """auto: the model's dtype. fp8: fp8_e4m3."""
    quantization: Literal["fp8"] | None = None
    """Quantize linear layers while loading. None means as stored in the checkpoint."""
    gpu_memory_utilization: str = "0.9"
    gpu_memory_utilization_cap: str = "0.9"
    kv_cache_memory_bytes: int | None = None
    num_gpu_blocks_override: int | None = None
    max_num_seqs: int = 128
    max_num_seqs_cap: int = 128
    max_num_batched_tokens: int = 2048
    max_num_batched_tokens_cap: int = 2048
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    watermark: float = 0.0
    scheduling_policy: QueueOrder = "fcfs"
    ttft_target: float = 0.0
    """TTFT target in seconds under the policy `deadline`."""
    ttft_target_per_prompt_token: float = 0.0
    """Seconds added to the target per prompt token."""
    preemption_mode: PreemptionMode = "recompute"
    swap_space_bytes: int = 0
    swap_space_bytes_cap: int = 0
    kv_offload_bytes: int = 0
    """Host memory for blocks evicted from the KV cache; 0: none."""
    kv_offload_bytes_cap: int = 0
    mm_processor_cache_bytes: int | None = None
    """Cache of processed images and videos in each API server and again in each engine core. 0: none; None means see
    `processor_cache_bytes`.
    """
    enable_prefix_caching: bool = True
    async_scheduling: bool | None = None
    """Schedule the next step while the device computes one. None means on CUDA."""
    speculative: SpeculativeConfig | None = None
    """Speculative decoding. None means no speculation; the depth is 0."""
    num_speculative_tokens: int = 0
    num_speculative_tokens_cap: int = 0
    adapters: AdapterConfig | None = None
    """LoRA adapters. None means not served."""
    max_num_queued_reqs: int = 0
    """0: no limit; likewise for the tokens."""
    max_num_queued_tokens: int = 0
    disable_log_stats: bool = False
    stats_interval_seconds: float = 10.0
    log_level: LogLevel = "info"
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    data_parallel_size: int = 1
    data_parallel_size_cap: int | None = None
    """Maximum live number of cores. None means the initial number."""
    data_parallel_first_rank: int = 0
    """Rank of this API's first core in a world whose other cores have their own APIs and an external load balancer."""
    data_parallel_world_size: int | None = None
    """Cores of that world. None means only this API's."""
    data_parallel_rank: int = 0
    """Rank of this data-parallel core; set by the process that starts the cores, with their rendezvous."""
    data_parallel_rendezvous: str | None = None
    """Rendezvous as in executor/rendezvous.py: file:PATH on one node, tcp:HOST:PORT over several."""
    enable_expert_parallel: bool = False
    expert_placement_strategy: Literal["linear", "round_robin"] = "linear"
    eplb: EplbConfig | None = None
    """Expert load balancing. None means disabled."""
    pipeline_layer_partition: tuple[int, ...] | None = None
    """Layers of each pipeline stage. None means divided evenly."""
    nnodes: int = 1
    """Nodes over which the ranks are spread evenly, whole engine cores where there are several; this one is
    `node_rank`."""
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29501
    enforce_eager: bool = False
    optimization_level: int = DEFAULT_LEVEL
    compilation: CompilationConfig = CompilationConfig()
    limit_mm_per_prompt: dict[str, int] = {}
    """Maximum images and videos per prompt, by kind; if all are 0 or none is given, no vision encoder is loaded."""
    mm_encoder_tp_mode: EncoderMode = "weights"
    """Parallelism of the vision encoder over tensor-parallel ranks. weights: each rank has a shard, and all compute
    each item together; data: each rank has the whole encoder and computes some of the items.
    """
    max_num_encoder_input_tokens: int | None = None
    """Maximum image and video tokens computed per step. None means those of the largest item, or the token budget."""
    encoder_cache_size: int | None = None
    """Image and video tokens whose embeddings are cached. None means the same default."""
    api_server_count: int = 0
    """Processes that serve HTTP before this engine. 0: none, it is used from Python."""
    rendezvous_id: str = ""
    """Ranks with different ids never form one engine, for example different revisions of a group."""
    rendezvous_secret_file: str | None = None
    """File with the nodes' shared secret. None means peers are not authenticated."""
    seed: int = 0
    profiler_dir: str | None = None

    @property
    def max_cores(self) -> int:
        """Maximum live number of engine cores."""
        return self.data_parallel_size_cap or self.data_parallel_size

    @property
    def num_local_cores(self) -> int:
        """Engine cores on one node, at the start."""
        return max(1, self.data_parallel_size // self.nnodes)

    @property
    def nodes_per_core(self) -> int:
        """Nodes that one engine core's ranks are spread over: several only where there is one core."""
        return self.nnodes if self.data_parallel_size == 1 else 1

    @property
    def ranks_per_node(self) -> int:
        """Ranks of one engine core per node."""
        return self.tensor_parallel_size * self.pipeline_parallel_size // self.nodes_per_core

    @property
    def num_local_ranks(self) -> int:
        """Maximum ranks of all engine cores on one node: its device is divided among them."""
        return self.max_cores // (self.nnodes // self.nodes_per_core) * self.ranks_per_node

    @property
    def first_local_rank(self) -> int:
        """Index of this core's first rank among its node's."""
        return self.data_parallel_rank * self.ranks_per_node % self.num_local_ranks

    @property
    def num_local_api_servers(self) -> int:
        """On this node: the first one has them all."""
        return self.api_server_count if self.node_rank == 0 else 0

    @property
    def num_local_core_processes(self) -> int:
        """On this node, at most: an engine core that is spread over nodes has its process on the first one."""
        return self.num_local_ranks // self.ranks_per_node if self.nodes_per_core == 1 else int(self.node_rank == 0)

    @property
    def num_local_media_caches(self) -> int:
        """Processes of this node that keep images and videos: API servers, and the engine cores that they send to."""
        is_served = self.api_server_count > 0
        return self.num_local_api_servers + self.num_local_core_processes if is_served and self.modalities else 0

    @property
    def processor_cache_bytes(self) -> int:
        """Image and video cache of each API server and each engine core. By default, if device memory is host memory,
        all of them together take at most a share of it.
        """
        if not self.modalities:
            return 0
        if self.mm_processor_cache_bytes is not None:
            return self.mm_processor_cache_bytes
        if self.device == "cuda" or self.device_memory_bytes is None:
            return MM_PROCESSOR_CACHE_BYTES
        share = self.device_memory_bytes * self.num_local_ranks // MEDIA_CACHE_SHARE
        return min(MM_PROCESSOR_CACHE_BYTES, share // max(1, self.num_local_media_caches))

    @property
    def media_cache_bytes(self) -> int:
        """Image and video cache of a core per API server: its cache is divided among them."""
        return self.processor_cache_bytes // max(1, self.api_server_count)

    @property
    def has_first_process(self) -> bool:
        """True if this node has a process that only manages the others. A single API server does so itself."""
        return self.api_server_count > 0 and self.num_local_api_servers != 1

    @property
    def max_num_sampled_rows(self) -> int:
        """Rows of logits of one step, at most: the newest token and the drafts of every request."""
        return min(self.max_num_batched_tokens_cap, self.max_num_seqs_cap * (1 + self.num_speculative_tokens_cap))

    @property
    def num_redundant_experts(self) -> int | None:
        """None if experts do not move."""
        return None if self.eplb is None else self.eplb.num_redundant_experts

    def __post_init__(self) -> None:
        if self.block_size not in BLOCK_SIZES:
            raise ConfigError(
                f"--block-size is {self.block_size}; it must be one of {', '.join(map(str, BLOCK_SIZES))}"
            )
        for name in ("gpu_memory_utilization", "gpu_memory_utilization_cap"):
            _check_fraction(name, getattr(self, name))
        if float(self.gpu_memory_utilization) > float(self.gpu_memory_utilization_cap):
            raise _above_cap("gpu-memory-utilization", self.gpu_memory_utilization, self.gpu_memory_utilization_cap)
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            value, cap = getattr(self, name), getattr(self, name + "_cap")
            flag = name.replace("_", "-")
            if value < 1:
                raise ConfigError(f"--{flag} is {value}; it must be 1 or more")
            if value > cap:
                raise _above_cap(flag, value, cap)
        for name in ("swap_space_bytes", "kv_offload_bytes", "num_speculative_tokens"):
            value, cap = getattr(self, name), getattr(self, name + "_cap")
            flag = FLAGS.get(name, name.replace("_", "-"))
            if value < 0:
                raise ConfigError(f"--{flag} is {value}; it must be 0 or more")
            if value > cap:
                raise _above_cap(flag, value, cap)
        self._check_speculation()
        self._check_adapters()
        for name, (low, high) in RANGES.items():
            if not low <= getattr(self, name) <= high:
                flag, value = name.replace("_", "-"), getattr(self, name)
                raise ConfigError(f"--{flag} is {value}; it must be between {low:g} and {high:.10g}")
        if self.scheduling_policy == "deadline" and self.ttft_target < MIN_TTFT_TARGET:
            raise ConfigError(
                f"--scheduling-policy is deadline, but --ttft-target is {self.ttft_target:g}; set it to the "
                f"TTFT target in seconds, {MIN_TTFT_TARGET:g} or more"
            )
        if self.max_num_batched_tokens_cap > MAX_BATCHED_TOKENS:
            raise ConfigError(
                f"--max-num-batched-tokens (or its cap) is {self.max_num_batched_tokens_cap}; start-up runs one step "
                f"of that size, and more than {MAX_BATCHED_TOKENS} is not meant; set {MAX_BATCHED_TOKENS} or less"
            )
        if self.optimization_level not in MODES_BY_LEVEL:
            raise ConfigError(f"-O is {self.optimization_level}; it must be 0 to {max(MODES_BY_LEVEL)}")
        self._check_ranks()
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"--max-num-batched-tokens is {self.max_num_batched_tokens}, below --max-num-seqs {self.max_num_seqs}: "
                f"a step could not give every running request one token; raise the former or lower the latter"
            )

    def _check_ranks(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "nnodes"):
            if not 1 <= getattr(self, name) <= MAX_RANKS:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag} is {getattr(self, name)}; it must be between 1 and {MAX_RANKS}")
        ranks = self.tensor_parallel_size * self.pipeline_parallel_size
        if not self.data_parallel_size <= self.max_cores <= MAX_RANKS:
            raise _above_cap("data-parallel-size", self.data_parallel_size, self.data_parallel_size_cap)
        if self.max_cores > self.data_parallel_size and self.nnodes > 1:
            raise NotSupportedError(
                f"--data-parallel-size-cap {self.max_cores} with --nnodes {self.nnodes} is not supported: engine cores "
                f"join and retire on one node only; leave the cap out"
            )
        if self.rendezvous_secret_file is not None and self.nnodes == 1:
            raise ConfigError(
                "--rendezvous-secret-file authenticates the nodes of one replica to each other; with --nnodes 1 "
                "there are no others: leave it out"
            )
        self._check_external()
        if self.data_parallel_size > 1 and self.data_parallel_size % self.nnodes:
            raise NotSupportedError(
                f"--data-parallel-size {self.data_parallel_size} with --nnodes {self.nnodes} is not supported: each "
                f"node "
                f"holds as many whole engines as the others; set a multiple of {self.nnodes}, or fewer nodes"
            )
        if self.eplb is not None:
            self._check_eplb()
        if ranks % self.nodes_per_core:
            raise ConfigError(
                f"--nnodes is {self.nnodes}, but tensor x pipeline parallel = {ranks} ranks cannot be divided evenly "
                f"among that many nodes; set a divisor of {ranks}"
            )
        if not 0 <= self.node_rank < self.nnodes:
            raise ConfigError(f"--node-rank is {self.node_rank}; with --nnodes {self.nnodes} it must be below that")

    def _check_eplb(self) -> None:
        if not self.enable_expert_parallel:
            raise ConfigError("--enable-eplb balances whole experts; add --enable-expert-parallel, or leave it out")
        if self.tensor_parallel_size * self.data_parallel_size == 1:
            raise ConfigError(
                "--enable-eplb balances over tensor x data parallel ranks, and there is 1; raise one of the sizes"
            )
        if self.expert_placement_strategy != "linear":
            raise ConfigError(
                f"--expert-placement-strategy {self.expert_placement_strategy} fixes expert placement, --enable-eplb "
                f"moves them; leave one of the two out"
            )

    def _check_external(self) -> None:
        world = self.data_parallel_world_size
        if world is None:
            return
        last = self.data_parallel_first_rank + self.data_parallel_size - 1
        if not 0 <= self.data_parallel_first_rank <= last < world:
            raise ConfigError(
                f"data-parallel ranks {self.data_parallel_first_rank} to {last} of --data-parallel-size {world} are "
                f"not there; ranks are 0 to {world - 1}"
            )
        if self.nnodes > 1 or self.max_cores > self.data_parallel_size:
            raise NotSupportedError(
                "--data-parallel-rank and --data-parallel-hybrid-lb, where every server has its own cores, go neither "
                "with --nnodes nor with --data-parallel-size-cap; leave those out"
            )

    @property
    def modalities(self) -> list[Modality]:
        """Allowed modalities besides text."""
        return [modality for modality in MODALITIES if self.limit_mm_per_prompt.get(modality)]

    def _check_speculation(self) -> None:
        depth_cap = 0 if self.speculative is None else self.speculative.num_speculative_tokens
        if self.num_speculative_tokens_cap > depth_cap:
            raise ConfigError(
                f"the cap of num_speculative_tokens is {self.num_speculative_tokens_cap}, but --speculative-config "
                f"makes {depth_cap} drafts"
            )
        if self.speculative is not None and self.speculative.reads_hidden_states:
            self._check_hidden_states(self.speculative.method)

    def _check_adapters(self) -> None:
        """Raise NotSupportedError where adapters are not supported yet."""
        if self.adapters is None:
            return
        if self.adapters.is_updatable and self.max_cores > self.data_parallel_size:
            raise NotSupportedError(
                "--allow-runtime-lora-updating with --data-parallel-size-cap is not supported: an engine core that "
                "joins "
                "would lack the adapters that were loaded meanwhile; leave one of the two out"
            )

    def _check_hidden_states(self, method: str) -> None:
        """Raise NotSupportedError where the hidden states needed for drafts are not available."""
        if self.modalities:
            raise NotSupportedError(
                f"--speculative-config: method {method} is not supported with images and videos, because the "
                f"draft would read their placeholder tokens; use ngram or draft_model, "
                f"or --limit-mm-per-prompt with 0 each"
            )
        degrees = (
            ("--tensor-parallel-size", self.tensor_parallel_size),
            ("--pipeline-parallel-size", self.pipeline_parallel_size),
        )
        for flag, degree in degrees:
            if degree > 1:
                raise NotSupportedError(
                    f"--speculative-config: method {method} with {flag} {degree} is not supported, as embeddings and "
                    f"the "
                    f"output layer are divided there; use ngram or draft_model, or one rank"
                )
        if self.device == "cuda":
            raise NotSupportedError(
                f"--speculative-config: method {method} is not supported on CUDA; use ngram or draft_model there"
            )


def _check_fraction(name: str, value: str) -> None:
    flag = "--" + name.replace("_", "-")
    try:
        number = float(value)
    except ValueError:
        raise ConfigError(f"{flag} is {value!r}; it must be a number above 0 and up to 1, such as 0.9") from None
    if not 0 < number <= 1:
        raise ConfigError(f"{flag} is {value}; it must be above 0 and up to 1")


def _above_cap(flag: str, value: Any, cap: Any) -> ConfigError:
    return ConfigError(f"--{flag} is {value}, above --{flag}-cap {cap}; raise the cap or lower the value")


def first_visible_gpu() -> int | str | None:
    """Return the first GPU that CUDA shows to this process's children, by index or UUID, as in NVML.
    None without one.
    """
    written = os.environ.get("CUDA_VISIBLE_DEVICES")
    if written is None:
        return 0
    first = written.split(",")[0].strip()
    if first.startswith(("GPU-", "MIG-")):
        return first
    return int(first) if first.isdecimal() else None


def c_compiler() -> str | None:
    """Return the compiler with which Triton builds its launchers: CC, else gcc or clang. None without one."""
    return os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")


def use_interface_between_ranks(name: str | None) -> None:
    """Restrict the ranks' connections to this interface unless the environment sets another. None means
    no restriction.
    """
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        if name != LOOPBACK_INTERFACE:
            os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={name}")


def set_log_level(level: LogLevel) -> None:
    """Set the log level of this process's own loggers; libraries have their own levels."""
    logging.getLogger("trimtab_engine").setLevel(level.upper())

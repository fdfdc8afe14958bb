"""Expected scaling of layouts to eight GPUs: a roofline model, simulated, not measured, because no machine with two
GPUs was available.

A stage takes the longer of its rank's reads (weights, keys and values) and computation, plus the communication between
ranks: ring all-reduces after attention and MLP of each layer, a gather and a scatter of an MoE's tokens with data
parallelism, a transfer to the next stage. Nothing overlaps and host time is zero.
"""

from dataclasses import dataclass
from typing import Any

from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.parallel.ranks import Layout
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.partition import Span, layers_of_stages

GPU = "H200"
MEMORY_BYTES = 139.8 * 2**30
BANDWIDTH = 4.3e12  # bytes/s, copied on one H200; 4.8 published
FLOPS = 788e12  # bf16, reached on one H200 with GEMMs of 8192³; 989 published
LINK = 370e9  # bytes/s that a rank sends over NVLink: measured for NCCL, of 450 (NVIDIA/nccl-tests#212)
LINK_LATENCY_SECONDS = 15e-6  # assumed, of one small collective
PIPELINE_BALANCE = 0.85  # assumed: fraction of a cycle in which a stage has work; steps in flight are not equally long
USABLE = 0.9  # of the memory
ITEMSIZE = 2  # bf16, for weights, keys and values, hidden states
HIDDEN_STATES_PER_TRANSFER = 1  # the residual is added before a stage sends
BATCH, CONTEXT = 256, 2048  # requests over all GPUs, tokens of each

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "eos_token_id": 128_001,
}
LLAMA_70B = LLAMA_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28_672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 94,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 40_960,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "eos_token_id": 151_645,
}
DENSE_LAYOUTS = (
    Layout(),
    Layout(tensor=2),
    Layout(tensor=4),
    Layout(tensor=8),
    Layout(pipeline=8),
    Layout(tensor=4, pipeline=2),
    Layout(tensor=2, data=4),
    Layout(data=8),
)
MOE_LAYOUTS = (
    Layout(tensor=8),
    Layout(tensor=8, expert=True),
    Layout(tensor=4, pipeline=2, expert=True),
    Layout(tensor=4, data=2, expert=True),
    Layout(data=8, expert=True),
)
MODELS: tuple[tuple[str, dict[str, Any], tuple[Layout, ...]], ...] = (
    ("Llama-3.1-8B", LLAMA_8B, DENSE_LAYOUTS),
    ("Llama-3.1-70B", LLAMA_70B, DENSE_LAYOUTS),
    ("Qwen3-235B-A22B", QWEN3_235B, MOE_LAYOUTS),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """One layout at one load. `step_seconds`: time per token of a request; `exchange_share`: fraction of the slowest
    stage's time. `num_requests` is limited by memory; 0 if the weights do not fit.
    """

    num_requests: int
    step_seconds: float
    exchange_share: float
    weights_bytes: float
    """Weights of the rank with the most."""

    @property
    def tokens_per_second(self) -> float:
        return self.num_requests / self.step_seconds if self.num_requests else 0.0


def estimate(config: ModelConfig, layout: Layout, *, batch: int = BATCH, context: int = CONTEXT) -> Estimate:
    """Estimate a decode step of `batch` requests over all copies, `context` tokens each."""
    spans = layers_of_stages(config.num_layers, layout.pipeline)
    shares = [_Stage(config, layout, span) for span in spans]
    weights = max(share.weights_bytes for share in shares)
    room = min((USABLE * MEMORY_BYTES - share.weights_bytes) / share.kv_bytes_per_token for share in shares)
    held = max(0, int(room / context)) * layout.data
    requests = min(batch, held)
    if not requests:
        return Estimate(num_requests=0, step_seconds=0.0, exchange_share=0.0, weights_bytes=weights)
    of_engine = max(1.0, requests / layout.data)
    tokens = max(1.0, of_engine / layout.pipeline)
    times = [share.seconds(tokens, context) for share in shares]
    totals = [work + exchange for work, exchange in times]
    slowest = max(range(len(totals)), key=totals.__getitem__)
    in_flight = min(of_engine, layout.pipeline)
    cycle = in_flight * totals[slowest] / (PIPELINE_BALANCE if layout.pipeline > 1 else 1.0)
    return Estimate(
        num_requests=requests,
        step_seconds=max(sum(totals), cycle),
        exchange_share=times[slowest][1] / totals[slowest],
        weights_bytes=weights,
    )


class _Stage:
    """Weights and work of one rank of a stage."""

    def __init__(self, config: ModelConfig, layout: Layout, span: Span) -> None:
        self._config, self._layout, self._num_layers = config, layout, span[1] - span[0]
        self._is_first, self._is_last = span[0] == 0, span[1] == config.num_layers
        hidden, size, tensor = config.hidden_size, config.head_size, layout.tensor
        self._kv_heads = max(1, config.num_kv_heads // tensor)
        heads = config.num_attention_heads // tensor
        attention = hidden * size * (2 * heads + 2 * self._kv_heads)
        moe = config.moe
        router = 0 if moe is None else hidden * moe.num_experts
        mlp = 3 * hidden * config.intermediate_size / tensor if moe is None else router
        self._table = config.vocab_size * hidden / tensor * ITEMSIZE
        self._always = self._num_layers * (attention + mlp) * ITEMSIZE
        ranks = tensor * layout.data
        wide = 0.0 if moe is None else 3 * hidden * moe.intermediate_size * moe.num_experts / ranks
        self._experts = self._num_layers * wide * ITEMSIZE
        self.kv_bytes_per_token = 2 * self._num_layers * self._kv_heads * size * ITEMSIZE

    @property
    def weights_bytes(self) -> float:
        return self._always + self._experts + self._table * (self._is_first + self._is_last)

    def seconds(self, tokens: float, context: int) -> tuple[float, float]:
        """Return (work, exchange) seconds of a step with `tokens` tokens of this rank's engine, one for each
        request.
        """
        config, moe = self._config, self._config.moe
        chosen = 0.0 if moe is None else moe.num_experts_per_token / moe.num_experts
        shared = tokens * self._layout.data
        dense = self._always + (self._table if self._is_last else 0.0)
        read = dense + (1 - (1 - chosen) ** shared) * self._experts + tokens * context * self.kv_bytes_per_token
        attention = 4 * tokens * context * self._num_layers * config.num_attention_heads * config.head_size
        flops = 2 * (tokens * dense + shared * chosen * self._experts) / ITEMSIZE + attention / self._layout.tensor
        return max(read / BANDWIDTH, flops / FLOPS), self._exchange(tokens)

    def _exchange(self, tokens: float) -> float:
        layout, states = self._layout, tokens * self._config.hidden_size * ITEMSIZE
        seconds = (2 * self._num_layers + self._is_first) * _ring(states, layout.tensor, passes=2)
        if self._config.moe is not None:
            seconds += 2 * self._num_layers * _ring(states * layout.data, layout.data, passes=1)
        if not self._is_last:
            seconds += LINK_LATENCY_SECONDS + HIDDEN_STATES_PER_TRANSFER * states / LINK
        return seconds


def _ring(num_bytes: float, ranks: int, *, passes: int) -> float:
    """Return the bytes sent by a ring: each pass sends (ranks - 1) / ranks of the bytes; an all-reduce has two passes,
    a gather or scatter one.
    """
    return 0.0 if ranks == 1 else LINK_LATENCY_SECONDS + passes * (ranks - 1) / ranks * num_bytes / LINK


def name_of(layout: Layout) -> str:
    degrees = (("TP", layout.tensor), ("PP", layout.pipeline), ("DP", layout.data))
    parts = [f"{name}{size}" for name, size in degrees if size > 1]
    return " ".join([*parts, *(["EP"] if layout.expert else [])]) or "one GPU"


def scaling_rows() -> list[dict[str, Any]]:
    """Return every layout of every model; the factor is relative to the smallest layout of the model that fits."""
    rows = []
    for name, values, layouts in MODELS:
        config = parse_model_config(values, {}, name)
        first: tuple[float, int] | None = None
        for layout in layouts:
            found = estimate(config, layout)
            rate = found.tokens_per_second
            if first is None and rate:
                first = (rate, layout.world_size)
            rows.append(
                {
                    "model": name,
                    "layout": name_of(layout),
                    "gpus": layout.world_size,
                    "requests": found.num_requests,
                    "weights_gib_per_gpu": round(found.weights_bytes / 2**30, 1),
                    "step_ms": round(found.step_seconds * 1e3, 2),
                    "exchange_share": round(found.exchange_share, 3),
                    "tokens_per_second": round(rate),
                    "tokens_per_second_per_gpu": round(rate / layout.world_size),
                    "factor": round(rate / first[0], 2) if first else 0.0,
                    "factor_base_gpus": first[1] if first else 0,
                }
            )
    return rows

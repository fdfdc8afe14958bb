"""Step times of a layout: a roofline for ranking layouts, not for predicting latencies.

The time of a stage is the maximum of its reads (weights, keys and values) and its arithmetic, plus the communication
of its ranks: an all-reduce over the tensor ranks after each layer's attention and MLP, a gather and a scatter of all
tokens for a MoE model under data parallelism, and a transfer to the next stage. Nothing overlaps, and the CPU is free.

Peaks are those of `gpus.py`, times the fraction reached on one H200: 4.3 of 4.8 TB/s copying, 788 of 989 TFLOP/s
multiplying 8192³ bf16 matrices. NCCL reaches 370 of NVLink's 450 GB/s (NVIDIA/nccl-tests#212). Latencies, the
network and the pipeline's balance are assumptions (constants below), not confirmed on a machine with two GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass

from trimtab_modelspec.facts import DTYPE_BYTES

from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.layout.memory_fit import rank_groups
from trimtab_operator.layout.stages import Stage, stages_of
from trimtab_operator.resource.spec import Parallelism

BANDWIDTH_REACHED = 4.3 / 4.8
FLOPS_REACHED = 788 / 989
LINK_REACHED = 370 / 450  # of a link's published rate
NVLINK_LATENCY_SECONDS = 15e-6  # assumed, of one small collective through NCCL
PCIE_LATENCY_SECONDS = 30e-6  # assumed
NETWORK_LATENCY_SECONDS = 40e-6  # assumed: between nodes, with RDMA
NETWORK_GIGABITS = 100.0  # assumed default, per GPU
PIPELINE_BALANCE = 0.85  # assumed: busy fraction of a stage; steps in flight are not equally long
ALL_REDUCES_PER_LAYER = 2
HIDDEN_STATES_PER_TRANSFER = 2  # hidden states and residual


@dataclass(frozen=True, slots=True)
class Link:
    """Connection between ranks: bytes per second that each rank sends, and latency in seconds."""

    bandwidth: float
    latency_seconds: float

    def ring_seconds(self, num_bytes: float, ranks: int, passes: int) -> float:
        """Return the seconds of a ring over `ranks`. Each pass sends (ranks - 1) / ranks of the bytes; an all-reduce
        has two passes, a gather or a scatter one.
        """
        if ranks == 1:
            return 0.0
        return self.latency_seconds + passes * (ranks - 1) / ranks * num_bytes / self.bandwidth


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """A GPU model and the network between nodes."""

    gpu: Gpu
    network_gigabits: float = NETWORK_GIGABITS
    """Per GPU and direction."""

    @property
    def in_node(self) -> Link:
        latency = NVLINK_LATENCY_SECONDS if self.gpu.link == "NVLink" else PCIE_LATENCY_SECONDS
        return Link(self.gpu.link_bandwidth * LINK_REACHED, latency)

    @property
    def across_nodes(self) -> Link:
        return Link(self.network_gigabits * 1e9 / 8 * LINK_REACHED, NETWORK_LATENCY_SECONDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCost:
    """Cost of one step. `seconds` is the time per output token; the other values are of the slowest stage."""

    seconds: float
    work_seconds: float
    """Reading or computing, whichever is longer."""
    exchange_seconds: float
    """All-reduces, gathers, scatters and the transfer to the next stage."""

    @property
    def exchange_share(self) -> float:
        return self.exchange_seconds / (self.work_seconds + self.exchange_seconds)


def tensor_stays_in_a_node(parallelism: Parallelism) -> bool:
    """Return True if each tensor group is within one pod. Ranks fill pods in order, with the tensor rank as the fastest
    index; a pod is never larger than a node.
    """
    return _per_pod(parallelism) % parallelism.tensor == 0


def decode_step(
    facts: ModelFacts,
    parallelism: Parallelism,
    hardware: Hardware,
    *,
    batch: int,
    context: float,
    kv_dtype_bytes: int | None = None,
) -> StepCost:
    """Return the cost of a decode step of `batch` requests with `context` tokens on average.

    The requests are divided over the steps in flight.
    """
    in_flight = _steps_in_flight(facts, parallelism)
    tokens = max(1.0, batch / in_flight)
    costs = [
        _stage_cost(facts, parallelism, hardware, stage, tokens, context, kv_dtype_bytes)
        for stage in stages_of(facts, parallelism)
    ]
    times = [work + exchange for work, exchange in costs]
    slowest = max(range(len(times)), key=times.__getitem__)
    filled = min(batch, in_flight)  # with fewer requests than stages, steps run one after another
    cycle = filled * times[slowest] / (PIPELINE_BALANCE if in_flight > 1 else 1)
    return StepCost(seconds=max(sum(times), cycle), work_seconds=costs[slowest][0], exchange_seconds=costs[slowest][1])


def prefill_seconds_per_token(
    facts: ModelFacts, parallelism: Parallelism, hardware: Hardware, *, chunk: int, context: float
) -> float:
    """Return the seconds per prompt token, in chunks of `chunk` tokens that attend to `context` tokens on average."""
    costs = [
        sum(_stage_cost(facts, parallelism, hardware, stage, chunk, context, None, is_prefill=True))
        for stage in stages_of(facts, parallelism)
    ]
    alone = _steps_in_flight(facts, parallelism) == 1
    return (sum(costs) if alone else max(costs) / PIPELINE_BALANCE) / chunk


def _steps_in_flight(facts: ModelFacts, parallelism: Parallelism) -> int:
    """Return the number of stages; 1 for engines in lockstep, which synchronise before each step."""
    return 1 if facts.is_moe and parallelism.data > 1 else parallelism.pipeline


def _stage_cost(
    facts: ModelFacts,
    parallelism: Parallelism,
    hardware: Hardware,
    stage: Stage,
    tokens: float,
    context: float,
    kv_dtype_bytes: int | None,
    *,
    is_prefill: bool = False,
) -> tuple[float, float]:
    """Return the seconds of work and of communication of one rank of a stage, for `tokens` tokens of its engine."""
    gpu, itemsize = hardware.gpu, DTYPE_BYTES[facts.dtype]
    shared_tokens = tokens * (parallelism.data if facts.is_moe else 1)
    chosen = facts.num_experts_per_token / facts.num_experts if facts.is_moe else 0.0
    groups = rank_groups(facts, stage, parallelism.tensor)
    kv_read = sum(group.num_elements * group.tokens_read(context) for group in groups) * (kv_dtype_bytes or itemsize)
    requests = 1 if is_prefill else tokens  # a chunk reads its request's keys and values once
    read = stage.read_bytes + (1 - (1 - chosen) ** shared_tokens) * stage.expert_bytes
    read += requests * kv_read
    weight_bytes = 1 if facts.quantization == "fp8" else itemsize
    flops = 2 * (tokens * stage.read_bytes + shared_tokens * chosen * stage.expert_bytes) / weight_bytes
    flops += 4 * tokens * context * stage.num_layers * facts.num_attention_heads * facts.head_size / parallelism.tensor
    rate = (gpu.fp8_flops if facts.quantization == "fp8" else None) or gpu.bf16_flops
    work = max(read / (gpu.bandwidth * BANDWIDTH_REACHED), flops / (rate * FLOPS_REACHED))
    return work, _exchange_seconds(facts, parallelism, hardware, stage, tokens)


def _exchange_seconds(
    facts: ModelFacts, parallelism: Parallelism, hardware: Hardware, stage: Stage, tokens: float
) -> float:
    tensor, data, itemsize = parallelism.tensor, parallelism.data, DTYPE_BYTES[facts.dtype]
    states = tokens * facts.hidden_size * itemsize
    link = hardware.in_node if tensor_stays_in_a_node(parallelism) else hardware.across_nodes
    all_reduces = ALL_REDUCES_PER_LAYER * stage.num_layers + stage.is_first  # and one for the embedding
    seconds = all_reduces * link.ring_seconds(states, tensor, passes=2)
    if facts.is_moe and data > 1:
        in_pod = _per_pod(parallelism) >= tensor * parallelism.pipeline * data
        wide = hardware.in_node if in_pod else hardware.across_nodes
        seconds += stage.num_mixture_layers * 2 * wide.ring_seconds(states * data, data, passes=1)
    if not stage.is_last:
        leaves_pod = (stage.index + 1) * tensor % _per_pod(parallelism) == 0
        hop = hardware.across_nodes if leaves_pod else hardware.in_node
        seconds += hop.latency_seconds + HIDDEN_STATES_PER_TRANSFER * states / hop.bandwidth
    return seconds


def _per_pod(parallelism: Parallelism) -> int:
    return parallelism.gpus_per_node or parallelism.tensor * parallelism.pipeline

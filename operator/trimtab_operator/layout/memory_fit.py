"""Estimated GPU memory of each rank of a layout, before anything runs.

Weights, keys and values are computed exactly (docs/reference/contract.md sections 5 and 6). The rest is measured by
the engine's ledger at run time; the estimates here are chosen on the large side:

- activations: the maximum of one layer's activations for `max_num_batched_tokens` tokens and of sampling
  `max_num_seqs` tokens, with a margin. For Llama-3-8B, 8192 tokens: 1.16 GiB here, 1.26 GiB in vLLM's log (vllm#10511).
- graphs, other (the CUDA context) and communicator: constants of the usual size.

All ranks get as many KV blocks as the rank with the least free memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from trimtab_modelspec.facts import DTYPE_BYTES
from trimtab_modelspec.kv_groups import KVGroup
from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_operator.layout.facts import GPU_VISION_ARCHITECTURES, ModelFacts
from trimtab_operator.layout.gpus import GIB, Gpu
from trimtab_operator.layout.stages import Stage, stages_of
from trimtab_operator.layout.stored_weights import as_loaded
from trimtab_operator.resource.live_parameters import live_parameters
from trimtab_operator.resource.spec import MODALITIES, Parallelism, Spec

MIB = 1 << 20
OTHER_BYTES = 600 * MIB  # the CUDA context with its modules: 0.5 GiB on an H100
GRAPHS_BYTES = 512 * MIB  # captured decode graphs; vLLM's logs say 0.1 to 0.9 GiB
COMMUNICATOR_BYTES = 512 * MIB  # NCCL's buffers, per kind of group that a rank is in
ACTIVATION_MARGIN = Fraction(5, 4)  # for memory that the allocator cannot reuse
HIDDEN_COPIES = 4  # of [tokens, hidden_size]: residual, normed input, a block's output, its sum over ranks
LOGITS_COPIES = 3  # of [max_num_seqs, vocab_size] in float32: logits, their sorted copy, probabilities
LOGITS_BYTES = 4

LARGE_GPU_BYTES = 70 * GIB  # from here on the engine starts with larger batches (docs/reference/contract.md section 1)
LARGE_GPU_TOKENS, SMALL_GPU_TOKENS = 8192, 2048
LARGE_GPU_SEQS, SMALL_GPU_SEQS = 1024, 256
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """Engine parameters that determine memory. The counts are caps, because start-up allocates for them."""

    gpu_memory_utilization: str = "0.9"
    max_model_len: int
    max_num_batched_tokens: int
    max_num_seqs: int
    block_size: int = DEFAULT_BLOCK_SIZE
    kv_dtype_bytes: int
    captures_graphs: bool = True
    quantization: str | None = None
    """Quantization applied when loading the weights; None if they stay as stored."""
    computes_images: bool = False
    """True if the first stage loads the vision encoder of a multimodal model."""

    @classmethod
    def of_spec(cls, spec: Spec, facts: ModelFacts, gpu: Gpu) -> Envelope:
        """Return the envelope of a spec on a GPU, with the engine's defaults for omitted fields."""
        engine = spec.engine
        _, seqs, tokens = live_parameters(spec)
        defaults = cls.default(facts, gpu)
        return cls(
            gpu_memory_utilization=engine.gpu_memory_utilization or defaults.gpu_memory_utilization,
            max_model_len=engine.max_model_len or facts.max_model_len,
            max_num_batched_tokens=int(tokens.cap or defaults.max_num_batched_tokens),
            max_num_seqs=int(seqs.cap or defaults.max_num_seqs),
            block_size=engine.block_size or defaults.block_size,
            kv_dtype_bytes=kv_dtype_bytes(engine.kv_cache_dtype, facts),
            captures_graphs=not engine.enforce_eager,
            quantization=engine.quantization,
            computes_images=_computes_images(spec, facts),
        )

    @classmethod
    def default(cls, facts: ModelFacts, gpu: Gpu) -> Envelope:
        is_large = gpu.memory_bytes >= LARGE_GPU_BYTES
        return cls(
            max_model_len=facts.max_model_len,
            max_num_batched_tokens=LARGE_GPU_TOKENS if is_large else SMALL_GPU_TOKENS,
            max_num_seqs=LARGE_GPU_SEQS if is_large else SMALL_GPU_SEQS,
            kv_dtype_bytes=kv_dtype_bytes(None, facts),
        )


def _computes_images(spec: Spec, facts: ModelFacts) -> bool:
    """Return True if the engine loads the vision encoder on a GPU: unless prompts allow no images and no videos.

    Trimtab's engine serves only the language model of models whose vision encoder is transformers' code.
    """
    limits = spec.engine.limit_mm_per_prompt or {}
    is_dropped = all(limits.get(modality) == 0 for modality in MODALITIES)
    return not is_dropped and (spec.runtime.kind == "vllm" or facts.architecture in GPU_VISION_ARCHITECTURES)


def kv_dtype_bytes(kv_cache_dtype: str | None, facts: ModelFacts) -> int:
    """Return the bytes of one element of the KV cache; None and auto mean the model's dtype."""
    if kv_cache_dtype is None or kv_cache_dtype == "auto":
        return DTYPE_BYTES[facts.dtype]
    return 1 if kv_cache_dtype.startswith("fp8") else DTYPE_BYTES[kv_cache_dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """Memory of the rank with the most weights in one stage."""

    stage: Stage
    formula: MemoryFormula

    @property
    def needed_bytes(self) -> int:
        """Required bytes, including the KV cache of one request of max_model_len."""
        return self.formula.fixed_bytes + self.one_request_bytes

    @property
    def one_request_bytes(self) -> int:
        return self.formula.blocks_per_request * self.formula.bytes_per_block


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFit:
    """Memory of the distinct stages of one layout on one GPU model."""

    ranks: tuple[RankMemory, ...]

    @property
    def tightest(self) -> RankMemory:
        """The rank with the fewest KV blocks; among ranks without any, the one with the largest deficit."""
        return min(self.ranks, key=lambda r: (r.formula.num_blocks, r.formula.requested_bytes - r.needed_bytes))

    @property
    def fits(self) -> bool:
        """True if one request of max_model_len can be served."""
        return self.tightest.formula.num_blocks >= self.tightest.formula.blocks_per_request

    @property
    def kv_tokens(self) -> int:
        """KV cache size of one engine in tokens. The keys and values of a token are distributed over all ranks."""
        return self.tightest.formula.num_tokens

    @property
    def max_concurrency(self) -> float:
        """Concurrent requests of max_model_len in one engine."""
        return self.tightest.formula.max_concurrency

    @property
    def weights_bytes(self) -> int:
        """Bytes of weights on the rank with the most."""
        return max(rank.formula.weights_bytes for rank in self.ranks)

    @property
    def min_utilization(self) -> str | None:
        """The lowest gpu_memory_utilization at which one request fits; None if none does."""
        needed = [rank.formula.min_utilization for rank in self.ranks]
        return None if None in needed else max((text for text in needed if text), key=float)

    @property
    def longest_model_len(self) -> int:
        """Length of the longest request that fits in the KV cache, in tokens; 0 if there is no free block."""
        formula = self.tightest.formula
        return formula.longest_model_len(formula.num_blocks)


def memory_fit(facts: ModelFacts, parallelism: Parallelism, gpu: Gpu, envelope: Envelope) -> MemoryFit:
    """Return the memory of each distinct stage of a valid layout."""
    facts = as_loaded(facts, gpu, envelope.quantization)
    unlike = {
        (s.weights_bytes + tower_bytes(facts, s, envelope), _kept(facts, s), s.is_last): s
        for s in reversed(stages_of(facts, parallelism))
    }
    ranks = []
    for stage in reversed(unlike.values()):
        ranks.append(RankMemory(stage=stage, formula=_formula(facts, parallelism, stage, gpu, envelope)))
    return MemoryFit(ranks=tuple(ranks))


def _kept(facts: ModelFacts, stage: Stage) -> tuple[int, ...]:
    """Return the number of layers of each KV group in a stage."""
    return tuple(group.num_layers for group in rank_groups(facts, stage, 1))


def _formula(facts: ModelFacts, parallelism: Parallelism, stage: Stage, gpu: Gpu, envelope: Envelope) -> MemoryFormula:
    return MemoryFormula(
        device_bytes=gpu.memory_bytes,
        gpu_memory_utilization=envelope.gpu_memory_utilization,
        other_bytes=OTHER_BYTES,
        weights_bytes=stage.weights_bytes + tower_bytes(facts, stage, envelope),
        activations_peak_bytes=activation_bytes(facts, parallelism, stage, envelope),
        workspace_bytes=0,
        graphs_bytes=GRAPHS_BYTES if envelope.captures_graphs else 0,
        communicator_bytes=COMMUNICATOR_BYTES * _kinds_of_groups(facts, parallelism),
        kv_groups=rank_groups(facts, stage, parallelism.tensor),
        kv_dtype_bytes=envelope.kv_dtype_bytes,
        block_size=envelope.block_size,
        max_model_len=envelope.max_model_len,
        max_num_batched_tokens=envelope.max_num_batched_tokens,
    )


def tower_bytes(facts: ModelFacts, stage: Stage, envelope: Envelope) -> int:
    """Return the bytes of the vision encoder on one rank of a stage, as if it were not divided over ranks."""
    return facts.tower_bytes if stage.is_first and envelope.computes_images else 0


def rank_groups(facts: ModelFacts, stage: Stage, tensor: int) -> tuple[KVGroup, ...]:
    """Return the KV groups of one rank of a stage."""
    return tuple(group.on_rank((stage.layers.start, stage.layers.stop), tensor) for group in facts.kv_groups)


def activation_bytes(facts: ModelFacts, parallelism: Parallelism, stage: Stage, envelope: Envelope) -> int:
    """Return the peak activation bytes of one step on one rank."""
    itemsize, tensor = DTYPE_BYTES[facts.dtype], parallelism.tensor
    tokens = envelope.max_num_batched_tokens
    heads = facts.num_attention_heads // tensor + 2 * max(1, facts.num_kv_heads // tensor)
    attention = 2 * heads * facts.head_size  # before and after the rotation
    mlp = 3 * facts.intermediate_size // tensor if facts.has_dense_layers else 0  # gate, up and their product
    widest = max(attention, mlp, _mixture_width(facts, parallelism) if stage.num_mixture_layers else 0)
    layer = tokens * (HIDDEN_COPIES * facts.hidden_size + widest) * itemsize
    sampling = envelope.max_num_seqs * facts.vocab_size * LOGITS_BYTES * LOGITS_COPIES if stage.is_last else 0
    return int(max(layer, sampling) * ACTIVATION_MARGIN)


def _mixture_width(facts: ModelFacts, parallelism: Parallelism) -> int:
    """Return the MoE elements per token of a data-parallel rank.

    The tokens of the whole group are gathered and summed. Each expert of a token has gate, up, product and output,
    which are divided over the tensor ranks.
    """
    gathered = 2 * facts.hidden_size * parallelism.data if parallelism.data > 1 else 0
    own = facts.num_experts_per_token * (3 * facts.moe_intermediate_size + facts.hidden_size)
    return gathered + own // parallelism.tensor


def _kinds_of_groups(facts: ModelFacts, parallelism: Parallelism) -> int:
    shares_experts = facts.is_moe and parallelism.data > 1
    return (parallelism.tensor > 1) + (parallelism.pipeline > 1) + shares_experts

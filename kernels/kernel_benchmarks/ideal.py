"""Ideal serving rate of a model: every weight and every cached key read once per step, or every FLOP at the device's
peak rate, whichever takes longer. Pure.
"""

import random
from dataclasses import dataclass
from typing import Any

BYTES = 2  # bf16, weights and KV cache


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A dense decoder; `tied`: the input embedding is also the output's, so that it is read in every step."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    qk_norm: bool

    @property
    def matmul_params(self) -> int:
        """Weights of the GEMMs that process every token."""
        attention = self.hidden * self.head_size * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden

    @property
    def kv_bytes_per_token(self) -> int:
        return 2 * self.layers * self.kv_heads * self.head_size * BYTES

    def config(self, max_len: int) -> dict[str, Any]:
        """Return the model's config.json."""
        return {
            "architectures": ["Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "vocab_size": self.vocabulary,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "max_position_embeddings": max_len,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": self.tied,
            "eos_token_id": 2,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
        }


LLAMA_8B = ModelShape("llama-3.1-8b", 32, 4096, 14336, 32, 8, 128, 128256, False, False)
QWEN3_06B = ModelShape("qwen3-0.6b", 28, 1024, 3072, 16, 8, 128, 151936, True, True)
QWEN3_8B = ModelShape("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, False, True)


def step_seconds(shape: ModelShape, batch: int, cached_tokens: int, *, bandwidth: float, flops: float) -> float:
    """Return the seconds of one decode step of `batch` sequences with `cached_tokens` in total. bandwidth in
    bytes/s.
    """
    read = shape.matmul_params * BYTES + cached_tokens * shape.kv_bytes_per_token
    return max(read / bandwidth, 2 * shape.matmul_params * batch / flops)


def prefill_seconds(shape: ModelShape, prompt: int, *, flops: float) -> float:
    """Return the seconds of a prompt's GEMMs and its causal attention."""
    attention = 2 * shape.layers * shape.heads * shape.head_size * prompt
    return prompt * (2 * shape.matmul_params + attention) / flops


def nano_vllm_workload() -> list[tuple[list[int], int]]:
    """Return nano-vllm's bench.py workload: 256 prompts and their output lengths, drawn in its order with seed 0."""
    dice = random.Random(0)
    prompts = [[dice.randint(0, 10000) for _ in range(dice.randint(100, 1024))] for _ in range(256)]
    return [(prompt, count) for prompt, count in zip(prompts, [dice.randint(100, 1024) for _ in prompts], strict=True)]


def workload_seconds(
    shape: ModelShape, workload: list[tuple[list[int], int]], *, bandwidth: float, flops: float
) -> float:
    """Return the seconds of a workload: all sequences decode at once, each until its end, after their prompts."""
    seconds = sum(prefill_seconds(shape, len(prompt), flops=flops) for prompt, _ in workload)
    for step in range(1, max(count for _, count in workload) + 1):
        cached = [len(prompt) + step for prompt, count in workload if count >= step]
        seconds += step_seconds(shape, len(cached), sum(cached), bandwidth=bandwidth, flops=flops)
    return seconds

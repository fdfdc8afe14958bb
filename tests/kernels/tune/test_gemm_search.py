"""The GEMM shapes of a model, and the search space of their configurations."""

import pytest
from trimtab_kernels.launch.device_facts import H200
from trimtab_kernels.tune.gemm_search import Shape, search_space, shapes_of, shuffle_configs

LLAMA_8B = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
DEEPSEEK_V3 = {
    "hidden_size": 7168, "num_attention_heads": 128, "intermediate_size": 18432, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_shared_experts": 1, "moe_intermediate_size": 2048,
}  # fmt: skip


def test_shapes_are_read_from_model_config() -> None:
    assert shapes_of(LLAMA_8B) == [Shape(6144, 4096), Shape(4096, 4096), Shape(28672, 4096), Shape(4096, 14336)]
    assert shapes_of(LLAMA_8B, 8)[0] == Shape(768, 4096)
    assert shapes_of(LLAMA_8B, 16)[0] == Shape((32 + 2 * 16) * 128 // 16, 4096), "kv heads are repeated beyond 8 ranks"
    assert shapes_of(DEEPSEEK_V3, 8) == [
        Shape(2112, 7168), Shape(3072, 1536), Shape(4096, 512), Shape(7168, 2048),
        Shape(4608, 7168), Shape(7168, 2304), Shape(512, 7168), Shape(7168, 256),
    ]  # fmt: skip


@pytest.mark.parametrize("num_tokens", [1, 64, 4096])
def test_search_space_is_pruned_and_contains_default(num_tokens: int) -> None:
    space = search_space(num_tokens, Shape(4096, 4096), H200)
    assert 50 < len(space) < 1280, "fewer than the plain grid"
    assert len(set(space)) == len(space)
    assert all(config.operand_bytes <= H200.shared_bytes and 128 % config.block_k == 0 for config in space)
    assert num_tokens > 1 or all(config.block_m <= 32 for config in space)


def test_shuffled_search_starts_with_default_and_samples_all() -> None:
    space = search_space(1024, Shape(4096, 4096), H200)
    order = shuffle_configs(space)
    assert order[0] == space[0]
    assert sorted(order, key=space.index) == space
    assert len({config.block_m for config in order[:20]}) > 2
    assert order == shuffle_configs(space), "a resumed run finds compiled configurations"

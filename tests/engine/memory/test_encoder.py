"""Device memory of images and videos, estimated in advance."""

from dataclasses import replace

import pytest
from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.vision import FixedResolution, TileLayout, VisionConfig, VisionWindows
from trimtab_engine.memory.encoder import EncoderLimits, kept_bytes, tower_peak_bytes

VISION = VisionConfig(
    hidden_size=10,
    intermediate_size=8,
    num_layers=1,
    num_heads=1,
    num_channels=3,
    patch_size=2,
    frames_per_patch=1,
    merge_size=2,
    output_size=7,
    windows=VisionWindows(size=4, whole_layers=frozenset(), tokens_per_second=1),
)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "max_model_len", "tokens"),
    [
        (2048, 1024, 2048),  # a step's worth
        (2048, 8192, 8191),  # an image that leaves room for a token of output
        (2048, 131_072, 16_384),  # the largest image
        (32_768, 131_072, 32_768),
    ],
)
def test_a_step_s_worth_and_the_largest_image_are_kept(
    max_num_batched_tokens: int, max_model_len: int, tokens: int
) -> None:
    config = EngineConfig(
        model="m", max_num_batched_tokens=max_num_batched_tokens, max_num_batched_tokens_cap=max_num_batched_tokens
    )
    assert EncoderLimits.of(config, max_model_len) == EncoderLimits(tokens, tokens)


def test_configured_encoder_limits_bound_items() -> None:
    config = EngineConfig(model="m", encoder_cache_size=300, max_num_encoder_input_tokens=100)
    limits = EncoderLimits.of(config, 4096)
    assert limits == EncoderLimits(num_kept_tokens=300, step_budget=100)
    assert limits.num_bytes(VISION, 2) == kept_bytes(VISION, 300, 2) + tower_peak_bytes(VISION, 100, 2)


def test_a_tower_of_tiles_computes_one_tile_at_a_time() -> None:
    tiled = replace(VISION, windows=None, tiles=TileLayout(size=12, projector_size=4, rope_theta=1e4))
    limits = EncoderLimits(num_kept_tokens=1000, step_budget=500)
    assert limits.num_bytes(tiled, 2) == kept_bytes(tiled, 1000, 2) + tower_peak_bytes(tiled, 9, 2)


def test_encoder_memory_counts_embeddings_and_patches() -> None:
    assert kept_bytes(VISION, 100, 2) == 100 * 7 * 2
    patches = 100 * 4 * (12 * 10 * 4 + 2 * 12 * 4)  # 4 a token, in float32
    assert tower_peak_bytes(VISION, 100, 2) == patches + 100 * 7 * 4


def test_a_projector_of_two_products_has_three_rows_of_embeddings() -> None:
    fixed_resolution = FixedResolution(size=12, num_tokens=9, transformers_config="{}")
    tower = replace(VISION, windows=None, fixed_resolution=fixed_resolution)
    wider = replace(tower, output_size=tower.output_size + 1000)
    assert tower_peak_bytes(wider, 9, 2) - tower_peak_bytes(tower, 9, 2) == 3 * 9 * 1000 * 4

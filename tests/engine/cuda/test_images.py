"""Images and videos on a GPU: the tokens of transformers on the CPU, eager and with graphs. Skipped without a GPU."""

from pathlib import Path
from typing import Any

import engine_builders
import pytest
import tiled_model
import torch
from engine_benchmarks.parity import Reference
from tiled_model import a_tile
from trimtab_engine.core.engine import Engine
from vision_model import CONFIG, VisionPrompt, a_prompt, an_item, reference_of, save, the_reference
from vision_runs import NUM_TOKENS, Run, defects

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
WIDE = CONFIG | {
    "text_config": CONFIG["text_config"]
    | {
        "hidden_size": 64,
        "rope_parameters": {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [2, 3, 3]},
    },
    "vision_config": CONFIG["vision_config"] | {"hidden_size": 64, "intermediate_size": 72, "out_hidden_size": 64},
}
"""Heads of 16, as narrow as matrix instructions take them."""
WIDE_TILES = tiled_model.CONFIG | {
    "text_config": tiled_model.CONFIG["text_config"] | {"hidden_size": 64, "head_dim": 16, "intermediate_size": 32},
    "vision_config": tiled_model.CONFIG["vision_config"] | {"hidden_size": 32, "intermediate_size": 128},
}
A_PICTURE = an_item((1, 10, 6), seed=3)
# Seconds are whole: of others, releases of transformers before ours make other positions.
PROMPTS: dict[str, VisionPrompt] = {
    "one image": a_prompt(4, an_item((1, 8, 8), seed=1), 5),
    "three interleaved": a_prompt(A_PICTURE, 2, an_item((1, 4, 6), seed=1), 1, an_item((1, 2, 8), seed=4), 3),
    "a video": a_prompt(3, an_item((4, 4, 6), kind="video", seed=5, seconds=1.0), 6),
    "one image twice": a_prompt(1, A_PICTURE, 1, A_PICTURE, 2),
    "no image": a_prompt(20),
}
OF_TILES: dict[str, VisionPrompt] = {
    "one tile": a_prompt(4, a_tile(1), 5),
    "two tiles and the whole": a_prompt(3, a_tile(2), 1, a_tile(3), 2, a_tile(4), 3),
    "two pictures": a_prompt(a_tile(5), 2, a_tile(1), 3),
    "no image": a_prompt(20),
}


@pytest.fixture(scope="module")
def reference() -> Any:
    return the_reference(WIDE)


@pytest.fixture(scope="module")
def expected(reference: Any) -> dict[str, Reference]:
    return {name: reference_of(reference, prompt, NUM_TOKENS) for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def reference_of_tiles() -> Any:
    return tiled_model.the_reference(WIDE_TILES)


@pytest.fixture(scope="module")
def expected_of_tiles(reference_of_tiles: Any) -> dict[str, Reference]:
    given = tiled_model.what_transformers_gets
    return {name: reference_of(reference_of_tiles, prompt, NUM_TOKENS, given) for name, prompt in OF_TILES.items()}


def an_engine(reference: Any, folder: Path, **changes: Any) -> Engine:
    values: dict[str, Any] = engine_builders.ON_A_GPU | {
        "num_gpu_blocks_override": 200,
        "limit_mm_per_prompt": {"image": 4, "video": 1},
    }
    return engine_builders.an_engine(Path(save(reference, folder)), **values | changes)


WAYS = pytest.mark.parametrize(
    "changes",
    [
        {"enforce_eager": True},
        {"async_scheduling": True},
        {"async_scheduling": True, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
    ],
    ids=["eager", "overlapping", "overlapping chunks"],
)


@WAYS
def test_tokens_are_those_of_transformers_and_nothing_is_compiled(
    changes: dict[str, Any], reference: Any, expected: dict[str, Reference], tmp_path: Path
) -> None:
    run = served_twice(an_engine(reference, tmp_path, **changes), PROMPTS, expected)
    assert ("images" in run.num_eager) == ("enforce_eager" not in changes)


@WAYS
def test_tokens_of_tiles_are_too(
    changes: dict[str, Any], reference_of_tiles: Any, expected_of_tiles: dict[str, Reference], tmp_path: Path
) -> None:
    """Llama 4's, whose text half sees chunks of positions that begin and end within tiles."""
    limits = {"limit_mm_per_prompt": {"image": 4}}
    run = served_twice(an_engine(reference_of_tiles, tmp_path, **limits | changes), OF_TILES, expected_of_tiles)
    assert ("images" in run.num_eager) == ("enforce_eager" not in changes)


def served_twice(engine: Engine, prompts: dict[str, VisionPrompt], expected: dict[str, Reference]) -> Run:
    """All prompts together, and again with what is kept of them; then the engine is closed."""
    run = Run(engine)
    for _ in range(2):
        run.add(prompts)
        assert defects(run.to_the_end().tokens, expected) == []
    assert run.num_compiled == 0
    engine.close()
    return run


def test_largest_image_memory_equals_the_measurement(reference: Any, tmp_path: Path) -> None:
    """As a picture of 12.8 megapixels would be, in the patches of this tower: 16,384 tokens, without its scores."""
    limits = {"max_num_encoder_input_tokens": 16_384, "encoder_cache_size": 16_384}
    few = an_engine(reference, tmp_path, max_num_encoder_input_tokens=64, encoder_cache_size=16_384)
    small = few.ledger().kinds["activations_peak"]
    few.close()
    many = an_engine(reference, tmp_path, **limits)
    assert 50 << 20 < many.ledger().kinds["activations_peak"] - small < 1 << 30
    many.close()

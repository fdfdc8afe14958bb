"""Qwen2.5-VL's vision encoder and positions equal transformers', on a tiny random checkpoint with every branch of
the vision encoder.
"""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.errors import ModelError
from trimtab_engine.models.checkpoint import check_vision_encoder
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.qwen2_5_vl_vision import parse_vision, vision_encoder_tensors
from trimtab_engine.models.qwen2_5_vl_vision_encoder import VisionEncoder
from trimtab_engine.models.registry import open_vision_encoder, parse_model_config
from trimtab_engine.multimodal.items import MultiModalItem
from trimtab_engine.multimodal.positions import RopePositions
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.registry import language_model_config
from vision_model import (
    CONFIG,
    MERGE_SIZE,
    ROW_SIZE,
    TOKENS_PER_SECOND,
    a_prompt,
    an_item,
    save,
    the_reference,
    what_transformers_gets,
)

SAID = CONFIG | {"architectures": ["Qwen2_5_VLForConditionalGeneration"]}


@pytest.fixture(scope="module")
def reference() -> Any:
    return the_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(reference, tmp_path_factory.mktemp("qwen2.5-vl"))


def the_vision(said: dict[str, Any]) -> VisionConfig:
    text = parse_model_config(said, {}, "config.json")
    return parse_vision(ConfigReader(language_model_config(said), {}, "config.json"), text)


@pytest.mark.parametrize(
    "grid",
    [
        (1, 2, 2),  # one token
        (1, 8, 8),  # whole windows
        (1, 10, 6),  # windows that are cut at both edges
        (3, 4, 14),  # a video
    ],
)
@torch.inference_mode()
def test_the_tower_makes_the_embeddings_of_transformers(
    grid: tuple[int, int, int], reference: Any, checkpoint: str
) -> None:
    load = Loader(open_vision_encoder(checkpoint), torch.float32, torch.device("cpu"), lambda count: None)
    tower = VisionEncoder(the_vision(SAID), load)
    rows = torch.randn(grid[0] * grid[1] * grid[2], ROW_SIZE, generator=torch.Generator().manual_seed(1))
    expected = reference.model.visual(rows, grid_thw=torch.tensor([grid])).pooler_output
    made = tower(rows, grid)
    assert made.shape == expected.shape
    assert (made - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_checkpoint_holds_exactly_the_tensors_of_its_tower(checkpoint: str) -> None:
    shapes = {name: tensor.shape for name, tensor in vision_encoder_tensors(the_vision(SAID)).items()}
    check_vision_encoder(shapes, open_vision_encoder(checkpoint))
    name, shape = shapes.popitem()
    with pytest.raises(ModelError, match=f"1 unused tensors, first {name}"):
        check_vision_encoder(shapes, open_vision_encoder(checkpoint))
    with pytest.raises(ModelError, match=f"tensor {name} is .*, config.json implies"):
        check_vision_encoder(shapes | {name: (*shape, 1)}, open_vision_encoder(checkpoint))
    with pytest.raises(ModelError, match=r"lack 1 tensors, first blocks\.9"):
        check_vision_encoder(shapes | {name: shape, "blocks.9": (1,)}, open_vision_encoder(checkpoint))


def test_facts_tell_what_the_tower_takes(checkpoint: str, tmp_path: Path) -> None:
    shapes = open_vision_encoder(checkpoint).shapes()
    assert model_facts(checkpoint)["tower_bytes"] == 4 * sum(math.prod(shape) for shape in shapes.values())
    (tmp_path / "config.json").write_text(json.dumps(SAID | {"vision_config": {"hidden_act": "gelu"}}))
    assert "tower_bytes" not in model_facts(str(tmp_path), load_format="dummy"), "one that is not supported"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"out_hidden_size": 64}, "out_hidden_size is 64, the language model's hidden_size 32"),
        ({"num_heads": 5}, "heads of 24 / 5"),
        ({"window_size": 7}, "windows of 7 pixels"),
        ({"depth": "three"}, "depth is 'three'"),
        ({"depth": 10**9}, "depth is 1000000000; vision encoders of at most 1000 layers"),
    ],
)
def test_a_tower_of_another_kind_is_refused_and_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        the_vision(SAID | {"vision_config": CONFIG["vision_config"] | words})


def test_images_need_to_know_which_frequencies_turn_by_which_position() -> None:
    text = CONFIG["text_config"]
    for rope in ({"rope_type": "default"}, {"rope_type": "default", "mrope_section": [1, 3]}):
        with pytest.raises(ModelError, match=r"mrope_section is .*; images need 3 numbers whose sum is 4"):
            the_vision(SAID | {"text_config": text | {"rope_parameters": rope}})


@pytest.mark.parametrize(
    "parts",
    [
        (3, an_item((1, 4, 6)), 5),
        (an_item((1, 10, 2)), 1, an_item((1, 2, 8)), 2, an_item((1, 4, 4))),
        (2, an_item((4, 4, 6), kind="video", seconds=0.5), 3),
        (2, an_item((5, 2, 2), kind="video", seconds=1.7), 1, an_item((1, 4, 4)), 4),
        (2, an_item((6, 2, 2), kind="video")),
    ],
)
def test_positions_over_time_height_and_width_are_those_of_transformers(
    parts: tuple[int | MultiModalItem, ...], reference: Any
) -> None:
    prompt = a_prompt(*parts)
    longer = a_prompt(*parts, 6)
    positions, _ = reference.model.get_rope_index(torch.tensor([longer.token_ids]), **what_transformers_gets(longer))
    expected = positions[:, 0].tolist()
    count = len(prompt.token_ids)
    own = RopePositions.of(prompt.spans, count, merge_size=MERGE_SIZE, tokens_per_second=TOKENS_PER_SECOND)
    assert [axis[:count] for axis in expected] == list(own.prompt)
    for start, end in ((0, count), (count - 2, count + 2), (count, count + 6), (count + 5, count + 6)):
        assert [axis[start:end] for axis in expected] == list(own.between(start, end))

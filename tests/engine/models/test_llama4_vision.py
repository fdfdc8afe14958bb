"""Llama 4's vision encoder equals transformers', on a tiny random checkpoint with every branch of it."""

import math
from typing import Any

import pytest
import torch
from tiled_model import CONFIG, a_tile, pixels, the_reference
from trimtab_engine.config.vision import VisionConfig
from trimtab_engine.errors import ModelError
from trimtab_engine.models.checkpoint import check_vision_encoder
from trimtab_engine.models.facts import model_facts
from trimtab_engine.models.llama4_vision import parse_vision, vision_encoder_tensors
from trimtab_engine.models.llama4_vision_encoder import Llama4VisionEncoder
from trimtab_engine.models.loading import Loader
from trimtab_engine.models.registry import open_vision_encoder, parse_model_config, takes_images
from trimtab_engine.multimodal.patches import as_float32
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families.registry import language_model_config
from vision_model import save

SAID = CONFIG | {"architectures": ["Llama4ForConditionalGeneration"]}


@pytest.fixture(scope="module")
def reference() -> Any:
    return the_reference()


@pytest.fixture(scope="module")
def checkpoint(reference: Any, tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(reference, tmp_path_factory.mktemp("llama4"))


def the_vision(said: dict[str, Any]) -> VisionConfig:
    text = parse_model_config(said, {}, "config.json")
    return parse_vision(ConfigReader(language_model_config(said), {}, "config.json"), text)


@torch.inference_mode()
def test_the_tower_makes_the_embeddings_of_transformers(reference: Any, checkpoint: str) -> None:
    tower = Llama4VisionEncoder(
        the_vision(SAID),
        Loader(open_vision_encoder(checkpoint), torch.float32, torch.device("cpu"), lambda count: None),
    )
    for seed in range(2):
        tile = a_tile(seed)
        assert tile.patches is not None
        features = reference.get_image_features(pixels(tile)[None]).last_hidden_state
        expected = reference.multi_modal_projector(features)[0]
        made = tower(torch.from_numpy(as_float32(tile.patches)), tile.grid)
        assert made.shape == expected.shape == (tile.num_tokens, 32)
        assert (made - expected).abs().max() <= 1e-5 * expected.abs().max()


def test_a_checkpoint_holds_exactly_the_tensors_of_its_tower(checkpoint: str) -> None:
    source = open_vision_encoder(checkpoint)
    check_vision_encoder(
        {name: tensor.shape for name, tensor in vision_encoder_tensors(the_vision(SAID)).items()}, source
    )
    assert model_facts(checkpoint)["tower_bytes"] == 4 * sum(math.prod(shape) for shape in source.shapes().values())
    assert takes_images(checkpoint)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act 'silu' is not supported"),
        ({"pixel_shuffle_ratio": 0.25}, "pixel_shuffle_ratio 0.25 is not supported"),
        ({"projector_input_dim": 24}, "must be the same; they are 24, 20 and 20"),
        ({"intermediate_size": 48}, "intermediate_size is 48; the adapter reads 2 x 2 patches of 16, which is 64"),
        ({"image_size": 20}, "image_size 20 must be a multiple of 2 x patch_size 4"),
        ({"num_attention_heads": 3}, "heads of 16 / 3 one of 4"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; vision encoders of at most 1000 layers"),
    ],
)
def test_a_tower_of_another_kind_is_refused_and_named(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        the_vision(SAID | {"vision_config": CONFIG["vision_config"] | words})

"""A rank's adapters, where the engine as a whole does not show them."""

import pytest
import torch
from trimtab_engine.config.adapters import AdapterConfig
from trimtab_engine.errors import NotSupportedError
from trimtab_engine.layers.adapted import AdaptedLinear, AdaptedPart
from trimtab_engine.layers.linear import Linear
from trimtab_engine.models.registry import parse_model_config
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.runner.adapters import AdapterSlots

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 97,
    "max_position_embeddings": 32,
}


def test_adapters_on_transformers_model_are_rejected() -> None:
    """Transformers' modules are not registered for adapters while the model loads."""
    shard = shard_model(parse_model_config(CONFIG, {}, "config.json"), Layout(), 0)
    slots = AdapterSlots(AdapterConfig(), {}, shard, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(NotSupportedError, match="--enable-lora is not supported for OlmoForCausalLM"):
        slots.open("OlmoForCausalLM")


def test_the_largest_that_is_loaded_is_rehearsed() -> None:
    shard = shard_model(parse_model_config(CONFIG, {}, "config.json"), Layout(), 0)
    slots = AdapterSlots(AdapterConfig(), {}, shard, dtype=torch.float32, device=torch.device("cpu"))
    first, second = (slots.take(Linear(torch.zeros(4, 4)), [AdaptedPart(name)], [4]) for name in ("first", "second"))
    for slot, projection, rank in ((0, first, 2), (1, first, 1), (1, second, 2)):
        assert isinstance(projection, AdaptedLinear)
        projection.reserve_slot(slot, rank, torch.empty(0))
    profiling_adapter = slots.profiling_adapter()
    assert profiling_adapter is not None
    assert profiling_adapter.slot == 1


def test_without_anything_loaded_and_without_room_nothing_is_rehearsed() -> None:
    shard = shard_model(parse_model_config(CONFIG, {}, "config.json"), Layout(), 0)
    slots = AdapterSlots(AdapterConfig(), {}, shard, dtype=torch.float32, device=torch.device("cpu"))
    assert slots.profiling_adapter() is None

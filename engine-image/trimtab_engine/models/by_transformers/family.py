"""Fallback family for all architectures that transformers can run as a causal language model. Everything about such a
model (the KV cache of its layers, if it can run at all) is found by a trial run (trial.py). Importing this needs
neither torch nor transformers; reading a configuration does.
"""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trimtab_modelspec.config import ModelConfig, RopeConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.kv_groups import LayerKV
from trimtab_modelspec.tensors import Tensors

from trimtab_engine.errors import ModelError
from trimtab_engine.models.by_transformers import vision as transformers_vision
from trimtab_engine.models.family import Family, Model

if TYPE_CHECKING:
    from trimtab_engine.models.by_transformers.trial import Found
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroups
    from trimtab_engine.parallel.shard import ModelShard


def parse(words: ConfigReader) -> ModelConfig:
    """Model configuration found by the trial run. Fields that only Trimtab's own families read keep their defaults."""
    from trimtab_engine.models.by_transformers.trial import Refused, try_out

    name = str(words.architecture)
    if words.config.get("quantization_config"):
        raise ModelError(
            f"{words.where}: quantization_config is not supported for {name}, which transformers' own code runs; use a "
            f"checkpoint with its weights as they are"
        )
    text = json.dumps(words.config, sort_keys=True)
    found = try_out(text)
    if isinstance(found, Refused):
        reason = transformers_vision.why_not(name, words.config) or found.reason
        raise ModelError(f"{words.where}: architecture {name} is not supported: {reason}")
    each = found.layers[0]
    return ModelConfig(
        architecture=name,
        hidden_size=found.hidden_size,
        intermediate_size=found.intermediate_size,
        num_layers=len(found.layers),
        num_attention_heads=found.num_attention_heads,
        num_kv_heads=each.num_kv_heads,
        head_size=each.key_size,
        vocab_size=found.vocab_size,
        max_model_len=found.max_model_len,
        rms_norm_eps=0.0,
        rope=RopeConfig(),
        tie_word_embeddings=found.is_tied,
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        moe=None,
        dtype=words.dtype(),
        eos_token_ids=words.eos_token_ids(),
        transformers_config=text,
        division=found.division,
    )


def _found(config: ModelConfig) -> "Found":
    """Result of the trial run when the configuration was read."""
    from trimtab_engine.models.by_transformers.trial import Found, try_out

    assert config.transformers_config is not None
    found = try_out(config.transformers_config)
    assert isinstance(found, Found)
    return found


def tensors(config: ModelConfig) -> Tensors:
    """The tensors of the model itself. In a checkpoint some may have other names, or be stored in parts."""
    return _found(config).tensors


def kv(config: ModelConfig) -> Sequence[LayerKV]:
    """Attention parameters of each layer."""
    return _found(config).layers


def build(config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model:
    """Build transformers' model, or a rank's part of it, with Trimtab's attention."""
    from trimtab_engine.models.by_transformers.model import load_model

    return load_model(config, _found(config), load, shard, groups)


FAMILY = Family(
    architectures=(),
    parse=parse,
    tensors=tensors,
    build=build,
    kv=kv,
    not_on_cuda="transformers' own code computes it, which the steps of CUDA have not been tried with",
    renames_tensors=True,
)
"""The fallback family has no architectures of its own; see registry.family_of."""

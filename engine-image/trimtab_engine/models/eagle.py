"""EAGLE draft head (arXiv:2401.15077) of Llama layers: embedding and hidden state concatenated, one projection that
joins both rows, and layers of which the first does not normalise its input. Its output goes to the target's output
layer unchanged. EAGLE-3, which reads several layers of the target, is another head.
"""

import re
from dataclasses import replace

import torch
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.families import llama
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.kv_groups import KVLayerIndex
from trimtab_modelspec.tensors import StoredTensor, attention_tensors, mlp_tensors

from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.layers.quantized import Projection
from trimtab_engine.models.decoder import Decoder, DecoderLayer
from trimtab_engine.models.draft_head import DraftHead, HeadKind
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.groups import SINGLE_RANK
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.weights.language_model_weights import Half
from trimtab_engine.weights.source import WeightSource

ARCHITECTURES = ("LlamaForCausalLM", "EagleLlamaForCausalLM", "LlamaForCausalLMEagle")
"""Architecture names of EAGLE heads."""
OF_TARGET = re.compile(r"(model\.)?(embed_tokens|lm_head)\.weight$")
"""Copies of the target's, which many heads bring."""


def parse(source: WeightSource, target: ModelConfig) -> ModelConfig:
    """Raises ConfigError where it was made for another model."""
    words = ConfigReader(source.config, {}, source.where)
    if words.architecture not in ARCHITECTURES:
        raise NotSupportedError(
            f"{source.where}: a head of {words.architecture} is not supported; supported are those of "
            f"{ARCHITECTURES[0]}"
        )
    config = llama.parse(words)
    for name in ("hidden_size", "vocab_size"):
        own, wanted = getattr(config, name), getattr(target, name)
        if own != wanted:
            raise ConfigError(f"{source.where}: the head's {name} is {own}, the model's {wanted}; it is another's head")
    return replace(config, has_join_bias="fc.bias" in _plain_names(source))


def tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """All of one rank."""
    hidden = config.hidden_size
    norm = StoredTensor((hidden,), "replicated")
    found = {"model.fc.weight": StoredTensor((hidden, 2 * hidden), "replicated")}
    if config.has_join_bias:
        found["model.fc.bias"] = norm
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}."
        if layer:
            found[prefix + "input_layernorm.weight"] = norm
        found[prefix + "post_attention_layernorm.weight"] = norm
        found |= attention_tensors(config, prefix + "self_attn.") | mlp_tensors(config, prefix + "mlp.")
    return found


def own_tensors(source: WeightSource, config: ModelConfig) -> WeightSource:
    """The head's own tensors, without the target's; names begin like a whole model's."""
    return Half(source, {f"model.{plain}": stored for plain, stored in _plain_names(source).items()})


def _plain_names(source: WeightSource) -> dict[str, str]:
    return {name.removeprefix("model."): name for name in source.shapes() if not OF_TARGET.match(name)}


class EagleLayer(DecoderLayer):
    """The first layer has no norm before its first half."""

    @staticmethod
    def load_input_norm(config: ModelConfig, layer: int, load: Loader) -> torch.Tensor | None:
        """None for the first."""
        return DecoderLayer.load_input_norm(config, layer, load) if layer else None


class EagleJoin:
    """A product of both rows side by side."""

    def __init__(self, projection: Projection) -> None:
        self._projection = projection

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See Join."""
        return self._projection(torch.cat([embedded, before], dim=-1))


def build(config: ModelConfig, load: Loader, target: Decoder) -> DraftHead:
    """The head on the target's device."""
    shard = shard_model(config, Layout(), 0)
    layers = [EagleLayer(config, n, KVLayerIndex(0, n), shard, SINGLE_RANK, load) for n in range(config.num_layers)]
    join = load.joined("model.", {"fc": (0, config.hidden_size)}, has_bias=config.has_join_bias)
    return DraftHead(config, target, layers, EagleJoin(join), target.logits_of, load.device)


EAGLE = HeadKind(parse=parse, source=own_tensors, tensors=tensors, kv=decoder_kv, build=build)

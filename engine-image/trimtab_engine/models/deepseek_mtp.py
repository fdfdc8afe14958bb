"""Multi-token prediction layer of DeepSeek-V3's checkpoint (arXiv:2412.19437, section 2.2): norms of the embedding and
of the hidden state, one projection that joins both rows, a layer like the model's last ones, and its own norm and
output layer. Applied repeatedly to its own output it drafts any number of tokens.
"""

from dataclasses import replace

import torch
from trimtab_kernels.rms_norm import rms_norm
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.families import deepseek
from trimtab_modelspec.kv_groups import KVLayerIndex, LayerKV
from trimtab_modelspec.tensors import StoredTensor

from trimtab_engine.errors import NotSupportedError
from trimtab_engine.layers.quantized import Projection
from trimtab_engine.layers.vocabulary import LmHead
from trimtab_engine.models.decoder import Decoder
from trimtab_engine.models.deepseek_layer import DeepseekLayer
from trimtab_engine.models.draft_head import DraftHead, HeadKind
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.groups import SINGLE_RANK
from trimtab_engine.parallel.ranks import Layout
from trimtab_engine.parallel.shard import shard_model
from trimtab_engine.weights.language_model_weights import Half
from trimtab_engine.weights.source import WeightSource


def parse(source: WeightSource, target: ModelConfig) -> ModelConfig:
    """The target's configuration; the head is the layer after the target's last one."""
    if target.architecture not in deepseek.FAMILY.architectures:
        raise NotSupportedError(
            f"{source.where}: layers of {target.architecture} that predict further tokens are not supported; "
            f"supported are "
            f"those of {', '.join(deepseek.FAMILY.architectures)}"
        )
    if target.num_draft_layers != 1:
        raise NotSupportedError(
            f"{source.where}: num_nextn_predict_layers is {target.num_draft_layers}; 1 such layer is built"
        )
    return target


def own_tensors(source: WeightSource, config: ModelConfig) -> WeightSource:
    """The prediction layer, without its copy of the embeddings."""
    prefix = _prefix(config)
    names = [name for name in source.shapes() if name.startswith(prefix) and ".embed_tokens." not in name]
    return Half(source, {name: name for name in names})


def tensors(config: ModelConfig) -> dict[str, StoredTensor]:
    """All of one rank."""
    hidden, prefix = config.hidden_size, _prefix(config)
    norm = StoredTensor((hidden,), "replicated")
    return deepseek.layer_tensors(config, config.num_layers) | {
        prefix + "enorm.weight": norm,
        prefix + "hnorm.weight": norm,
        prefix + "eh_proj.weight": StoredTensor((hidden, 2 * hidden), "replicated"),
        prefix + "shared_head.norm.weight": norm,
        prefix + "shared_head.head.weight": StoredTensor((config.vocab_size, hidden), "lm_head"),
    }


def latent_kv(config: ModelConfig) -> list[LayerKV]:
    """Tensors of one layer, like those of the layers before it."""
    return deepseek.latent_kv(replace(config, num_layers=1))


def _prefix(config: ModelConfig) -> str:
    return f"model.layers.{config.num_layers}."


class MtpJoin:
    """Project both rows, each after a norm. The first position's embedding is zero, as in training."""

    def __init__(self, projection: Projection, embedding: torch.Tensor, hidden: torch.Tensor, eps: float) -> None:
        self._projection, self._embedding, self._hidden, self._eps = projection, embedding, hidden, eps

    def __call__(self, embedded: torch.Tensor, before: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """See Join."""
        embedded = embedded.masked_fill((positions == 0).unsqueeze(1), 0.0)
        parts = [rms_norm(embedded, self._embedding, self._eps), rms_norm(before, self._hidden, self._eps)]
        return self._projection(torch.cat(parts, dim=-1))


def build(config: ModelConfig, load: Loader, target: Decoder) -> DraftHead:
    """The head on the target's device."""
    prefix, eps = _prefix(config), config.rms_norm_eps
    layer = DeepseekLayer(
        config, config.num_layers, KVLayerIndex(0, 0), shard_model(config, Layout(), 0), SINGLE_RANK, load
    )
    join = MtpJoin(
        load.joined(prefix, {"eh_proj": (0, config.hidden_size)}),
        load.copy(prefix + "enorm.weight"),
        load.copy(prefix + "hnorm.weight"),
        eps,
    )
    norm = load.copy(prefix + "shared_head.norm.weight")
    head = LmHead(load(prefix + "shared_head.head.weight"), config.vocab_size, None)

    def to_logits(hidden: torch.Tensor) -> torch.Tensor:
        logits = head(rms_norm(hidden, norm, eps))
        assert logits is not None  # one rank has all of it
        return logits.float()

    return DraftHead(config, target, [layer], join, to_logits, load.device)


DEEPSEEK_MTP = HeadKind(parse=parse, source=own_tensors, tensors=tensors, kv=latent_kv, build=build)

"""Model computed by transformers' code: its weights are read with transformers' own renaming and merging, a step has
all tokens of all requests in a row, and attention is Trimtab's. With several tensor-parallel ranks each has its part of
the model (division.py).
"""

import json
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import transformers
from trimtab_kernels.paged_attention import AttentionMetadata
from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.kv_groups import groups_of, kv_layer_indices

from trimtab_engine.device.kv_cache import KVTensors
from trimtab_engine.errors import ModelError, NotSupportedError
from trimtab_engine.layers.moe import MixtureOfExperts
from trimtab_engine.layers.vocabulary import Placed
from trimtab_engine.models.by_transformers.attention import IMPLEMENTATION, STEP, Step
from trimtab_engine.models.by_transformers.division import HeadShare, divide, plan_of
from trimtab_engine.models.by_transformers.halves import Halves
from trimtab_engine.models.by_transformers.reading import read_part, read_whole
from trimtab_engine.models.by_transformers.self_test import is_too_far, largest_difference
from trimtab_engine.models.by_transformers.trial import Found, class_of, configuration
from trimtab_engine.models.loading import Loader
from trimtab_engine.parallel.groups import RankGroups
from trimtab_engine.parallel.shard import ModelShard

logger = logging.getLogger("trimtab_engine.core")


class TransformersModel:
    """The whole model, or one tensor-parallel rank's part of it."""

    is_compiled = False
    mixtures: Sequence[MixtureOfExperts] = ()
    """Its experts are transformers', which stay where they are."""

    def __init__(self, halves: Halves, found: Found, *, pads_rows: bool, share: HeadShare | None) -> None:
        """`share`: this rank's heads; None if it is the only rank."""
        self._halves, self._share = halves, share
        self.pads_rows = pads_rows
        groups, whole = groups_of(found.layers), (0, len(found.layers))
        places = kv_layer_indices(groups, whole)
        num_ranks = 1 if share is None else share.ranks.size
        self._groups = [group.on_rank(whole, num_ranks) for group in groups]
        modules = [halves.modules[name] for name in found.modules]
        self._places = dict(zip(modules, places, strict=True))

    def rehearse(self, architecture: str, dtype: torch.dtype) -> None:
        """Compare it with itself by transformers' own attention. Raises NotSupportedError where that is another
        model.
        """
        difference = largest_difference(self._halves, self._places, self._groups, dtype, self._share)
        if is_too_far(difference, dtype):
            raise NotSupportedError(
                f"{architecture}: transformers' code computes different results for several requests together and "
                f"for each request by itself (hidden states differ by {difference:.1e}); this model is not supported"
            )

    def forward(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
        *,
        num_layers: int | None = None,
        placed: Placed | None = None,
    ) -> torch.Tensor:
        """See Model. The hidden states are those after the last norm."""
        return self.compute(token_ids, positions, kv_cache, metadata, before=None, num_layers=num_layers, placed=placed)

    def receive(self, hidden: torch.Tensor) -> None:
        """See Model: there is no stage before."""

    def send(self, hidden: torch.Tensor) -> None:
        """See Model: there is no next stage."""

    def compute(
        self,
        token_ids: torch.Tensor,
        positions: torch.Tensor,
        kv_cache: KVTensors,
        metadata: Sequence[AttentionMetadata],
        *,
        before: torch.Tensor | None,
        num_layers: int | None = None,
        placed: Placed | None = None,
    ) -> torch.Tensor:
        """See Model. All layers run even if `num_layers` limits the KV cache: this is for profiling, where all layers
        can write to the same memory.
        """
        assert before is None
        places = self._places
        if num_layers is not None:
            places = {module: replace(place, index=0) for module, place in places.items()}
        step = Step(places, kv_cache, metadata, self._share)
        return self._halves.hidden(token_ids, positions, placed=placed, **{STEP: step})

    def logits(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor | None:
        """See Model."""
        logits = self._halves.logits(hidden[rows])
        return logits if self._share is None or self._share.ranks.index == 0 else None

    def normalised_rows(self, hidden: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See Model: the hidden states are already normalised."""
        return hidden[rows]


def load_model(
    config: ModelConfig, found: Found, load: Loader, shard: ModelShard, groups: RankGroups
) -> TransformersModel:
    """Read the weights, or only this rank's part of them.

    Raises:
        ModelError: the checkpoint lacks weights or has other shapes.
    """
    if load.is_quantized:
        raise NotSupportedError(
            f"--quantization is not supported for {config.architecture}, which transformers' own code runs; leave it "
            f"out"
        )
    version = transformers.__version__
    logger.info(
        "%s has no native implementation: transformers %s computes it, which is slower",
        config.architecture,
        version,
    )
    halves = Halves(_read(config, found, load, groups))
    # Row sizes are few where oneDNN compiles code for each: on the CPU, but for float32.
    pads_rows = load.device.type == "cpu" and load.dtype != torch.float32
    model = TransformersModel(halves, found, pads_rows=pads_rows, share=_share(found, shard, groups))
    with groups.meter.apart():
        model.rehearse(config.architecture, load.dtype)
    return model


def _share(found: Found, shard: ModelShard, groups: RankGroups) -> HeadShare | None:
    if groups.tensor is None:
        return None
    return HeadShare(slice(*shard.heads), slice(*shard.kv_heads), found.num_attention_heads, groups.tensor)


def _read(config: ModelConfig, found: Found, load: Loader, groups: RankGroups) -> Any:
    model_class, ranks = class_of(config.architecture), groups.tensor
    assert config.transformers_config is not None
    words = configuration(model_class, json.loads(config.transformers_config), IMPLEMENTATION)
    if ranks is None:
        whole, missing, extra = read_whole(model_class, words, load)
    else:
        group = ranks
        whole, missing, extra = read_part(
            model_class, words, load, lambda built: divide(built, plan_of(built, found.heads), group)
        )
    if missing:
        raise ModelError(f"{load.where}: the weights lack {len(missing)} tensors, first {missing[0]}")
    if extra:
        logger.warning(
            "the weights hold %d tensors that transformers' %s does not use, first %s",
            len(extra),
            config.architecture,
            extra[0],
        )
    return whole

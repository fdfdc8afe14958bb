"""Llama 4, text (Meta 2025): three layers whose tokens see their own chunk of positions for each that sees all and
knows no positions; experts chosen by sigmoids beside one that every token passes, in all layers or every other one.
Its tower is in llama4_vision.py.
"""

from typing import TYPE_CHECKING

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.families import llama4

from trimtab_engine.models.family import Family, Model, TowerKind
from trimtab_engine.models.llama4_vision import build_tower, parse_vision, tower_tensors

if TYPE_CHECKING:
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroups
    from trimtab_engine.parallel.shard import ModelShard


def build(config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model:
    """A decoder of layers of its own."""
    from trimtab_engine.models.decoder import Decoder
    from trimtab_engine.models.llama4_layer import Llama4Layer

    return Decoder(config, load, shard, groups, layer_type=Llama4Layer)


FAMILY = Family.of(
    llama4.FAMILY,
    tower=TowerKind(parse_vision, tower_tensors, build_tower, modalities=("image",)),
    build=build,
)

"""Llama 4, text (Meta 2025): three layers with chunked attention and rope per layer with full attention and no rope
(NoPE); experts chosen by sigmoids in addition to one shared expert, in all layers or every other one. Its vision
encoder is in llama4_vision.py.
"""

from typing import TYPE_CHECKING

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.families import llama4

from trimtab_engine.models.family import Family, Model, VisionEncoderFamily
from trimtab_engine.models.llama4_vision import build_vision_encoder, parse_vision, vision_encoder_tensors

if TYPE_CHECKING:
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroups
    from trimtab_engine.parallel.shard import ModelShard


def build(config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model:
    """A decoder of Llama 4 layers."""
    from trimtab_engine.models.decoder import Decoder
    from trimtab_engine.models.llama4_layer import Llama4Layer

    return Decoder(config, load, shard, groups, layer_type=Llama4Layer)


FAMILY = Family.of(
    llama4.FAMILY,
    tower=VisionEncoderFamily(parse_vision, vision_encoder_tensors, build_vision_encoder, modalities=("image",)),
    build=build,
)

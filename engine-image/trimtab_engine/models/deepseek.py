"""DeepSeek-V3 and R1 (arXiv:2412.19437): one latent vector per token and layer for all heads, experts chosen by
sigmoids within the best groups in addition to shared experts, and dense first layers. deepseek_mtp.py has the
multi-token prediction layer.
"""

from typing import TYPE_CHECKING

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.families import deepseek

from trimtab_engine.models.family import Family, Model

if TYPE_CHECKING:
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroups
    from trimtab_engine.parallel.shard import ModelShard


def build(config: ModelConfig, load: "Loader", shard: "ModelShard", groups: "RankGroups") -> Model:
    """A decoder of layers of latent attention."""
    from trimtab_engine.models.decoder import Decoder
    from trimtab_engine.models.deepseek_layer import DeepseekLayer

    return Decoder(config, load, shard, groups, layer_type=DeepseekLayer, kv=deepseek.latent_kv(config))


FAMILY = Family.of(
    deepseek.FAMILY,
    build=build,
)

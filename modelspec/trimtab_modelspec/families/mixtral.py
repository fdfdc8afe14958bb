"""Mixtral (Jiang et al. 2024, arXiv:2401.04088): Mistral with an MoE in every layer. Facts only."""

from trimtab_modelspec.config import ModelConfig, MoeConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.errors import ModelError
from trimtab_modelspec.families.decoder import decoder_kv
from trimtab_modelspec.families.family import ModelFamily
from trimtab_modelspec.tensors import decoder_tensors


def parse(words: ConfigReader) -> ModelConfig:
    """Return the configuration. `sliding_window` is ignored: no published Mixtral uses one."""
    num_experts, per_token = words.positive("num_local_experts"), words.positive("num_experts_per_tok")
    if per_token > num_experts:
        raise ModelError(f"{words.where}: num_experts_per_tok {per_token} is above num_local_experts {num_experts}")
    moe = MoeConfig(
        num_experts=num_experts,
        num_experts_per_token=per_token,
        intermediate_size=words.positive("intermediate_size"),
        renormalize=True,
        dense_layers=frozenset(),
    )
    return words.decoder(moe=moe)


FAMILY = ModelFamily(architectures=("MixtralForCausalLM",), parse=parse, tensors=decoder_tensors, kv=decoder_kv)

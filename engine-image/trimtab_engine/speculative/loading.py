"""Creation of the configured proposer: loads the draft model, measures its memory, and assigns its part of the KV
cache.
"""

from dataclasses import dataclass, replace

import msgspec
from trimtab_modelspec.kv_groups import KVGroup
from trimtab_modelspec.memory_formula import MemoryFormula

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.speculation import FLAG
from trimtab_engine.device.device import Device
from trimtab_engine.device.kv_cache import KVLayers
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.models.deepseek_mtp import DEEPSEEK_MTP
from trimtab_engine.models.eagle import EAGLE
from trimtab_engine.runner.head_runner import HeadRunner
from trimtab_engine.runner.loading import load_model_runner
from trimtab_engine.runner.model_runner import ModelFacts, ModelRunner
from trimtab_engine.runner.weights import Weights, WeightsUnavailable
from trimtab_engine.speculative.draft_model import DraftModel
from trimtab_engine.speculative.head_proposer import HeadProposer
from trimtab_engine.speculative.ngram import NgramProposer
from trimtab_engine.speculative.proposer import Proposer

HEADS = {"eagle": EAGLE, "mtp": DEEPSEEK_MTP, "deepseek_mtp": DEEPSEEK_MTP}
"""Draft heads by speculative method. To add one, add a file in models/ and a line here."""
PROBABILITY_BYTES = 4  # a draft's distribution is kept in float32 until it is verified


@dataclass(frozen=True, slots=True)
class Speculation:
    """Speculation at start-up. `draft` runs a draft model or a draft head; None for n-grams. With several ranks a draft
    model runs unsharded on the engine core's rank: a draft is a sequence of small steps, in which collectives would
    cost more than sharding saves.
    """

    draft: ModelRunner | HeadRunner | None

    @classmethod
    def load(cls, config: EngineConfig, device: Device, runner: ModelRunner) -> "Speculation | None":
        """Read the draft weights, if any.

        Raises:
            ConfigError: the draft model does not fit the target.
        """
        speculative = config.speculative
        if speculative is None:
            return None
        if speculative.method == "ngram":
            return cls(None)
        target = runner.facts
        if speculative.reads_hidden_states:
            _check_one_block_table(config.model, target.kv_groups)
            _check_alone(config, target)
            kind = HEADS[speculative.method]
            return cls(HeadRunner.load(speculative.model or config.model, kind, config, runner, device))
        assert speculative.model is not None  # the configuration was checked
        own = msgspec.structs.replace(
            config,
            model=speculative.model,
            quantization=None,  # as its checkpoint has them
            max_model_len="auto",  # its own configuration; its KV cache has the target's length
            pipeline_layer_partition=None,
            eplb=None,
            limit_mm_per_prompt={},  # it reads text tokens only
            adapters=None,  # drafts ignore adapters, which lowers the acceptance rate only
            load_format="dummy" if config.load_format == "dummy" else "auto",
        )
        draft = load_model_runner(ModelRunner, own, device, lambda stage, percent: None)
        for name, groups in ((config.model, target.kv_groups), (speculative.model, draft.facts.kv_groups)):
            _check_one_block_table(name, groups)
        if draft.facts.vocab_size != target.vocab_size:
            raise ConfigError(
                f"{FLAG}: the draft model {speculative.model} has {draft.facts.vocab_size} tokens, the model "
                f"{config.model} {target.vocab_size}; their vocabularies must be one"
            )
        return cls(draft)

    def weights(self, target: ModelRunner) -> Weights:
        """Objects that are released and restored when the engine sleeps at level 2 and wakes up."""
        return target if self.draft is None else _BothWeights(target, self.draft)

    @property
    def kv_layers(self) -> KVLayers | None:
        """Return the KV cache layers of the draft model."""
        return None if self.draft is None else self.draft.kv_layers

    def measure(self, config: EngineConfig, formula: MemoryFormula) -> MemoryFormula:
        """Extend the memory formula by the draft's weights, activations, distributions and KV cache."""
        if self.draft is None:
            return formula
        peak = self.draft.profile(config.max_num_batched_tokens_cap, config.max_num_seqs_cap)
        num_drafts = config.max_num_sampled_rows - config.max_num_seqs_cap
        layers = self.draft.kv_layers
        return replace(
            formula,
            weights_bytes=formula.weights_bytes + self.draft.weights_bytes,
            activations_peak_bytes=formula.activations_peak_bytes + peak,
            workspace_bytes=formula.workspace_bytes
            + self.draft.kv_rounding_bytes
            + self.draft.kept_row_bytes * config.max_num_seqs_cap
            + num_drafts * self.draft.vocab_size * PROBABILITY_BYTES,
            draft_kv_bytes_per_token=layers.num_regions * layers.bytes_per_token,
        )

    def proposer(self, config: EngineConfig, target: ModelRunner) -> Proposer:
        """Create the proposer, once the target's KV cache is allocated."""
        assert config.speculative is not None
        if self.draft is None:
            return NgramProposer(config.speculative)
        self.draft.use_draft_layers_of(target.kv_cache)
        if isinstance(self.draft, HeadRunner):
            return HeadProposer(self.draft, target)
        return DraftModel(
            self.draft,
            max_tokens_per_step=config.max_num_batched_tokens_cap,
            eos_token_ids=target.facts.eos_token_ids,
        )


def _check_one_block_table(model: str, groups: tuple[KVGroup, ...]) -> None:
    """Raise NotSupportedError for layers that do not all see alike."""
    if len(groups) > 1 or groups[0].each.window is not None:
        raise NotSupportedError(
            f"{FLAG}: the draft model uses the target's block table, but {model} has layers with a "
            f"window, which is not supported; use the method ngram"
        )


def _check_alone(config: EngineConfig, target: ModelFacts) -> None:
    """Raise NotSupportedError where other cores compute parts of the model."""
    if config.data_parallel_size > 1 and target.whole.moe is not None:
        raise NotSupportedError(
            f"{FLAG}: a draft head with an MoE model over --data-parallel-size "
            f"{config.data_parallel_size} is not supported; use ngram or draft_model, or one core"
        )


class _BothWeights:
    """The target's layers, followed by the draft's: they sleep and wake up together."""

    def __init__(self, *runners: Weights) -> None:
        self._runners = runners
        self.can_drop_weights = all(runner.can_drop_weights for runner in runners)

    def drop_weights(self) -> None:
        for runner in self._runners:
            runner.drop_weights()

    def reload_weights(self) -> None:
        read: list[Weights] = []
        try:
            for runner in self._runners:
                runner.reload_weights()
                read.append(runner)
        except WeightsUnavailable:
            for runner in read:
                runner.drop_weights()
            raise

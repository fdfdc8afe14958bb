"""The proposer that the configuration asks for; what drafts is loaded, measured, given its part of the KV cache."""

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
from trimtab_engine.runner.weights import Weights
from trimtab_engine.speculative.draft_model import DraftModel
from trimtab_engine.speculative.head_proposer import HeadProposer
from trimtab_engine.speculative.ngram import NgramProposer
from trimtab_engine.speculative.proposer import Proposer

HEADS = {"eagle": EAGLE, "mtp": DEEPSEEK_MTP, "deepseek_mtp": DEEPSEEK_MTP}
"""The heads that draft, by the method that asks for them. Adding one is a file in models/ and a line here."""
PROBABILITY_BYTES = 4  # a draft's distribution is kept in float32 until it is verified


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation brings to start-up. `draft` runs a draft model, or a head that drafts; None with n-grams. Beside
    several ranks a draft model is whole on the engine core's: a draft is one small step after another, so collectives
    in each would cost more than dividing it saves."""

    draft: ModelRunner | HeadRunner | None

    @classmethod
    def load(cls, config: EngineConfig, device: Device, runner: ModelRunner) -> "Speculation | None":
        """Read the weights of what drafts, if there are some. Raises ConfigError where it does not fit the target."""
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
            max_model_len="auto",  # its own; what it is given of the KV cache has the target's length
            pipeline_layer_partition=None,
            eplb=None,
            limit_mm_per_prompt={},  # it reads the tokens alone
            adapters=None,  # drafts are the model's own: what an adapter changes they may guess wrong
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
        """What goes and comes back when the engine sleeps at level 2 and wakes up."""
        return target if self.draft is None else _BothWeights(target, self.draft)

    @property
    def kv_layers(self) -> KVLayers | None:
        """What drafts need of the KV cache."""
        return None if self.draft is None else self.draft.kv_layers

    def measure(self, config: EngineConfig, formula: MemoryFormula) -> MemoryFormula:
        """The formula with what drafts take: weights, activations, the distributions of drafts, KV."""
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
        """With the target's KV cache in place."""
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
            f"{FLAG}: what drafts keeps its tokens under the target's block table, but {model} has layers that see a "
            f"window, which is not supported; use the method ngram"
        )


def _check_alone(config: EngineConfig, target: ModelFacts) -> None:
    """Raise NotSupportedError where other cores compute parts of the model."""
    if config.data_parallel_size > 1 and target.whole.moe is not None:
        raise NotSupportedError(
            f"{FLAG}: a head that drafts beside a mixture of experts over --data-parallel-size "
            f"{config.data_parallel_size} is not supported; use ngram or draft_model, or one core"
        )


class _BothWeights:
    """The target's, and behind them those of what drafts: they sleep and wake up together."""

    def __init__(self, *runners: Weights) -> None:
        self._runners = runners
        self.can_drop_weights = all(runner.can_drop_weights for runner in runners)

    def drop_weights(self) -> None:
        for runner in self._runners:
            runner.drop_weights()

    def reload_weights(self) -> None:
        for runner in self._runners:
            runner.reload_weights()

"""Tasks of an engine, generation or pooling: --runner and --pooler-config as typed values.

Names are vLLM's; other values are rejected as not supported. No tensors: the API server's process reads it as well.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from trimtab_engine.config.json_flags import convert_fields, read_json_object
from trimtab_engine.errors import ConfigError, NotSupportedError
from trimtab_engine.scheduling.pooling import Pooling, PoolingMethod

FLAG = "--pooler-config"
Runner = Literal["auto", "generate", "pooling"]
METHODS: dict[str, PoolingMethod] = {"LAST": "last", "MEAN": "mean"}
"""Supported methods by vLLM's names."""
NO_CLS = (
    "the first token of a decoder attends to no other one, so its hidden state has no information on the "
    "prompt; models that pool it have bidirectional attention, and such encoders are not supported"
)
NOT_SUPPORTED_REASONS = {
    "CLS": NO_CLS,
    "ALL": "vectors of all tokens are not given; one of the whole prompt is",
    "STEP": "models that reward steps are not served",
    "RANK": "models that rank are not served",
}
"""Reasons why vLLM's other methods are not supported."""
SAME = {"seq_pooling_type": "pooling_type", "use_activation": "normalize"}
"""Other names that vLLM has for a field."""
EXAMPLE = '{"pooling_type": "MEAN", "normalize": false}'


class PoolerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Pooling defaults of requests. None means as the checkpoint."""

    pooling_type: Literal["LAST", "MEAN"] | None = None
    normalize: bool | None = None
    dimensions: int | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None and self.dimensions < 1:
            raise ConfigError(f"{FLAG}: dimensions is {self.dimensions}; it must be 1 or more")


def parse_pooler_json(text: str) -> PoolerConfig:
    """Return the value of --pooler-config. Raises ConfigError, NotSupportedError for what vLLM has and we do not."""
    values = read_json_object(FLAG, text, EXAMPLE)
    fields: dict[str, Any] = {}
    for name, value in values.items():
        field = SAME.get(name, name)
        if fields.get(field, value) != value:
            raise ConfigError(f"{FLAG}: {field} is given twice with different values; give one")
        fields[field] = value
    unknown = sorted(fields.keys() - {field.name for field in msgspec.structs.fields(PoolerConfig)})
    if unknown:
        known = ", ".join(field.name for field in msgspec.structs.fields(PoolerConfig))
        raise NotSupportedError(f"{FLAG}: {unknown[0]} is not supported; its fields are {known}")
    if isinstance(fields.get("pooling_type"), str):
        fields["pooling_type"] = fields["pooling_type"].upper()
        check_is_built(fields["pooling_type"], FLAG)
    return convert_fields(FLAG, fields, PoolerConfig)


def check_is_built(method: str, where: str) -> None:
    """Check that a method, by vLLM's name, is supported. `where` names its source in the error.

    Raises:
        NotSupportedError: With the reason.
    """
    if method not in METHODS:
        reason = f": {NOT_SUPPORTED_REASONS[method]}" if method in NOT_SUPPORTED_REASONS else ""
        raise NotSupportedError(
            f"{where}: pooling type {method[:40]} is not supported{reason}; supported are {', '.join(METHODS)}, "
            f"which {FLAG} "
            f"chooses"
        )


class Pooler(msgspec.Struct, frozen=True):
    """Pooling defaults of this engine. `hidden_size`: number of available dimensions."""

    method: PoolingMethod
    normalize: bool
    dimensions: int | None
    """None means all dimensions."""
    hidden_size: int

    def pooling(self, *, dimensions: int | None = None, normalize: bool | None = None) -> Pooling:
        """Return the pooling parameters of one prompt."""
        cut = self.dimensions if dimensions is None else dimensions
        return Pooling(self.method, cut, self.normalize if normalize is None else normalize)


class Tasks(msgspec.Struct, frozen=True):
    """Supported tasks: the pooler, or the reason for clients why a task is not supported."""

    pooler: Pooler
    no_pooling: str = ""
    no_generation: str = ""


GENERATE_ONLY = Tasks(Pooler("last", normalize=True, dimensions=None, hidden_size=0), "prompts are not pooled here")
"""Default of an engine core that reports no tasks."""


class CheckpointPooling(msgspec.Struct, frozen=True):
    """Pooling settings of a checkpoint. `where` names their file; None without one."""

    method: str = "LAST"
    """Method by vLLM's name."""
    normalize: bool = True
    where: str | None = None


def tasks_of(
    runner: Runner, config: PoolerConfig, said: CheckpointPooling, hidden_size: int, *, has_output_layer: bool
) -> Tasks:
    """Return the engine's tasks.

    Raises:
        ConfigError: If no requested task is possible.
        NotSupportedError: If the method is not supported.
    """
    if runner == "generate" and not has_output_layer:
        raise ConfigError(
            "--runner generate: the checkpoint has no output layer, so it gives hidden states and no tokens; leave the "
            "flag out, or use --runner pooling"
        )
    method = config.pooling_type or said.method
    only_pools = runner == "pooling" or not has_output_layer or (runner == "auto" and said.where is not None)
    if only_pools:
        check_is_built(method, FLAG if config.pooling_type else said.where or FLAG)
    if config.dimensions is not None and config.dimensions > hidden_size:
        raise ConfigError(f"{FLAG}: dimensions is {config.dimensions}; the model has {hidden_size}")
    normalize = said.normalize if config.normalize is None else config.normalize
    pooler = Pooler(METHODS.get(method, "last"), normalize, config.dimensions, hidden_size)
    no_pooling = "this engine was started with --runner generate" if runner == "generate" else ""
    return Tasks(pooler, no_pooling, _no_generation(runner, said, has_output_layer) if only_pools else "")


def _no_generation(runner: Runner, said: CheckpointPooling, has_output_layer: bool) -> str:
    if runner == "pooling":
        return "this engine was started with --runner pooling: it embeds, at /v1/embeddings"
    if not has_output_layer:
        return "this model has no output layer: it embeds, at /v1/embeddings"
    return "this engine serves embeddings at /v1/embeddings, by its checkpoint; to generate, use --runner generate"


def sentence_transformers_method(words: Mapping[str, Any], where: str) -> str:
    """Return the method in a Pooling module's config.json, by vLLM's name if it has one.

    Raises:
        NotSupportedError: For several methods at once, and if instructions are excluded.
    """
    named = words.get("pooling_mode")
    modes = [named] if isinstance(named, str) else list(named) if isinstance(named, list) else []
    modes += [
        name.removeprefix("pooling_mode_") for name, on in words.items() if on is True and "pooling_mode_" in name
    ]
    names = {_METHOD_NAMES.get(str(mode).removesuffix("_tokens").removesuffix("_token"), str(mode)) for mode in modes}
    if len(names) != 1:
        raise NotSupportedError(
            f"{where}: names {len(names)} pooling modes; one is built, such as pooling_mode_lasttoken"
        )
    if words.get("include_prompt") is False:
        raise NotSupportedError(f"{where}: include_prompt false is not supported: all tokens of a prompt are pooled")
    return names.pop()


_METHOD_NAMES = {"cls": "CLS", "mean": "MEAN", "lasttoken": "LAST", "last": "LAST"}
"""sentence-transformers' mode names without their common suffix."""

"""--speculative-config as a typed value, with vLLM's names and defaults; other values are rejected as not supported. No
tensors: the API server's process reads it as well.
"""

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from trimtab_engine.config.json_flags import convert_fields, read_json_object
from trimtab_engine.errors import ConfigError, NotSupportedError

FLAG = "--speculative-config"
METHODS = ("ngram", "draft_model", "eagle", "mtp")
METHODS_NOT_BUILT = (
    "custom_class", "dflash", "dspark", "eagle3", "extract_hidden_states", "medusa", "mlp_speculator", "ngram_gpu",
    "suffix",
)  # fmt: skip
SAME_AS_MTP = ("deepseek_mtp",)
"""Names that vLLM knows for layers of a family's own checkpoint, where that family's are built."""
MAX_SPECULATIVE_TOKENS = 128  # vLLM's
MAX_LOOKUP_TOKENS = 1024  # longer n-grams do not help, and each of their tokens costs one scan of the text
DEFAULT_LOOKUP_TOKENS = 5  # vLLM's, for both ends
IGNORED_FIELDS: dict[str, tuple[object, ...]] = {
    "draft_tensor_parallel_size": (None, 1),
    "enforce_eager": (None, True),
    "quantization": (None,),
    "rejection_sample_method": (None, "standard", "strict"),
}
"""Further fields of vLLM's, and the values that match the built-in behavior."""


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Draft settings. `num_speculative_tokens` is the initial live depth and its cap."""

    method: Literal["ngram", "draft_model", "eagle", "mtp"]
    num_speculative_tokens: int
    model: str | None = None
    """draft_model: folder or .gguf file of the draft model; eagle: folder of the head."""
    prompt_lookup_min: int = DEFAULT_LOOKUP_TOKENS
    """ngram: shortest end of the text that is looked up in it."""
    prompt_lookup_max: int = DEFAULT_LOOKUP_TOKENS
    """ngram: longest one, tried first."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_speculative_tokens <= MAX_SPECULATIVE_TOKENS:
            raise ConfigError(
                f"{FLAG}: num_speculative_tokens is {self.num_speculative_tokens}; it must be 1 to "
                f"{MAX_SPECULATIVE_TOKENS}, and 3 to 5 are usual"
            )
        if self.method == "draft_model" and not self.model:
            raise ConfigError(f"{FLAG}: method draft_model needs model, the path of a smaller model of one vocabulary")
        if self.method == "eagle" and not self.model:
            raise ConfigError(f"{FLAG}: method eagle needs model, the folder of a head that was trained for this model")
        if self.method in ("ngram", "mtp") and self.model:
            raise ConfigError(f"{FLAG}: method {self.method} takes no model, but model is {self.model}; leave it out")
        if not 1 <= self.prompt_lookup_min <= self.prompt_lookup_max <= MAX_LOOKUP_TOKENS:
            raise ConfigError(
                f"{FLAG}: prompt_lookup_min {self.prompt_lookup_min} and prompt_lookup_max {self.prompt_lookup_max} "
                f"must be 1 to {MAX_LOOKUP_TOKENS}, the first not above the second"
            )

    @property
    def reads_hidden_states(self) -> bool:
        """True if drafts use the model's hidden states."""
        return self.method in ("eagle", "mtp")


def parse_speculative_json(text: str) -> dict[str, Any]:
    """Return the JSON object of --speculative-config. Raises ConfigError."""
    return read_json_object(FLAG, text, _EXAMPLE)


def speculative_config(values: Mapping[str, Any]) -> SpeculativeConfig:
    """Judge the fields of --speculative-config. Raises ConfigError, NotSupportedError for what vLLM has and we do
    not.
    """
    fields = {name: value for name, value in values.items() if value is not None}
    for name, harmless in IGNORED_FIELDS.items():
        if fields.pop(name, None) not in harmless:
            raise NotSupportedError(f"{FLAG}: {name} {values[name]!r} is not supported; leave it out")
    unknown = sorted(fields.keys() - {field.name for field in msgspec.structs.fields(SpeculativeConfig)})
    if unknown:
        raise NotSupportedError(f"{FLAG}: {unknown[0]} is not supported; its fields are {', '.join(_FIELDS)}")
    fields["method"] = _method(fields.get("method"), fields.get("model"))
    if fields["method"] == "ngram" and fields.get("model") == "ngram":
        del fields["model"]
    _fill_lookup(fields)
    if fields["method"] == "mtp":
        fields.setdefault("num_speculative_tokens", 1)  # vLLM's: as many as there are such layers
    if "num_speculative_tokens" not in fields:
        raise ConfigError(f"{FLAG}: num_speculative_tokens is missing; 3 to 5 are usual")
    return convert_fields(FLAG, fields, SpeculativeConfig)


def _method(method: object, model: object) -> str:
    """Return the method; vLLM derives it from the model if none is given."""
    if method is None:
        if model is None:
            raise ConfigError(f"{FLAG}: method is missing; it is one of {', '.join(METHODS)}")
        return "ngram" if model == "ngram" else "draft_model"
    if method in METHODS:
        return str(method)
    if method in SAME_AS_MTP:
        return "mtp"
    if method in METHODS_NOT_BUILT or str(method).endswith("_mtp"):
        raise NotSupportedError(f"{FLAG}: method {method} is not supported; supported are {', '.join(METHODS)}")
    raise ConfigError(f"{FLAG}: there is no method {str(method)[:40]!r}; supported are {', '.join(METHODS)}")


def _fill_lookup(fields: dict[str, Any]) -> None:
    """Set both n-gram lengths if only one is given."""
    low, high = fields.get("prompt_lookup_min"), fields.get("prompt_lookup_max")
    if low is None and high is not None:
        fields["prompt_lookup_min"] = high
    if high is None and low is not None:
        fields["prompt_lookup_max"] = low


_FIELDS = [field.name for field in msgspec.structs.fields(SpeculativeConfig)]
_EXAMPLE = '{"method": "ngram", "num_speculative_tokens": 4}'

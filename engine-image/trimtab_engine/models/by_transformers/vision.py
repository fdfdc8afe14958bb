"""Vision-language checkpoints whose vision encoder is computed by transformers' code, with one of Trimtab's language
models: supported architectures, the configuration of both halves, and the vision encoder's facts. These encoders take
fixed-resolution images (multimodal/fixed_resolution.py). Importing this needs neither torch nor transformers; reading
the facts does.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.tensors import Tensors

from trimtab_engine.config.vision import FixedResolution, VisionConfig, fixed_resolution_of
from trimtab_engine.errors import ModelError
from trimtab_engine.models.family import VisionEncoderFamily
from trimtab_engine.multimodal.fixed_resolution import side_of, square_of

if TYPE_CHECKING:
    from trimtab_engine.models.by_transformers.vision_encoder import FixedResolutionEncoder
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroup

ARCHITECTURES = (
    "LlavaForConditionalGeneration",
    "Idefics3ForConditionalGeneration",
    "SmolVLMForConditionalGeneration",
    "InternVLForConditionalGeneration",
)
NATIVE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Architectures of supported language models, by text_config's model type."""
UNSAID: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "vocab_size": 32_000,
    },
}  # fmt: skip
"""Defaults that transformers uses for fields missing in text_config."""
TIED = "tie_word_embeddings"
HALVES = ("text_config", "vision_config")
QUANTIZED = "quantization_config"
SEES_BOTH_WAYS = "image tokens use bidirectional attention, which its language model does not support"
MANY_SIZES = "its images have many sizes, and only fixed-resolution images are supported"
OWN_POSITIONS = "its tokens have positions over height and width, which are supported for Qwen2.5-VL only"
WHY_NOT = {
    "PaliGemmaForConditionalGeneration": SEES_BOTH_WAYS,
    "LlavaNextForConditionalGeneration": MANY_SIZES,
    "LlavaOnevisionForConditionalGeneration": MANY_SIZES,
    "Mistral3ForConditionalGeneration": MANY_SIZES,
    "Qwen2VLForConditionalGeneration": OWN_POSITIONS,
    "Qwen3VLForConditionalGeneration": OWN_POSITIONS,
    "MllamaForConditionalGeneration": "its language model has cross-attention layers for images",
}
"""Reasons why some other architectures are not supported."""


def why_not(architecture: str, config: Mapping[str, Any]) -> str | None:
    """Return the reason why images of this checkpoint are not supported, or None if the checkpoint takes text
    only.
    """
    if "vision_config" not in config:
        return None
    reason = WHY_NOT.get(architecture, "it has not been tested")
    return f"it takes images ({reason}); supported with transformers' code are {', '.join(ARCHITECTURES)}"


def language_model_config(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return the language model's configuration, as a text-only checkpoint would have it.

    Raises:
        ModelError: the configuration is invalid.
    """
    text = config.get("text_config")
    name = (config.get("architectures") or [None])[0]
    if not isinstance(text, Mapping):
        raise ModelError(f"{where}: text_config must be an object ({text!r:.100})")
    _check_plain(config, name, where)
    kind = str(text.get("model_type", "llama"))
    outer = {key: config[key] for key in (TIED, "dtype", "torch_dtype", "eos_token_id") if config.get(key) is not None}
    inner = {key: value for key, value in text.items() if value is not None}
    said = [each[TIED] for each in (outer, inner) if TIED in each]
    ties = {TIED: all(said)} if said else {}  # where they differ and the output layer is stored, it counts
    architecture = NATIVE.get(kind) or _by_transformers(kind, name, where)
    return {**UNSAID.get(kind, {}), **outer, **inner, **ties, "architectures": [architecture]}


def _check_plain(config: Mapping[str, Any], name: object, where: str) -> None:
    """Raise where the whole, or one of its halves, is quantised."""
    for part, words in (("", config), *((f"{half}: ", config.get(half)) for half in HALVES)):
        if isinstance(words, Mapping) and words.get(QUANTIZED):
            raise ModelError(
                f"{where}: {part}{QUANTIZED} is {words[QUANTIZED]!r:.100}; it is not supported for {name}; use a "
                f"checkpoint in 16 or 32 bits"
            )


def _by_transformers(kind: str, name: object, where: str) -> str:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if not isinstance(found, str):
        raise ModelError(f"{where}: {name} with a language model of model_type {kind!r} is not supported")
    return found


def parse_vision(words: ConfigReader, text: ModelConfig) -> VisionConfig:
    """The vision encoder's numbers, as transformers reads config.json. Raises ModelError."""
    size, num_tokens = square_of(words.config, words.where)
    said = _vision_words(words)
    vision = VisionConfig(
        hidden_size=said.positive("hidden_size"),
        intermediate_size=said.positive("intermediate_size"),
        num_layers=said.vision_layers("num_hidden_layers"),
        num_heads=said.positive("num_attention_heads"),
        num_channels=said.positive("num_channels", default=3),
        patch_size=side_of(said.config, "patch_size", said.where),
        frames_per_patch=1,
        merge_size=1,
        output_size=text.hidden_size,
        fixed_resolution=FixedResolution(
            size=size, num_tokens=num_tokens, transformers_config=json.dumps(words.config, sort_keys=True)
        ),
    )
    _check_computes(vision, words.where)
    return vision


def _vision_words(words: ConfigReader) -> ConfigReader:
    """Return the configuration completed with transformers' defaults."""
    from trimtab_engine.models.by_transformers.vision_encoder import vision_words

    return ConfigReader(vision_words(words.config, words.where), {}, f"{words.where}: vision_config")


def _check_computes(vision: VisionConfig, where: str) -> None:
    """Raise ModelError if transformers' code cannot compute this config.json."""
    from trimtab_engine.models.by_transformers.vision_trial import unsupported_field

    reason = unsupported_field(vision)
    if reason is not None:
        raise ModelError(f"{where}: {reason}")


def vision_encoder_tensors(vision: VisionConfig) -> Tensors:
    """Tensors of the vision encoder itself; some checkpoints use other names."""
    from trimtab_engine.models.by_transformers.vision_encoder import tensors_of

    return tensors_of(fixed_resolution_of(vision).transformers_config)


def build_vision_encoder(vision: VisionConfig, load: "Loader", group: "RankGroup | None") -> "FixedResolutionEncoder":
    """transformers' own code of it, whole."""
    from trimtab_engine.models.by_transformers.vision_encoder import FixedResolutionEncoder

    assert group is None  # else it was refused
    return FixedResolutionEncoder(vision, load)


TOWER = VisionEncoderFamily(
    parse_vision,
    vision_encoder_tensors,
    build_vision_encoder,
    modalities=("image",),
    not_on_cuda="transformers' own code computes them, which the steps of CUDA have not been tried with",
    renames_tensors=True,
)

"""Checkpoints whose images transformers' own code computes, for a text half of ours: which they are, what they say of
each half, and the tower in numbers. Their towers know squares of one size (multimodal/fixed_resolution.py). Importing
this needs neither torch nor transformers; reading a tower's numbers does.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.tensors import Tensors

from trimtab_engine.config.vision import FixedResolution, VisionConfig, fixed_resolution_of
from trimtab_engine.errors import ModelError
from trimtab_engine.models.family import TowerKind
from trimtab_engine.multimodal.fixed_resolution import side_of, square_of

if TYPE_CHECKING:
    from trimtab_engine.models.by_transformers.tower import SquareTower
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
"""Architectures of text halves with a family of their own, by what text_config calls them."""
UNSAID: Mapping[str, Mapping[str, Any]] = {
    "llama": {
        "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "max_position_embeddings": 2048, "vocab_size": 32_000,
    },
}  # fmt: skip
"""What text_config leaves out where it is this, as transformers reads it."""
TIED = "tie_word_embeddings"
HALVES = ("text_config", "vision_config")
QUANTIZED = "quantization_config"
SEES_BOTH_WAYS = "tokens of an image see those after them, which its text half would have to let them"
MANY_SIZES = "its pictures have many sizes, and squares of one size are built"
OWN_POSITIONS = "its tokens have positions over height and width, which are built of Qwen2.5-VL alone"
WHY_NOT = {
    "PaliGemmaForConditionalGeneration": SEES_BOTH_WAYS,
    "LlavaNextForConditionalGeneration": MANY_SIZES,
    "LlavaOnevisionForConditionalGeneration": MANY_SIZES,
    "Mistral3ForConditionalGeneration": MANY_SIZES,
    "Qwen2VLForConditionalGeneration": OWN_POSITIONS,
    "Qwen3VLForConditionalGeneration": OWN_POSITIONS,
    "MllamaForConditionalGeneration": "its text half attends to the image in layers of their own",
}
"""Of some others, what stands against them."""


def why_not(architecture: str, config: Mapping[str, Any]) -> str | None:
    """What stands against a checkpoint that sees images and is none of these; None: it does not say that it sees."""
    if "vision_config" not in config:
        return None
    reason = WHY_NOT.get(architecture, "nobody has tried it")
    return f"it sees images ({reason}); of those that transformers' code computes, {', '.join(ARCHITECTURES)} are built"


def text_words(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """The text half's words, as a checkpoint of text alone would say them. Raises ModelError."""
    text = config.get("text_config")
    name = (config.get("architectures") or [None])[0]
    if not isinstance(text, Mapping):
        raise ModelError(f"{where}: text_config is {text!r:.100}; an object is needed")
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
        raise ModelError(f"{where}: {name} with a text half of model_type {kind!r} is not supported")
    return found


def parse_vision(words: ConfigReader, text: ModelConfig) -> VisionConfig:
    """The tower's numbers, as transformers reads config.json. Raises ModelError."""
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
        fixed_resolution=FixedResolution(size=size, num_tokens=num_tokens, transformers_config=json.dumps(words.config, sort_keys=True)),
    )
    _check_computes(vision, words.where)
    return vision


def _vision_words(words: ConfigReader) -> ConfigReader:
    """With what transformers takes for words that are not said."""
    from trimtab_engine.models.by_transformers.tower import vision_words

    return ConfigReader(vision_words(words.config, words.where), {}, f"{words.where}: vision_config")


def _check_computes(vision: VisionConfig, where: str) -> None:
    """Raise where transformers' code cannot compute what this config.json says."""
    from trimtab_engine.models.by_transformers.tower_trial import why_not_computed

    reason = why_not_computed(vision)
    if reason is not None:
        raise ModelError(f"{where}: {reason}")


def tower_tensors(vision: VisionConfig) -> Tensors:
    """Those of the tower itself. In a checkpoint some may have other names."""
    from trimtab_engine.models.by_transformers.tower import tensors_of

    return tensors_of(fixed_resolution_of(vision).transformers_config)


def build_tower(vision: VisionConfig, load: "Loader", group: "RankGroup | None") -> "SquareTower":
    """transformers' own code of it, whole."""
    from trimtab_engine.models.by_transformers.tower import SquareTower

    assert group is None  # else it was refused
    return SquareTower(vision, load)


TOWER = TowerKind(
    parse_vision,
    tower_tensors,
    build_tower,
    modalities=("image",),
    not_on_cuda="transformers' own code computes them, which the steps of CUDA have not been tried with",
    renames_tensors=True,
)

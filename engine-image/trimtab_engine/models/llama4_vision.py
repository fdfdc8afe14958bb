"""Facts and tensor names of Llama 4's vision encoder (Meta 2025): each tile of an image becomes embeddings for the
language model, independent of other tiles.

The patches of a tile attend to each other and to one class row, which is dropped at the end. Then `merge_size` x
`merge_size` adjacent patches become one token: an MLP takes their concatenated hidden states ("pixel shuffle"). The
input has adjacent patches next to each other already (multimodal/qwen2_5_vl.py has the drawing), so nothing is
shuffled here; the position tables are reordered instead.

Facts and names need no torch; `TileTower` does.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.tensors import StoredTensor, Tensors

from trimtab_engine.config.vision import TileLayout, VisionConfig, tiles_of
from trimtab_engine.errors import ModelError

if TYPE_CHECKING:
    from trimtab_engine.models.llama4_vision_encoder import Llama4VisionEncoder
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.parallel.groups import RankGroup

THETA = 10_000.0  # defaults for config.json
UNSAID: Mapping[str, Any] = {
    "hidden_size": 768, "num_hidden_layers": 34, "num_attention_heads": 16, "num_channels": 3,
    "intermediate_size": 5632, "vision_output_dim": 7680, "image_size": 448, "patch_size": 14,
    "projector_input_dim": 4096, "projector_output_dim": 4096,
}  # fmt: skip
"""Defaults that transformers uses for fields missing in config.json."""
BUILT: Mapping[str, Any] = {
    "hidden_act": "gelu", "pixel_shuffle_ratio": 0.5, "multi_modal_projector_bias": False,
    "vision_feature_select_strategy": "default",
}  # fmt: skip
"""Fields with one value in all published models; other values are not supported."""
MERGE_SIZE = 2  # 1 / pixel_shuffle_ratio


def parse_vision(words: ConfigReader, text: ModelConfig) -> VisionConfig:
    """Read `vision_config`, for this language model. Raises ModelError."""
    said = words.config.get("vision_config")
    if not isinstance(said, dict):
        raise ModelError(f"{words.where}: vision_config must be an object ({said!r:.100})")
    where = f"{words.where}: vision_config"
    for name, value in BUILT.items():
        if said.get(name, value) != value:
            raise ModelError(f"{where}: {name} {said[name]!r} is not supported; only {value!r} is")
    own = ConfigReader({**UNSAID, **said}, {}, where)
    rope = said.get("rope_parameters") or {}
    theta = ConfigReader({**said, **rope}, {}, where).number("rope_theta", default=THETA)
    vision = VisionConfig(
        hidden_size=own.positive("hidden_size"),
        intermediate_size=own.positive("intermediate_size"),
        num_layers=own.vision_layers("num_hidden_layers"),
        num_heads=own.positive("num_attention_heads"),
        num_channels=own.positive("num_channels"),
        patch_size=own.positive("patch_size"),
        frames_per_patch=1,
        merge_size=MERGE_SIZE,
        output_size=text.hidden_size,
        tiles=TileLayout(
            size=own.positive("image_size"), projector_size=own.positive("projector_output_dim"), rope_theta=theta
        ),
    )
    _check_fit(vision, own)
    return vision


def _check_fit(vision: VisionConfig, own: ConfigReader) -> None:
    tile, width = tiles_of(vision), vision.hidden_size * vision.patches_per_token
    if own.positive("projector_input_dim") != tile.projector_size or own.positive("vision_output_dim") != (
        tile.projector_size
    ):
        raise ModelError(
            f"{own.where}: projector_input_dim, projector_output_dim and vision_output_dim must be the same; they are "
            f"{own.positive('projector_input_dim')}, {tile.projector_size} and {own.positive('vision_output_dim')}"
        )
    if vision.intermediate_size != width:
        raise ModelError(
            f"{own.where}: intermediate_size is {vision.intermediate_size}; the adapter reads {MERGE_SIZE} x "
            f"{MERGE_SIZE} patches of {vision.hidden_size}, which is {width}"
        )
    if tile.size % (vision.patch_size * MERGE_SIZE) or vision.hidden_size % (4 * vision.num_heads):
        raise ModelError(
            f"{own.where}: image_size {tile.size} must be a multiple of {MERGE_SIZE} x patch_size "
            f"{vision.patch_size}, and heads of {vision.hidden_size} / {vision.num_heads} one of 4"
        )


def vision_encoder_tensors(vision: VisionConfig) -> Tensors:
    """Return the tensors of the encoder and the projector, without their prefixes."""
    hidden, wide, tile = vision.hidden_size, vision.intermediate_size, tiles_of(vision)
    patches = (tile.size // vision.patch_size) ** 2
    shapes: dict[str, tuple[int, ...]] = {
        "class_embedding": (hidden,),
        "positional_embedding_vlm": (patches + 1, hidden),
        "patch_embedding.linear.weight": (hidden, vision.row_size),
        "vision_adapter.mlp.fc1.weight": (tile.projector_size, wide),
        "vision_adapter.mlp.fc2.weight": (tile.projector_size, tile.projector_size),
        "linear_1.weight": (vision.output_size, tile.projector_size),
    }
    norms = ["layernorm_pre", "layernorm_post"]
    for layer in range(vision.num_layers):
        prefix = f"model.layers.{layer}."
        norms += [prefix + "input_layernorm", prefix + "post_attention_layernorm"]
        linear = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        linear |= {"mlp.fc1": (wide, hidden), "mlp.fc2": (hidden, wide)}
        for name, shape in linear.items():
            shapes |= {f"{prefix}{name}.weight": shape, f"{prefix}{name}.bias": shape[:1]}
    for name in norms:
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return {name: StoredTensor(shape, "replicated") for name, shape in shapes.items()}


def build_vision_encoder(vision: VisionConfig, load: "Loader", group: "RankGroup | None") -> "Llama4VisionEncoder":
    """Its weights, by the names above."""
    from trimtab_engine.models.llama4_vision_encoder import Llama4VisionEncoder

    return Llama4VisionEncoder(vision, load, group)

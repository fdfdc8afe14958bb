"""Facts and tensor names of Qwen2.5-VL's vision encoder (arXiv:2502.13923, section 2.1), which turns the patches of an
image or a video into embeddings for the language model.

The input has the patches of one token next to each other. In most layers a patch attends to its window only, in a few
to its whole time step; so tokens are reordered by window first, and restored at the end:

```
tokens of one time step          in the order of windows of 2 x 2        patches that a patch of token 6 sees
 0  1 |  2  3 |  4                0 1 5 6 | 2 3 7 8 | 4 9 | 10 11 | …      in a window: those of 0 1 5 6
 5  6 |  7  8 |  9                windows at the edges are smaller         else: all of its time step
------+-------+---
10 11 | 12 13 | 14
```
Facts and names need no torch; `VisionEncoder` does.
"""

from typing import TYPE_CHECKING

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.config_reader import ConfigReader
from trimtab_modelspec.tensors import StoredTensor, Tensors

from trimtab_engine.config.vision import VisionConfig, VisionWindows, tokens_per_window, windows_of
from trimtab_engine.errors import ModelError

if TYPE_CHECKING:
    from trimtab_engine.models.loading import Loader
    from trimtab_engine.models.qwen2_5_vl_vision_encoder import VisionEncoder
    from trimtab_engine.parallel.groups import RankGroup

FULL_LAYERS = (7, 15, 23, 31)  # defaults for config.json
ACTIVATION = "silu"
NUM_AXES = 3  # of positions: over time, height and width


def parse_vision(words: ConfigReader, text: ModelConfig) -> VisionConfig:
    """Read `vision_config`, for this language model. Raises ModelError."""
    said = words.config.get("vision_config")
    if not isinstance(said, dict):
        raise ModelError(f"{words.where}: vision_config must be an object ({said!r:.100})")
    own = ConfigReader(said, {}, f"{words.where}: vision_config")
    vision = VisionConfig(
        hidden_size=own.positive("hidden_size", default=3584),
        intermediate_size=own.positive("intermediate_size", default=3420),
        num_layers=own.vision_layers("depth", default=32),
        num_heads=own.positive("num_heads", default=16),
        num_channels=own.positive("in_channels", default=own.positive("in_chans", default=3)),
        patch_size=own.positive("patch_size", default=14),
        frames_per_patch=own.positive("temporal_patch_size", default=2),
        merge_size=own.positive("spatial_merge_size", default=2),
        output_size=own.positive("out_hidden_size", default=3584),
        windows=VisionWindows(
            size=own.positive("window_size", default=112),
            whole_layers=frozenset(own.listed("fullatt_block_indexes") or FULL_LAYERS),
            tokens_per_second=own.positive("tokens_per_second", default=4),
        ),
    )
    if said.get("hidden_act", ACTIVATION) != ACTIVATION:
        raise ModelError(f"{own.where}: hidden_act {said['hidden_act']!r} is not supported; only {ACTIVATION!r} is")
    if vision.output_size != text.hidden_size:
        raise ModelError(
            f"{own.where}: out_hidden_size is {vision.output_size}, the language model's hidden_size {text.hidden_size}"
        )
    if len(text.rope.sections) != NUM_AXES or sum(text.rope.sections) != text.head_size // 2:
        raise ModelError(
            f"{words.where}: mrope_section is {list(text.rope.sections)}; images need {NUM_AXES} numbers whose sum is "
            f"{text.head_size // 2}, half of a head"
        )
    if vision.hidden_size % (4 * vision.num_heads) or not tokens_per_window(vision):
        raise ModelError(
            f"{own.where}: heads of {vision.hidden_size} / {vision.num_heads} must be a multiple of 4, and windows of "
            f"{windows_of(vision).size} pixels hold a token of {vision.patch_size * vision.merge_size}"
        )
    return vision


def vision_encoder_tensors(vision: VisionConfig) -> Tensors:
    """Return the encoder's tensors, without its prefix."""
    hidden, wide = vision.hidden_size, vision.intermediate_size
    merged = hidden * vision.patches_per_token
    patch = (hidden, vision.num_channels, vision.frames_per_patch, vision.patch_size, vision.patch_size)
    shapes: dict[str, tuple[int, ...]] = {"patch_embed.proj.weight": patch, "merger.ln_q.weight": (hidden,)}
    linear = {"merger.mlp.0": (merged, merged), "merger.mlp.2": (vision.output_size, merged)}
    for layer in range(vision.num_layers):
        prefix = f"blocks.{layer}."
        shapes |= {f"{prefix}{name}.weight": (hidden,) for name in ("norm1", "norm2")}
        linear |= {prefix + "attn.qkv": (3 * hidden, hidden), prefix + "attn.proj": (hidden, hidden)}
        linear |= {prefix + "mlp.gate_proj": (wide, hidden), prefix + "mlp.up_proj": (wide, hidden)}
        linear[prefix + "mlp.down_proj"] = (hidden, wide)
    for name, shape in linear.items():
        shapes |= {name + ".weight": shape, name + ".bias": shape[:1]}
    return {name: StoredTensor(shape, "replicated") for name, shape in shapes.items()}


def build_vision_encoder(vision: VisionConfig, load: "Loader", group: "RankGroup | None") -> "VisionEncoder":
    """Its weights, by the names above."""
    from trimtab_engine.models.qwen2_5_vl_vision_encoder import VisionEncoder

    return VisionEncoder(vision, load, group)

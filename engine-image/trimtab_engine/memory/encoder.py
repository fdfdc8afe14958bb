"""Memory of images and videos on a device: cached tokens, tokens computed at once, and their bytes. Pure."""

from dataclasses import dataclass

from trimtab_engine.config.engine import EngineConfig
from trimtab_engine.config.vision import VisionConfig

LARGEST_ITEM_TOKENS = 16_384  # tokens of the largest image of published processors, 12.8 megapixels
MAX_LIVE_ROWS = 12  # hidden states of all patches that a layer of the tower has alive, at most
PROJECTED_ROWS = 3  # embeddings of all tokens that a projector of two products has alive, at most
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class EncoderLimits:
    """Limits in image and video tokens: cached, and computed per step."""

    num_kept_tokens: int
    step_budget: int

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "EncoderLimits":
        """Return the configured limits. Defaults are one step's worth of text tokens, or the largest item."""
        most = max(config.max_num_batched_tokens_cap, min(max_model_len - 1, LARGEST_ITEM_TOKENS))
        return cls(config.encoder_cache_size or most, config.max_num_encoder_input_tokens or most)

    @property
    def largest_item(self) -> int:
        """Maximum tokens computed at once, if the vision encoder itself has no limit."""
        return min(self.num_kept_tokens, self.step_budget)

    def num_bytes(self, vision: VisionConfig, dtype_bytes: int) -> int:
        """Return the maximum device bytes besides the vision encoder's weights, by a rule."""
        largest = min(self.largest_item, vision.largest_item_tokens or self.largest_item)
        return kept_bytes(vision, self.num_kept_tokens, dtype_bytes) + tower_peak_bytes(vision, largest, dtype_bytes)


def kept_bytes(vision: VisionConfig, num_tokens: int, dtype_bytes: int) -> int:
    """Return the bytes of cached embeddings."""
    return num_tokens * vision.output_size * dtype_bytes


def tower_peak_bytes(vision: VisionConfig, num_tokens: int, dtype_bytes: int) -> int:
    """Return an upper bound of the vision encoder's memory for one item of `num_tokens` tokens: hidden states of all
    patches, input rows, and output embeddings. Attention and MLP work in slices, except in transformers' code, which
    may also keep each layer's output.
    """
    wide_bytes = max(dtype_bytes, FLOAT32_BYTES)
    embedding_bytes = num_tokens * vision.output_size * wide_bytes
    if vision.fixed_resolution is not None:
        num_patches = (vision.fixed_resolution.size // vision.patch_size) ** 2 + 1
        rows = MAX_LIVE_ROWS + vision.num_layers + -(-2 * vision.intermediate_size // vision.hidden_size)
        hidden_bytes = num_patches * rows * vision.hidden_size * wide_bytes
        return hidden_bytes + 2 * vision.row_size * FLOAT32_BYTES + PROJECTED_ROWS * embedding_bytes
    per_patch = MAX_LIVE_ROWS * vision.hidden_size * wide_bytes + 2 * vision.row_size * FLOAT32_BYTES
    return num_tokens * vision.patches_per_token * per_patch + embedding_bytes

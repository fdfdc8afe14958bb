"""What images and videos take of a device: how many tokens of them are kept and computed at once, and their bytes.
Pure."""

from trimtab_engine.config.vision import VisionConfig

LARGEST_ITEM_TOKENS = 16_384  # what the published processors make of their largest picture, 12.8 megapixels
ROWS_AT_ONCE = 12  # hidden states of all patches that a layer of the tower has alive, at most
FLOAT32_BYTES = 4


def encoder_tokens(max_num_batched_tokens: int, max_model_len: int) -> int:
    """A step's budget for images and videos, and how much of them is kept: a step's worth, and the largest one."""
    return max(max_num_batched_tokens, min(max_model_len - 1, LARGEST_ITEM_TOKENS))


def kept_bytes(vision: VisionConfig, num_tokens: int, dtype_bytes: int) -> int:
    """Of so many tokens' embeddings."""
    return num_tokens * vision.output_size * dtype_bytes


def tower_peak_bytes(vision: VisionConfig, num_tokens: int, dtype_bytes: int) -> int:
    """What the tower takes while it computes one item of so many tokens, estimated from above: hidden states of all its
    patches, and the rows that they come from. Attention and MLP take a slice at a time."""
    per_patch = (
        ROWS_AT_ONCE * vision.hidden_size * max(dtype_bytes, FLOAT32_BYTES) + 2 * vision.row_size * FLOAT32_BYTES
    )
    return num_tokens * vision.patches_per_token * per_patch

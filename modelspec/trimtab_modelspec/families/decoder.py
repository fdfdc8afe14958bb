"""KV layout of plain decoders, from the configuration. No tensors."""

from dataclasses import replace

from trimtab_modelspec.config import ModelConfig
from trimtab_modelspec.kv_groups import LayerKV


def decoder_kv(config: ModelConfig) -> list[LayerKV]:
    """Return the `kv` of families whose layers all keep whole heads of keys and values, windowed or not."""
    size = config.head_size
    each = LayerKV(num_kv_heads=config.num_kv_heads, key_size=size, value_size=size)
    windows = [config.window(layer) for layer in range(config.num_layers)]
    return [replace(each, window=window, is_chunked=config.is_chunked and window is not None) for window in windows]

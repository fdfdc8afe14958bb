"""A checkpoint of a decoder without its output layer, the usual form of embedding models: tensor names lack the prefix
of a generative model, and config.json may name the bare decoder.

```
layers.0.…           model.layers.0.…
…Model               …ForCausalLM
```
"""

from collections.abc import Mapping
from typing import Any

from trimtab_engine.weights.language_model_weights import Half
from trimtab_engine.weights.source import WeightSource

EMBEDDINGS, PREFIX, OUTPUT = "embed_tokens.weight", "model.", "lm_head.weight"
SINGLE_RANK, WHOLE = "Model", "ForCausalLM"
"""Suffixes of architecture names."""


class BareDecoder(Half):
    """Shows the tensors under the names of a whole model with tied embeddings; its logits are never requested."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's, as that of a whole model."""
        words = self._whole.config
        return {**words, "architectures": [whole_architecture(words)], "tie_word_embeddings": True}


def whole_architecture(config: Mapping[str, Any]) -> str | None:
    """Return the architecture that config.json names, or would name with an output layer."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is not None and name.endswith(SINGLE_RANK):
        return name.removesuffix(SINGLE_RANK) + WHOLE
    return name


def is_bare(source: WeightSource) -> bool:
    """Return True if a checkpoint is a decoder without an output layer."""
    return source.format == "safetensors" and EMBEDDINGS in source.shapes() and OUTPUT not in source.shapes()


def bare_decoder(source: WeightSource) -> BareDecoder:
    """The same, to be read like a whole model."""
    return BareDecoder(source, {PREFIX + name: name for name in source.shapes()})

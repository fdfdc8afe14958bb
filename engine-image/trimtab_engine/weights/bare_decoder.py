"""A checkpoint of a decoder without its output layer, as models that embed are stored: names lack what stands before
them in one that generates, and config.json may name the decoder alone.

```
layers.0.…           model.layers.0.…
…Model               …ForCausalLM
```
"""

from collections.abc import Mapping
from typing import Any

from trimtab_engine.weights.source import WeightSource
from trimtab_engine.weights.text_half import Half

EMBEDDINGS, PREFIX, OUTPUT = "embed_tokens.weight", "model.", "lm_head.weight"
SINGLE_RANK, WHOLE = "Model", "ForCausalLM"
"""How the names of architectures end."""


class BareDecoder(Half):
    """Under the names of a whole model whose output layer is its embeddings: nobody asks it for logits."""

    @property
    def config(self) -> Mapping[str, Any]:
        """The checkpoint's, as that of a whole model."""
        words = self._whole.config
        return {**words, "architectures": [whole_architecture(words)], "tie_word_embeddings": True}


def whole_architecture(config: Mapping[str, Any]) -> str | None:
    """What config.json calls the model, or would if it had its output layer."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None
    if name is not None and name.endswith(SINGLE_RANK):
        return name.removesuffix(SINGLE_RANK) + WHOLE
    return name


def is_bare(source: WeightSource) -> bool:
    """Whether a checkpoint is a decoder alone."""
    return source.format == "safetensors" and EMBEDDINGS in source.shapes() and OUTPUT not in source.shapes()


def bare_decoder(source: WeightSource) -> BareDecoder:
    """The same, to be read like a whole model."""
    return BareDecoder(source, {PREFIX + name: name for name in source.shapes()})

"""Tied embeddings that the stored tensors contradict. No torch, because model facts need the same answer."""

import logging
import re
from collections.abc import Mapping
from typing import Any

from trimtab_engine.weights.safetensors_files import SafetensorsSource
from trimtab_engine.weights.source import WeightSource

logger = logging.getLogger(__name__)

TIED = "tie_word_embeddings"
OUTPUT_LAYER = re.compile(r"(.+\.)?lm_head\.(weight|qweight|weight_packed)")
EMBEDDINGS = re.compile(r"(.+\.)?(embed_tokens|wte)\.weight")


def use_stored_output_layer(source: WeightSource) -> None:
    """Set tie_word_embeddings to false if the checkpoint stores an output layer that differs from the embeddings.

    The configuration is wrong then: transformers and vLLM also use the stored tensor. Equal tensors stay tied.
    """
    if not isinstance(source, SafetensorsSource):
        return  # a GGUF file is tied only if it has no output layer
    stated = _stated(source.config)
    if stated is False:
        return
    output, embeddings = (
        next((name for name in source.shapes() if pattern.fullmatch(name)), None)
        for pattern in (OUTPUT_LAYER, EMBEDDINGS)
    )
    if output is None or embeddings is None or source.has_equal_bytes(output, embeddings):
        return
    if stated is True:
        logger.warning(
            "%s: tie_word_embeddings is true, but the stored %s differs from %s; the stored tensor is used. Set "
            "tie_word_embeddings to false",
            source.where,
            output,
            embeddings,
        )
    source.config = {**source.config, TIED: False}


def _stated(config: Mapping[str, Any]) -> bool | None:
    """Return the value in config.json, where the whole model's has priority; None if it has none."""
    text = config.get("text_config")
    for words in (config, text if isinstance(text, Mapping) else {}):
        if isinstance(words.get(TIED), bool):
            return bool(words[TIED])
    return None

"""A vision encoder that transformers' code computes. It is a method of the whole model (`get_image_features`), so
the whole is
built, with a language model that has no layers.
"""

import copy
import inspect
import json
import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
import transformers
from trimtab_modelspec.tensors import StoredTensor, Tensors

from trimtab_engine.config.vision import VisionConfig, fixed_resolution_of
from trimtab_engine.errors import ModelError
from trimtab_engine.models.by_transformers.reading import read_whole
from trimtab_engine.models.by_transformers.trial import configuration
from trimtab_engine.models.loading import Loader

ATTENTION = "sdpa"  # torch's own, which keeps no scores
NESTED = "pixel_attention_mask"
"""Argument of `get_image_features` for images of several tiles."""
NO_TEXT = {"num_hidden_layers": 0, "vocab_size": 1, "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LAYERWISE = ("layer_types", "no_rope_layers")  # words that list something for each layer

logger = logging.getLogger("trimtab_engine.core")


class FixedResolutionEncoder:
    """One square at a time: its pixels in, its embeddings out."""

    def __init__(self, vision: VisionConfig, load: Loader) -> None:
        """Build the vision encoder.

        Raises:
            ModelError: weights are missing, or the number of tokens per image differs from config.json.
        """
        self.vision, self.dtype, self._device = vision, load.dtype, load.device
        self._model = _read(fixed_resolution_of(vision).transformers_config, load)
        self._is_nested = NESTED in inspect.signature(self._model.get_image_features).parameters
        self._check(load.where)

    def __call__(self, rows: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor:
        """rows [1, row_size] float32 -> embeddings [num_tokens, output_size] of the computing dtype."""
        side = fixed_resolution_of(self.vision).size
        shape = (1, 1) if self._is_nested else (1,)
        pixels = rows.to(device=self._device, dtype=self.dtype).view(*shape, -1, side, side)
        found = self._model.get_image_features(pixel_values=pixels, return_dict=True).pooler_output
        return torch.cat([part.flatten(0, -2) for part in found]).to(self.dtype)

    def _check(self, where: str) -> None:
        """Compute a grey square."""
        made = self(torch.full((1, self.vision.row_size), 0.5), (1, 1, 1))
        expected = (fixed_resolution_of(self.vision).num_tokens, self.vision.output_size)
        if tuple(made.shape) != expected:
            raise ModelError(
                f"{where}: transformers' vision encoder makes {list(made.shape)} of a square, config.json implies "
                f"{list(expected)}; this variant is not supported"
            )


def vision_words(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Return `vision_config` completed with transformers' defaults.

    Raises:
        ModelError: transformers cannot read it.
    """
    try:
        words: Mapping[str, Any] = configuration(class_of(config), config, ATTENTION).vision_config.to_dict()
    except Exception as error:  # other people's code fails as it likes
        said = str(error).strip().split("\n")[0]
        raise ModelError(f"{where}: transformers cannot read it: {type(error).__name__}: {said:.200}") from error
    return words


@lru_cache(maxsize=4)
def tensors_of(text: str) -> Tensors:
    """Return the tensors of this config.json's vision encoder, by transformers' names."""
    words = json.loads(text)
    with torch.device("meta"):
        whole = class_of(words)(without_text(words))
    own = _names_of_text(whole)
    return {
        name: StoredTensor(tuple(tensor.shape), "replicated")
        for name, tensor in whole.state_dict().items()
        if not name.startswith(own)
    }


def _read(text: str, load: Loader) -> Any:
    words = json.loads(text)
    whole, missing, extra = read_whole(class_of(words), without_text(words), load)
    own = _names_of_text(whole)
    missing = [name for name in missing if not name.startswith(own)]
    if missing:
        raise ModelError(f"{load.where}: the vision encoder's weights lack {len(missing)} tensors, first {missing[0]}")
    if extra:
        logger.warning("the vision encoder does not use %d tensors, first %s", len(extra), extra[0])
    logger.info("images are computed by transformers %s", transformers.__version__)
    return whole


def class_of(config: Mapping[str, Any]) -> Any:
    """transformers' class of the whole model."""
    return getattr(transformers, config["architectures"][0])


def without_text(config: Mapping[str, Any]) -> Any:
    """Return transformers' configuration of the same model with no language-model layers and a minimal vocabulary."""
    words = copy.deepcopy(dict(config))
    words["text_config"] = {key: words["text_config"][key] for key in words["text_config"] if key not in LAYERWISE}
    words["text_config"] |= NO_TEXT
    return configuration(class_of(words), words, ATTENTION)


def _names_of_text(whole: Any) -> tuple[str, ...]:
    """Name prefixes of the language model."""
    halves = (whole.get_decoder(), whole.get_output_embeddings())
    return tuple(f"{name}." for name, module in whole.named_modules() if any(module is half for half in halves))

"""The two halves of a vision-language checkpoint: the language model's configuration and its tensors under the names of
a text-only checkpoint, and the vision encoder's tensors.

```
                                   text half               towers
language_model.model.layers.0.…    model.layers.0.…                    as they were released first
model.language_model.layers.0.…    model.layers.0.…                    as transformers 5 stores them
model.text_model.layers.0.…        model.layers.0.…                    of Idefics3 and SmolVLM
model.visual.blocks.0.…                                    blocks.0.…
```
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from trimtab_engine.weights.source import Span, WeightSource

if TYPE_CHECKING:
    import torch

PREFIXES = (("model.language_model.", "model."), ("model.text_model.", "model."), ("language_model.", ""))
"""Name prefixes and their replacements."""
OUTPUT = "lm_head."
TOWERS = re.compile(r"(model\.)?(vision_model|vision_tower|visual|multi_modal_projector)\.")
"""Name prefixes of modules that only images pass through."""


class Half:
    """Some of another source's tensors, under other names."""

    def __init__(self, whole: WeightSource, stored_names: Mapping[str, str]) -> None:
        self._whole = whole
        self.format = whole.format
        self._stored_names = stored_names

    @property
    def config(self) -> Mapping[str, Any]:
        """The whole checkpoint's."""
        return self._whole.config

    @property
    def generation_config(self) -> Mapping[str, Any]:
        """The whole checkpoint's."""
        return self._whole.generation_config

    @property
    def where(self) -> str:
        """The whole checkpoint's file."""
        return self._whole.where

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """See WeightSource."""
        whole = self._whole.shapes()
        return {name: whole[stored] for name, stored in self._stored_names.items()}

    def stored_module(self, module: str) -> str:
        """Return the tensor's name in the whole checkpoint."""
        for ending in (".weight_packed", ".weight"):
            stored = self._stored_names.get(module + ending)
            if stored is not None:
                return stored.removesuffix(ending)
        return module

    def map_files(self) -> None:
        """See WeightSource."""
        self._whole.map_files()

    def tensor(self, name: str, *, rows: Span | None = None, columns: Span | None = None) -> "torch.Tensor":
        """See WeightSource."""
        return self._whole.tensor(self._stored_names.get(name, name), rows=rows, columns=columns)


def language_model_weights(whole: WeightSource) -> Half:
    """A checkpoint without its vision encoders."""
    return Half(whole, {_plain(name): name for name in whole.shapes() if not TOWERS.match(name)})


def vision_encoder_weights(whole: WeightSource) -> Half:
    """Shows the vision encoder's tensors only, without their common prefix."""
    found = ((TOWERS.match(name), name) for name in whole.shapes())
    return Half(whole, {name[match.end() :]: name for match, name in found if match is not None})


def language_model_weights_of_transformers(whole: WeightSource) -> Half:
    """The language model of a checkpoint whose vision encoder transformers' code computes."""
    return Half(whole, {_plain(name): name for name in whole.shapes() if _is_text(name)})


def vision_encoder_weights_of_transformers(whole: WeightSource) -> Half:
    """All but its language model, by the names that the checkpoint has."""
    return Half(whole, {name: name for name in whole.shapes() if not _is_text(name)})


def _is_text(name: str) -> bool:
    return name.startswith((*(stored for stored, _ in PREFIXES), OUTPUT))


def _plain(name: str) -> str:
    for stored, plain in PREFIXES:
        if name.startswith(stored):
            return plain + name.removeprefix(stored)
    return name

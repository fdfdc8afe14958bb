"""Whether transformers' code computes a square by the words of a config.json, and by which word it does not. A model is
built without weights, as small as shows it, and given a square; where that fails, each word in its turn is left out, or
said otherwise, until it does not.
"""

import copy
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from trimtab_engine.config.vision import VisionConfig, fixed_resolution_of
from trimtab_engine.models.by_transformers.tower import NESTED, class_of, without_text

VISION = "vision_config"
KINDS = frozenset({"architectures", "model_type", "text_config", VISION})
"""Words that say which model it is."""
FAILS = "transformers' code cannot compute"
MOST_ELEMENTS, MOST_PATCHES = 1 << 27, 1 << 14
"""Of what is computed indeed; larger ones are only built."""


@lru_cache(maxsize=4)
def why_not_computed(vision: VisionConfig) -> str | None:
    """What stands against this tower: the word of config.json, what it is and what would do; None: squares are
    computed."""
    words = json.loads(fixed_resolution_of(vision).transformers_config)
    error = _error(words, vision)
    if error is None:
        return None
    for part, name, otherwise in _changed(words):
        if _error(otherwise, vision) is None:
            said, other = (_inside(each, part)[name] for each in (words, _read(otherwise)))
            place = f"{part}: {name}" if part else name
            return f"{place} is {said!r:.100}, which {FAILS} ({error}); it can with {other!r:.100}"
    return f"its images are what {FAILS} ({error}), whichever one of its words is left out"


def _error(words: Mapping[str, Any], vision: VisionConfig) -> str | None:
    """What it fails with."""
    try:
        _compute(words, vision)
    except Exception as error:  # other people's code fails as it likes
        said = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {said:.200}"
    return None


def _compute(words: Mapping[str, Any], vision: VisionConfig) -> None:
    """A square of ones, where possible without any memory. Where what is computed depends on the pixels, it is computed
    indeed, by one layer."""
    is_nested = NESTED in inspect.signature(class_of(words).get_image_features).parameters
    if not is_nested:
        _compute_on("meta", words, vision, shape=(1,))
        return
    with torch.device("meta"):
        num_elements = sum(tensor.numel() for tensor in _built(_of_one_layer(words)).parameters())
    num_patches = (fixed_resolution_of(vision).size // vision.patch_size) ** 2
    if num_elements <= MOST_ELEMENTS and num_patches <= MOST_PATCHES:
        with torch.random.fork_rng(devices=()):
            _compute_on("cpu", _of_one_layer(words), vision, shape=(1, 1))


def _compute_on(device: str, words: Mapping[str, Any], vision: VisionConfig, *, shape: tuple[int, ...]) -> None:
    side = fixed_resolution_of(vision).size
    with torch.device(device), torch.no_grad():
        pixels = torch.ones(*shape, vision.num_channels, side, side)
        _built(words).get_image_features(pixel_values=pixels, return_dict=True)


def _of_one_layer(words: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**words, VISION: {**words[VISION], "num_hidden_layers": 1}}


def _built(words: Mapping[str, Any]) -> Any:
    return class_of(words)(without_text(words)).eval()


def _changed(words: Mapping[str, Any]) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """The words with one said otherwise, each in its turn: the part that it is in, its name, and all of them."""
    for part in (VISION, ""):
        for name, value in _inside(words, part).items():
            if name in KINDS:
                continue
            otherwise = copy.deepcopy(dict(words))
            if isinstance(value, list) and value:
                _inside(otherwise, part)[name] = value[0]
                yield part, name, otherwise
                otherwise = copy.deepcopy(otherwise)
            del _inside(otherwise, part)[name]
            yield part, name, otherwise


def _inside(words: Any, part: str) -> Any:
    return words[part] if part else words


def _read(words: Mapping[str, Any]) -> Mapping[str, Any]:
    """With what transformers takes for words that are not said."""
    read: Mapping[str, Any] = without_text(words).to_dict()
    return read

"""Trial run of transformers' vision encoder on one fixed-resolution image, to find config.json fields that it cannot
compute. A minimal model is built without weights and run; if it fails, each field in turn is removed or changed until
the run succeeds.
"""

import copy
import inspect
import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from trimtab_engine.config.vision import VisionConfig, fixed_resolution_of
from trimtab_engine.models.by_transformers.vision_encoder import NESTED, class_of, without_text

VISION = "vision_config"
KINDS = frozenset({"architectures", "model_type", "text_config", VISION})
"""Fields that identify the model."""
FAILS = "transformers' code cannot compute"
MOST_ELEMENTS, MOST_PATCHES = 1 << 27, 1 << 14
"""Largest number of values that is really computed; larger models are only built."""


@lru_cache(maxsize=4)
def unsupported_field(vision: VisionConfig) -> str | None:
    """Return the reason why this vision encoder cannot run (the config.json field, its value, and a value that works),
    or None if it can.
    """
    words = json.loads(fixed_resolution_of(vision).transformers_config)
    error = _error(words, vision)
    if error is None:
        return None
    for part, name, otherwise in _changed(words):
        if _error(otherwise, vision) is None:
            said, other = (_inside(each, part)[name] for each in (words, _read(otherwise)))
            place = f"{part}: {name}" if part else name
            return f"{place} is {said!r:.100}, which {FAILS} ({error}); {other!r:.100} works"
    return f"its images are what {FAILS} ({error}), whichever one of its words is left out"


def _error(words: Mapping[str, Any], vision: VisionConfig) -> str | None:
    """Return the failure of the trial run, or None."""
    try:
        _compute(words, vision)
    except Exception as error:  # other people's code fails as it likes
        said = str(error).strip().split("\n")[0]
        return f"{type(error).__name__}: {said:.200}"
    return None


def _compute(words: Mapping[str, Any], vision: VisionConfig) -> None:
    """Compute one image of ones, on the meta device if possible. If the computation depends on pixel values, compute it
    for real with one layer.
    """
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
    """Yield the configuration with one field changed at a time: the part, the field name, and the whole
    configuration.
    """
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
    """Return the configuration completed with transformers' defaults."""
    read: Mapping[str, Any] = without_text(words).to_dict()
    return read

"""Reads a checkpoint's processor files, which describe the processing of images and videos."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from trimtab_engine.errors import ModelError
from trimtab_engine.multimodal import fixed_resolution, llama4
from trimtab_engine.multimodal.items import Modality
from trimtab_engine.multimodal.processor_settings import whole
from trimtab_engine.multimodal.qwen2_5_vl import PatchProcessor
from trimtab_engine.multimodal.reader import Processors
from trimtab_engine.multimodal.tiles import Idefics3Tokens, InternVLTokens, Llama4Tokens, TileTokens

WHOLE = "processor_config.json"
"""File written by transformers 5: all processors of a model, by name."""
IMAGE, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
"""Older checkpoints' files. Without a video file, videos are processed like images."""

TILE_WORDS = {
    "picture": "<|image|>",
    "start": "<|image_start|>",
    "end": "<|image_end|>",
    "patch": "<|patch|>",
    "across": "<|tile_x_separator|>",
    "down": "<|tile_y_separator|>",
}
SQUARE_WORDS = {"fence": "<fake_token_around_image>", "whole": "<global-img>", "picture": "<image>"}
FRAME_WORDS = {"start": "<img>", "end": "</img>", "picture": "<IMG_CONTEXT>"}
PLACE = re.compile(r"<row_(\d+)_col_(\d+)>")


def read_processors(folder: str) -> Processors:
    """Return the model's processors.

    Raises:
        ModelError: files are missing or not supported.
    """
    image = _words(Path(folder), IMAGE, "image_processor")
    if image is None:
        raise ModelError(
            f"{folder} has neither {IMAGE} nor {WHOLE}, which configure image processing; fetch the checkpoint again"
        )
    if image[0].get("image_processor_type") in llama4.KNOWN_TYPES:
        tiled = llama4.TileProcessor.parse(*image, patch_size=_patch_size(Path(folder)))
        return Processors(tiled, tiled)
    if image[0].get("image_processor_type") in fixed_resolution.KNOWN_TYPES:
        path = Path(folder) / "config.json"
        size, num_tokens = fixed_resolution.square_of(_object(path), str(path))
        square = fixed_resolution.SquareProcessor.parse(*image, square_size=size, tokens_per_square=num_tokens)
        return Processors(square, square)
    video = _words(Path(folder), VIDEO, "video_processor") or image
    return Processors(_parsed(image), _parsed(video))


def read_placeholders(folder: str, modalities: Sequence[Modality]) -> dict[Modality, int]:
    """The tokens that the model's chat template writes for these kinds, as config.json has them. Raises ModelError."""
    path = Path(folder) / "config.json"
    words = _object(path)
    ids: dict[Modality, int] = {}
    for modality in modalities:
        token_id = words.get(f"{modality}_token_id", words.get(f"{modality}_token_index"))
        if type(token_id) is not int or token_id < 0:
            raise ModelError(f"{path}: {modality}_token_id is {token_id!r}; expected a token's id")
        ids[modality] = token_id
    return ids


def read_tile_tokens(folder: str, processors: Processors, tokenizer: str | None = None) -> TileTokens | None:
    """The tokens around the tiles of an image, by the words that the tokenizer has for them; None where images are
    not cut into tiles. Raises ModelError for a tokenizer without them.
    """
    words = _delimiters(processors.image, _object(Path(folder) / "config.json"))
    if words is None:
        return None
    path = Path(tokenizer or folder) / "tokenizer.json"
    ids = _added_tokens(path)
    missing = [word for word in words.values() if word not in ids]
    if missing:
        raise ModelError(f"{path} has no token {missing[0]}, which this model's image prompts need")
    named = {name: ids[word] for name, word in words.items()}
    if words is FRAME_WORDS:
        return InternVLTokens(**named)
    return _square_tokens(path, named, ids) if words is SQUARE_WORDS else Llama4Tokens(**named)


def _delimiters(processor: object, config: Mapping[str, Any]) -> Mapping[str, str] | None:
    """Return the delimiters of an image's tiles, or None if it has none."""
    if isinstance(processor, llama4.TileProcessor):
        return TILE_WORDS
    if not isinstance(processor, fixed_resolution.SquareProcessor) or fixed_resolution.is_single_square(config):
        return None
    return FRAME_WORDS if processor.num_squares is not None else SQUARE_WORDS


def _added_tokens(path: Path) -> dict[str, int]:
    """Return token ids by text."""
    tokens = _object(path).get("added_tokens")
    if tokens is not None and not isinstance(tokens, list):
        raise ModelError(f"{path}: added_tokens is {tokens!r:.100}; a list is needed")
    ids: dict[str, int] = {}
    for token in tokens or ():
        word, token_id = (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        if not isinstance(word, str) or type(token_id) is not int or token_id < 0:
            raise ModelError(f"{path}: added_tokens has {token!r:.100}; objects with content and id are needed")
        ids[word] = token_id
    return ids


def _square_tokens(path: Path, named: Mapping[str, int], ids: Mapping[str, int]) -> Idefics3Tokens:
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises nothing more exact
        raise ModelError(f"{path} cannot be read as a tokenizer: {error!s:.200}; fetch it again") from None
    line, last_lines = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("\n", "\n\n"))
    found = ((PLACE.fullmatch(word), token_id) for word, token_id in ids.items())
    places = {(int(match[1]), int(match[2])): token_id for match, token_id in found if match is not None}
    return Idefics3Tokens(**named, places=places, line=line, last_lines=last_lines)


def _patch_size(folder: Path) -> int:
    """The vision encoder's."""
    path = folder / "config.json"
    vision = _object(path).get("vision_config")
    return whole(vision if isinstance(vision, dict) else {}, "patch_size", 14, f"{path}: vision_config")


def _parsed(found: tuple[Mapping[str, Any], str]) -> PatchProcessor:
    return PatchProcessor.parse(*found)


def _words(folder: Path, own: str, part: str) -> tuple[Mapping[str, Any], str] | None:
    """Return the settings and their file, or None if there is none."""
    if (folder / own).exists():
        return _object(folder / own), str(folder / own)
    if (folder / WHOLE).exists():
        words = _object(folder / WHOLE).get(part)
        if isinstance(words, dict):
            return words, f"{folder / WHOLE}: {part}"
    return None


def _object(path: Path) -> dict[str, Any]:
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from None
    if not isinstance(words, dict):
        raise ModelError(f"{path} is no JSON object; fetch it again")
    return words

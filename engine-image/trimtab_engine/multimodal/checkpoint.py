"""How a checkpoint says its images and videos are to be processed: files beside its weights."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trimtab_engine.errors import ModelError
from trimtab_engine.multimodal.items import Modality
from trimtab_engine.multimodal.qwen2_5_vl import PatchProcessor
from trimtab_engine.multimodal.reader import Processors

WHOLE = "processor_config.json"
"""What transformers 5 writes: all processors of a model, each under a name."""
IMAGE, VIDEO = "preprocessor_config.json", "video_preprocessor_config.json"
"""What checkpoints had before. Those without a file for videos process them as images."""


def read_processors(folder: str) -> Processors:
    """The model's processors. Raises ModelError for files that are missing, or say what is not built."""
    image = _words(Path(folder), IMAGE, "image_processor")
    if image is None:
        raise ModelError(
            f"{folder} has neither {IMAGE} nor {WHOLE}, which say how images are processed; fetch it again"
        )
    video = _words(Path(folder), VIDEO, "video_processor") or image
    return Processors(_parsed(image), _parsed(video))


def read_placeholders(folder: str, modalities: Sequence[Modality]) -> dict[Modality, int]:
    """The tokens that the model's chat template writes for these kinds, as config.json has them. Raises ModelError."""
    path = Path(folder) / "config.json"
    words = _object(path)
    ids: dict[Modality, int] = {}
    for modality in modalities:
        token_id = words.get(f"{modality}_token_id")
        if not isinstance(token_id, int) or token_id < 0:
            raise ModelError(f"{path}: {modality}_token_id is {token_id!r}; expected a token's id")
        ids[modality] = token_id
    return ids


def _parsed(found: tuple[Mapping[str, Any], str]) -> PatchProcessor:
    return PatchProcessor.parse(*found)


def _words(folder: Path, own: str, part: str) -> tuple[Mapping[str, Any], str] | None:
    """The words, and where they stand; None: nowhere."""
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
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}; fetch it again") from None
    if not isinstance(words, dict):
        raise ModelError(f"{path} is no JSON object; fetch it again")
    return words

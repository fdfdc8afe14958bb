"""Images and videos of prompts of the offline LLM class: the caller's own Pillow images, processed in this process."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

from PIL import Image

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.multimodal.checkpoint import read_placeholders, read_processors, read_tile_tokens
from trimtab_engine.multimodal.decoding import Frames, in_rgb
from trimtab_engine.multimodal.items import Modality, MultiModalItem, Span
from trimtab_engine.multimodal.placeholders import expand
from trimtab_engine.multimodal.reader import item_of
from trimtab_engine.multimodal.worker import processed

MODALITIES: tuple[Modality, ...] = ("image", "video")


class OfflineMedia:
    """Media processor of a model's prompts. `limits` has the maximum per modality, `tokenizer` the tokenizer's path if
    it is not in the model's folder.
    """

    def __init__(
        self,
        model: str,
        modalities: Sequence[Modality],
        limits: Mapping[str, int],
        tokenizer: str | None = None,
    ) -> None:
        self._processors = read_processors(model)
        self._placeholders = read_placeholders(model, modalities)
        self._tiles = read_tile_tokens(model, self._processors, tokenizer)
        self._limits = limits
        self._meanings = {kind: self._processors[kind].meanings().tobytes() for kind in MODALITIES}

    def expand_placeholders(
        self, token_ids: Sequence[int], data: Mapping[str, Any]
    ) -> tuple[list[int], tuple[Span, ...]]:
        """Return the prompt with expanded placeholders for `data` (vLLM's multi_modal_data: images under "image", lists
        of frames under "video"), and the items' positions. Raises InvalidRequest for invalid, too many or unplaced
        items.
        """
        unknown = sorted(map(str, data.keys() - set(MODALITIES)))
        if unknown:
            raise InvalidRequest(f"multi_modal_data: unknown key {unknown[0]!r}; use {' and '.join(MODALITIES)}")
        left = {kind: list(_list_items(kind, data[kind])) for kind in MODALITIES if data.get(kind)}
        for kind, given in left.items():
            limit = self._limits.get(kind, 0)
            if len(given) > limit:
                raise InvalidRequest(f"a prompt has {len(given)} {kind}s; the limit is {limit} (limit_mm_per_prompt)")
            if kind not in self._placeholders:
                raise InvalidRequest(f"this model does not accept {kind}s")
        if self._tiles is not None:
            items = [self._item("image", pictures) for pictures in left.get("image", ())]
            token_ids, items = self._tiles.written(token_ids, items)
            return expand(token_ids, items, self._placeholders)
        kinds = {token_id: kind for kind, token_id in self._placeholders.items()}
        order = [kinds[token_id] for token_id in token_ids if token_id in kinds]
        items = [self._item(kind, left[kind].pop(0)) for kind in order if left.get(kind)]
        items += [self._item(kind, pictures) for kind in MODALITIES for pictures in left.get(kind, ())]
        return expand(token_ids, items, self._placeholders)

    def _item(self, modality: Modality, pictures: Sequence[Image.Image]) -> MultiModalItem:
        frames = Frames([in_rgb(picture) for picture in pictures])
        digest = hashlib.sha256(f"{modality} {[picture.size for picture in frames.pictures]}".encode())
        for picture in frames.pictures:
            digest.update(picture.tobytes())
        made = processed(frames, self._processors[modality])
        return item_of(modality, digest.digest(), made, self._meanings[modality])


def _list_items(modality: Modality, given: Any) -> Sequence[Sequence[Image.Image]]:
    """Return one or several items: each an image with one picture, or a video with its frames."""
    several = given if isinstance(given, list | tuple) else [given]
    if modality == "image":
        found = [[picture] for picture in several]
    elif all(isinstance(frame, Image.Image) for frame in several):
        found = [list(several)]
    else:
        found = [list(video) if isinstance(video, list | tuple) else [video] for video in several]
    if not all(video and all(isinstance(picture, Image.Image) for picture in video) for video in found):
        raise InvalidRequest(f"multi_modal_data: {modality} must be PIL images; a video is a list of them")
    sizes = [{picture.size for picture in video} for video in found]
    if any(len(each) > 1 for each in sizes):
        raise InvalidRequest("multi_modal_data: the frames of a video must have the same size")
    return found

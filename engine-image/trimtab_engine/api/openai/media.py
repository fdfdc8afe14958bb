"""Images and videos of a conversation: how many there may be, and what becomes of them in its prompt."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.ipc.bounded_worker import AllBusy
from trimtab_engine.multimodal.items import Modality, MultiModalItem, Span
from trimtab_engine.multimodal.placeholders import expand
from trimtab_engine.multimodal.tiles import TileTokens

if TYPE_CHECKING:  # servers of models that take text alone need neither Pillow nor numpy
    from trimtab_engine.multimodal.reader import MediaReader

MODALITIES: tuple[Modality, ...] = ("image", "video")
AT_ONCE = 2  # items of one request that are processed side by side: others want the processes too
RETRY_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video of a message. `where`: its place, for messages of errors. `uuid`: the client's own name for
    what it is."""

    modality: Modality
    url: str | None
    """None: it is known by its uuid."""
    where: str
    uuid: str | None = None


class PromptMedia:
    """What a model's requests may bring besides text. `placeholders`: the token that its chat template writes for each
    kind that it takes; `limits`: how many there may be of each; `tiles`: what is written around an image's tiles, where
    images are cut."""

    def __init__(
        self,
        reader: "MediaReader",
        placeholders: Mapping[Modality, int],
        limits: Mapping[str, int],
        tiles: TileTokens | None = None,
    ) -> None:
        self.reader, self._placeholders, self._limits, self._tiles = reader, placeholders, limits, tiles

    def check(self, media: Sequence[Media]) -> None:
        """Raise ApiError 400 for kinds that the model does not take, and for more of one than is allowed."""
        for modality in MODALITIES:
            count = sum(each.modality == modality for each in media)
            if count and modality not in self._placeholders:
                raise invalid(f"this model takes no {modality}s; send text", "messages")
            limit = self._limits.get(modality, 0)
            if count > limit:
                raise invalid(
                    f"the messages have {count} {modality}s; at most {limit} may be in one prompt here "
                    f"(--limit-mm-per-prompt)",
                    "messages",
                )

    async def items(self, media: Sequence[Media], *, salt: str, max_tokens: int) -> list[MultiModalItem]:
        """What they are to the prompt, which has room for so many tokens. ApiError 400 says which is wrong and why, 503
        that too many wait."""
        found: list[MultiModalItem] = []
        for first in range(0, len(media), AT_ONCE):
            found += await asyncio.gather(*(self._item(each, salt) for each in media[first : first + AT_ONCE]))
            num_tokens = sum(item.num_tokens for item in found)
            if num_tokens >= max_tokens:
                raise invalid(
                    f"the first {len(found)} images and videos take {num_tokens} tokens; this model's maximum context "
                    f"length is {max_tokens} tokens. Send fewer, or smaller ones.",
                    "messages",
                )
        return found

    async def _item(self, media: Media, salt: str) -> MultiModalItem:
        try:
            return await self.reader.item(media.modality, media.url, salt, uuid=media.uuid)
        except InvalidRequest as error:
            raise invalid(f"{media.where}: {error}", "messages") from None
        except AllBusy:
            raise ApiError(
                503, "too many images and videos wait to be processed; try again", retry_after=RETRY_SECONDS
            ) from None

    def placed(self, token_ids: Sequence[int], items: Sequence[MultiModalItem]) -> tuple[list[int], tuple[Span, ...]]:
        """The prompt with room for the items, and where they are. ApiError 400 unless it has a place for each."""
        try:
            if self._tiles is not None:
                token_ids, items = self._tiles.written(token_ids, items)
            return expand(token_ids, items, self._placeholders)
        except InvalidRequest as error:
            raise invalid(str(error), "messages") from None

    async def close(self) -> None:
        """End its processes and connections."""
        await self.reader.close()

"""Images and videos of a conversation: limits, processing, and placement in the prompt."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.errors import InvalidRequest
from trimtab_engine.ipc.bounded_worker import WorkersBusy
from trimtab_engine.multimodal.items import Modality, MultiModalItem, Span
from trimtab_engine.multimodal.placeholders import expand
from trimtab_engine.multimodal.tiles import TileTokens
from trimtab_engine.state_stream.key_ends import expanded_ends

if TYPE_CHECKING:  # text-only servers need neither Pillow nor numpy
    from trimtab_engine.multimodal.reader import MediaReader

MODALITIES: tuple[Modality, ...] = ("image", "video")
MAX_CONCURRENT_ITEMS = 2  # items of one request that are processed concurrently; other requests share the workers
RETRY_SECONDS = 2


@dataclass(frozen=True, slots=True)
class Media:
    """An image or a video of a message. `where` is its position for error messages, `uuid` the client's ID of its
    content.
    """

    modality: Modality
    url: str | None
    """None if it is identified only by its uuid."""
    where: str
    uuid: str | None = None


class PromptMedia:
    """Media processing of a model. `placeholders` has the token that the chat template writes for each supported
    modality, `limits` the maximum number per prompt, `tiles` the tokens around image tiles, for models that split
    images.
    """

    def __init__(
        self,
        reader: "MediaReader",
        placeholders: Mapping[Modality, int],
        limits: Mapping[str, int],
        tiles: TileTokens | None = None,
    ) -> None:
        self.reader, self._placeholders, self._limits, self._tiles = reader, placeholders, limits, tiles

    def check(self, media: Sequence[Media]) -> None:
        """Raise ApiError 400 for unsupported modalities and for too many items."""
        for modality in MODALITIES:
            count = sum(each.modality == modality for each in media)
            if count and modality not in self._placeholders:
                raise invalid(f"this model does not accept {modality}s; send text", "messages")
            limit = self._limits.get(modality, 0)
            if count > limit:
                raise invalid(
                    f"the messages have {count} {modality}s; the limit is {limit} per prompt (--limit-mm-per-prompt)",
                    "messages",
                )

    async def items(self, media: Sequence[Media], *, salt: str, max_tokens: int) -> list[MultiModalItem]:
        """Process the items for a prompt of at most `max_tokens` tokens.

        Raises:
            ApiError: 400 with the invalid item and the reason, 503 if too many items wait.
        """
        found: list[MultiModalItem] = []
        for first in range(0, len(media), MAX_CONCURRENT_ITEMS):
            found += await asyncio.gather(
                *(self._item(each, salt) for each in media[first : first + MAX_CONCURRENT_ITEMS])
            )
            num_tokens = sum(item.num_tokens for item in found)
            if num_tokens >= max_tokens:
                raise invalid(
                    f"the first {len(found)} images and videos have {num_tokens} tokens; this model's maximum context "
                    f"length is {max_tokens} tokens. Send fewer, or smaller ones.",
                    "messages",
                )
        return found

    async def _item(self, media: Media, salt: str) -> MultiModalItem:
        try:
            return await self.reader.item(media.modality, media.url, salt, uuid=media.uuid)
        except InvalidRequest as error:
            raise invalid(f"{media.where}: {error}", "messages") from None
        except WorkersBusy:
            raise ApiError(
                503, "too many images and videos are waiting to be processed; retry later", retry_after=RETRY_SECONDS
            ) from None

    def expand_placeholders(
        self, token_ids: Sequence[int], items: Sequence[MultiModalItem]
    ) -> tuple[list[int], tuple[Span, ...]]:
        """Return the prompt with expanded placeholders, and the items' positions.

        Raises:
            ApiError: 400 unless the prompt has one placeholder per item.
        """
        try:
            if self._tiles is not None:
                token_ids, items = self._tiles.written(token_ids, items)
            return expand(token_ids, items, self._placeholders)
        except InvalidRequest as error:
            raise invalid(str(error), "messages") from None

    def expanded_ends(self, ends: Sequence[int], token_ids: Sequence[int], spans: Sequence[Span]) -> list[int]:
        """Return the number of tokens before each of these ends after expansion. Ends after an image that a model
        splits are dropped.
        """
        written = frozenset(self._placeholders.values())
        places = [place for place, token_id in enumerate(token_ids) if token_id in written]
        return expanded_ends(ends, places, () if self._tiles is not None else [span.end for span in spans])

    async def close(self) -> None:
        """Close the worker processes and connections."""
        await self.reader.close()

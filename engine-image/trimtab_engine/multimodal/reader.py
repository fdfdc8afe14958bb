"""Turns a content part of a message into a prompt item: reads its content, computes its key, and processes it in a
process that can be killed, unless it is cached.
"""

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_engine.errors import InvalidRequest
from trimtab_engine.ipc.bounded_worker import WorkerEnded, WorkerLimits, WorkerPool, WorkerTimeout
from trimtab_engine.multimodal.decoding import FRAME_LIST, DecodeLimits
from trimtab_engine.multimodal.fetching import Content, FetchLimits, MediaFetcher
from trimtab_engine.multimodal.items import Modality, MultiModalItem, Patches
from trimtab_engine.multimodal.processor_cache import ProcessorCache
from trimtab_engine.multimodal.sources import AllowedSources, Inline
from trimtab_engine.multimodal.worker import MAX_ADDRESS_BYTES, Processor, settings

MODULE = "trimtab_engine.multimodal.worker"
WORKERS = WorkerLimits(seconds=10.0, max_workers=4, max_waiting=1024)
LIMITS = DecodeLimits()
BY_UUID = b"uuid"
LARGE_BYTES = 1 << 20  # from here on the event loop does not compute the hash
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Processors:
    """Processors of a model: for images, and for frames of a video."""

    image: Processor
    video: Processor

    def __getitem__(self, modality: Modality) -> Processor:
        return self.image if modality == "image" else self.video


class MediaReader:
    """Images and videos of one model's requests. WorkersBusy leaves it when too many wait."""

    def __init__(
        self,
        processors: Processors,
        allowed: AllowedSources,
        cache: ProcessorCache,
        *,
        limits: DecodeLimits = LIMITS,
        workers: WorkerLimits = WORKERS,
        fetcher: MediaFetcher | None = None,
    ) -> None:
        self._processors, self._allowed, self._limits, self._workers = processors, allowed, limits, workers
        self.cache = cache
        self._fetcher = fetcher or MediaFetcher(allowed, FetchLimits(max_bytes=limits.max_bytes))
        self._pool = WorkerPool(MODULE, settings(processors.image, processors.video, limits), workers)
        self._meanings = {kind: processors[kind].meanings().tobytes() for kind in ("image", "video")}
        self._how = f"{processors} {limits.num_frames}".encode()

    async def item(self, modality: Modality, url: str | None, salt: str, *, uuid: str | None = None) -> MultiModalItem:
        """Return the URL's content as an item, shared by requests with the same salt. A known uuid is not read again,
        and needs no URL.

        Raises:
            InvalidRequest: the content is missing or invalid.
        """
        if uuid is None:
            assert url is not None  # else it was refused
            request, content_hash = await self._opened(modality, url, salt)
            return await self.cache.get(content_hash, lambda: self._process(modality, request, content_hash))
        name = self._hash(modality, salt, BY_UUID, uuid.encode("utf-8", "surrogatepass"))
        if url is not None:
            return await self.cache.get(name, lambda: self._read(modality, url, salt), source=url)
        known = await self.cache.known(name)
        if known is None:
            raise InvalidRequest(f"nothing is known by uuid {uuid[:80]!r} here, or not any more; send it with its url")
        return known

    async def _read(self, modality: Modality, url: str, salt: str) -> MultiModalItem:
        """Return the key by content even if there is a uuid: engines never confuse different images with the same
        uuid.
        """
        return await self._process(modality, *await self._opened(modality, url, salt))

    async def _opened(self, modality: Modality, url: str, salt: str) -> tuple[Json, bytes]:
        """Return the worker's task for the URL's content, and its name."""
        source = self._allowed.source(url)
        content = source if isinstance(source, Inline) else await self._fetcher.fetch(source)
        request, named = self._request(modality, content)
        size = len(content.base64) if isinstance(content, Inline) else len(content.data)
        if size < LARGE_BYTES:
            return request, self._hash(modality, salt, named)
        return request, await asyncio.to_thread(self._hash, modality, salt, named)

    def _request(self, modality: Modality, content: Inline | Content) -> tuple[Json, bytes]:
        """Return the worker's task, and the key's input."""
        if isinstance(content, Content):
            return {"kind": modality, "mime": content.mime, "data": content.data}, content.data
        named = content.base64.encode()
        if content.mime == FRAME_LIST and modality == "video":
            frames = content.base64.split(",")
            if sum(map(len, frames)) // 4 * 3 > self._limits.max_bytes + 2 * len(frames):
                raise InvalidRequest(f"it has more than {self._limits.max_bytes} bytes; that is the most of one file")
            return {"kind": modality, "frames": frames}, named
        return {"kind": modality, "mime": content.mime, "base64": content.base64}, f"{content.mime},".encode() + named

    def _hash(self, modality: Modality, salt: str, *named: bytes) -> bytes:
        """Return a digest of the salt, the processing and the content, each prefixed with its length."""
        digest = hashlib.sha256()
        for part in (self._how, modality.encode(), salt.encode("utf-8", "surrogatepass"), *named):
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()

    async def _process(self, modality: Modality, request: Json, content_hash: bytes) -> MultiModalItem:
        try:
            answer: Json = await self._pool.call(request)
        except WorkerTimeout:
            raise InvalidRequest(f"decoding it took more than {self._workers.seconds:g} s") from None
        except WorkerEnded:
            raise InvalidRequest(f"decoding it took more than {MAX_ADDRESS_BYTES} bytes, or crashed") from None
        if "values" not in answer:
            raise InvalidRequest(_reason(answer))
        return item_of(modality, content_hash, answer, self._meanings[modality])

    async def close(self) -> None:
        """End its processes and connections."""
        await self._pool.close()
        await self._fetcher.close()


def item_of(modality: Modality, content_hash: bytes, processed: Mapping[str, Any], meanings: bytes) -> MultiModalItem:
    """Return the item from a worker's output (or `processed` in worker.py)."""
    time, height, width = processed["grid"]
    return MultiModalItem(
        modality,
        content_hash,
        processed["num_tokens"],
        (time, height, width),
        Patches(processed["row_size"], processed["values"], meanings),
        processed["seconds"],
        None if processed["tiles"] is None else (processed["tiles"][0], processed["tiles"][1]),
    )


def _reason(answer: Mapping[str, Any]) -> str:
    if "refused" in answer:
        return str(answer["refused"])
    return f"it cannot be decoded: {str(answer.get('failed', 'no answer'))[:200]}"

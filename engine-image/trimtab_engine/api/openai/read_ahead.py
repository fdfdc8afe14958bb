"""Bounded buffer between the core and a client that reads its stream slowly. The core's output is always consumed, so
that a slow client affects no latency metric and blocks no queue.
"""

import asyncio
import logging
import sys
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

import msgspec

from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai.generation import Piece
from trimtab_engine.scheduling.sampling import TokenLogprobs

MAX_UNREAD_BYTES = 4 << 20
"""Per HTTP request. Text has about 4.5 bytes per token, so no response of a usual length reaches it; with 20
log-probabilities per token it holds 15,000 tokens."""
PART_BYTES = 16 << 10  # as Python objects; one part is one chunk of the stream, of about the same rendered size
LOGPROB_BYTES, TOKEN_ID_BYTES, TEXT_BYTES, PIECE_BYTES = 72, 36, 64, 400  # sizes of Python objects in bytes
SLOW_READER = "slow_reader"

logger = logging.getLogger("trimtab_engine.requests")


class PieceBuffer:
    """Buffered pieces, joined per choice: many deltas become one larger delta.

    Parts that have reached PART_BYTES are packed. `keeps_ids` is True if token IDs are needed.
    """

    def __init__(self, *, keeps_ids: bool) -> None:
        self._keeps_ids = keeps_ids
        self._packed: deque[bytes] = deque()
        self._open: dict[int, tuple[Piece, int]] = {}
        """Unpacked tail of each choice, and its size in bytes."""
        self.num_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._packed or self._open)

    def put(self, piece: Piece) -> None:
        joined, size = self._open.pop(piece.index, (None, 0))
        if joined is not None:
            piece.texts = None
        if not self._keeps_ids and piece.texts is None:
            piece.token_ids = []
        if joined is None:
            joined, added = piece, PIECE_BYTES + size_of(piece)
        else:
            added = size_of(piece)
            joined.join(piece)
        size += added
        self.num_bytes += added
        if size < PART_BYTES:
            self._open[piece.index] = joined, size
            return
        self._packed.append(msgspec.msgpack.encode(joined))
        self.num_bytes += len(self._packed[-1]) - size

    def take(self) -> Piece:
        """Remove and return the oldest part. The buffer must not be empty."""
        if self._packed:
            packed = self._packed.popleft()
            self.num_bytes -= len(packed)
            return msgspec.msgpack.decode(packed, type=Piece)
        piece, size = self._open.pop(next(iter(self._open)))
        self.num_bytes -= size
        return piece


def size_of(piece: Piece) -> int:
    """Return the approximate memory of a piece in bytes."""
    packed = piece.prompt_logprobs
    num_values = _num_values(piece.logprobs) + (0 if packed is None else 3 * len(packed) + packed.num_values)
    size = sys.getsizeof(piece.text) - sys.getsizeof("") + len(piece.texts or ()) * TEXT_BYTES
    return size + len(piece.token_ids) * TOKEN_ID_BYTES + num_values * LOGPROB_BYTES


def _num_values(positions: Sequence[TokenLogprobs]) -> int:
    return sum(3 + len(position.token_ids) for position in positions)


class ReadAhead(AsyncIterator[Piece]):
    """Pieces of a request for one reader. After the reader signals that it cannot accept more (`begin`), pieces are
    read ahead into this buffer. Above MAX_UNREAD_BYTES the request is aborted: the reader gets the buffered pieces,
    then an ApiError.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[Piece, None],
        request_id: str,
        *,
        keeps_ids: bool,
        max_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._pieces, self._request_id, self._max_bytes = pieces, request_id, max_bytes
        self.unread = PieceBuffer(keeps_ids=keeps_ids)
        self._reading: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._has_ended = False
        self._error: Exception | None = None

    def begin(self) -> None:
        """Start reading ahead. No reader may be waiting for a piece."""
        if self._reading is None:
            self._reading = asyncio.create_task(self._read())

    async def __anext__(self) -> Piece:
        if self._reading is None:
            return await anext(self._pieces)
        while not self.unread:
            if self._has_ended:
                raise self._error or StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        return self.unread.take()

    async def _read(self) -> None:
        try:
            async with aclosing(self._pieces) as pieces:
                async for piece in pieces:
                    self.unread.put(piece)
                    self._arrived.set()
                    if self.unread.num_bytes > self._max_bytes:
                        self._error = self._too_slow()
                        break
        except Exception as error:  # passed to the reader, which raises it
            self._error = error
        finally:
            self._has_ended = True
            self._arrived.set()

    def _too_slow(self) -> ApiError:
        logger.warning(
            "Aborted request %s: the client has more than %d unread bytes", self._request_id, self._max_bytes
        )
        return ApiError(
            408,
            f"the request was aborted: the client reads more slowly than the response is generated, and more than "
            f"{self._max_bytes} bytes were unread; read the stream faster, or request fewer log-probabilities or "
            f"choices",
            code=SLOW_READER,
        )

    async def aclose(self) -> None:
        """Close early, which aborts unfinished sequences."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._pieces.aclose()

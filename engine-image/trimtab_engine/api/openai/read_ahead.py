"""What waits for a client that takes its stream more slowly than it is made: as few bytes as it needs, and never more
than a bound. The core's tokens are read all the same, so that a slow client moves no clock and holds up no queue.
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
"""Of one HTTP request. Text is about 4.5 bytes a token, so no answer of a usual length comes near; with 20
log-probabilities at each token these are 15,000 tokens."""
PART_BYTES = 16 << 10  # as Python's objects; a part is one chunk of the stream, and rendered it is of about this size
LOGPROB_BYTES, TOKEN_ID_BYTES, TEXT_BYTES, PIECE_BYTES = 72, 36, 64, 400  # what Python takes for one of them
SLOW_READER = "slow_reader"

logger = logging.getLogger("trimtab_engine.requests")


class Unread:
    """Pieces that wait, joined as far as they are of one choice: of many deltas becomes a larger one.

    What has reached PART_BYTES is packed. `keeps_ids`: whether token ids are wanted.
    """

    def __init__(self, *, keeps_ids: bool) -> None:
        self._keeps_ids = keeps_ids
        self._packed: deque[bytes] = deque()
        self._open: dict[int, tuple[Piece, int]] = {}
        """By choice, what came behind all that is packed of it, and its bytes."""
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
        """The oldest part. There is one."""
        if self._packed:
            packed = self._packed.popleft()
            self.num_bytes -= len(packed)
            return msgspec.msgpack.decode(packed, type=Piece)
        piece, size = self._open.pop(next(iter(self._open)))
        self.num_bytes -= size
        return piece


def size_of(piece: Piece) -> int:
    """Bytes that what it brings takes, nearly."""
    num_values = _num_values(piece.logprobs) + _num_values(piece.prompt_logprobs or ())
    size = sys.getsizeof(piece.text) - sys.getsizeof("") + len(piece.texts or ()) * TEXT_BYTES
    return size + len(piece.token_ids) * TOKEN_ID_BYTES + num_values * LOGPROB_BYTES


def _num_values(positions: Sequence[TokenLogprobs]) -> int:
    return sum(3 + len(position.token_ids) for position in positions)


class ReadAhead(AsyncIterator[Piece]):
    """A request's pieces, for one reader. Once that one has said that it cannot take more (`begin`) they are read
    without it, and what it has not taken waits here. Above MAX_UNREAD_BYTES the request is aborted: its reader gets
    what waits, and then an ApiError."""

    def __init__(
        self,
        pieces: AsyncGenerator[Piece, None],
        request_id: str,
        *,
        keeps_ids: bool,
        max_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        self._pieces, self._request_id, self._max_bytes = pieces, request_id, max_bytes
        self.unread = Unread(keeps_ids=keeps_ids)
        self._reading: asyncio.Task[None] | None = None
        self._arrived = asyncio.Event()
        self._has_ended = False
        self._error: Exception | None = None

    def begin(self) -> None:
        """Read ahead, from now on. Nobody waits for a piece at this time."""
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
        except Exception as error:  # handed to the reader, who raises it
            self._error = error
        finally:
            self._has_ended = True
            self._arrived.set()

    def _too_slow(self) -> ApiError:
        logger.warning(
            "Aborted request %s: its client has left more than %d bytes unread", self._request_id, self._max_bytes
        )
        return ApiError(
            408,
            f"the request was aborted: this client reads more slowly than the answer is made, and more than "
            f"{self._max_bytes} bytes of it waited; read the stream as it comes, or ask for fewer log-probabilities or "
            f"choices at once",
            code=SLOW_READER,
        )

    async def aclose(self) -> None:
        """Leave early, which aborts what still runs."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        await self._pieces.aclose()

"""What a source of models has to be able to do, and how it says what went wrong. Nothing of it is a source's own."""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar, runtime_checkable

from trimtab_engine.errors import ModelError
from trimtab_engine.sources.files import Listing, RemoteFile
from trimtab_engine.sources.name import RemoteModel

TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
"""Statuses of HTTP that another attempt may turn into an answer."""
PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Between attempts at an answer."""
ANSWER_SECONDS = 20.0
PART_BYTES = 1 << 20  # of a stream, read at once

Answer = TypeVar("Answer")


class SourceSilent(ModelError):
    """Nobody answers, or not now: what is in the cache already has to do."""


class Interrupted(Exception):
    """The bytes stopped coming, for a reason that another attempt may not meet."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Where models are kept, and how many bytes all of them may take; None: huggingface_hub's own folder, any number.
    `endpoint` of the hub: None is HF_ENDPOINT's."""

    folder: Path | None = None
    limit_bytes: int | None = None
    endpoint: str | None = None
    has_weights: bool = True
    """Whether weights are wanted; for random ones the texts do."""
    s3_addressing: str | None = None
    """`path`, `virtual`, or None: virtual for Amazon's own, path where another endpoint was named."""
    registry_auth_file: Path | None = None
    """Accounts of registries, in the form of Docker's config.json."""
    registry_plain_http: bool = False


class Checksum(Protocol):
    """Told of all bytes of a file in order, it knows whether they are those that the source described."""

    def update(self, data: memoryview | bytes, /) -> None: ...

    def is_right(self) -> bool: ...


class Arriving(Protocol):
    """A file that comes in: `size` bytes of it are here, and what is written is counted and checked."""

    size: int

    def write(self, data: object, /) -> int: ...

    def begin_anew(self) -> None:
        """Throw away what is here: the other side did not go on where it was asked to."""


class Source(Protocol):
    """Where models of one scheme come from."""

    @property
    def shown(self) -> str:
        """Who is asked, as errors say it: `the hub at https://…`."""

    def forbidden(self) -> str | None:
        """Why nobody may be asked, and what to do; None: somebody may."""

    def ask(self, model: RemoteModel, *, patient: bool = True) -> Listing:
        """The files of the model at what its revision means now. Raises ModelError with what to do, SourceSilent where
        there is no answer; `patient`: not before several attempts."""

    def checksum(self, listing: Listing, file: RemoteFile) -> Callable[[], Checksum]:
        """What makes a checksum of this file, each time that its bytes begin. Raises ModelError, SourceSilent."""

    def fill(self, listing: Listing, file: RemoteFile, arriving: Arriving) -> None:
        """Write what is missing of the file, over one connection. Raises Interrupted, or ModelError where no other
        attempt would help."""

    def to_have_it(self, model: RemoteModel) -> str:
        """What to do elsewhere to have the model here without asking, where asking is forbidden."""

    def close(self) -> None:
        """Let go of its connections."""


def patiently(once: Callable[[], Answer], *, patient: bool = True) -> Answer:
    """What `once` is answered, which raises SourceSilent while nobody answers: the last one of several attempts'."""
    pauses = list(PAUSES_SECONDS) if patient else []
    while True:
        try:
            return once()
        except SourceSilent:
            if not pauses:
                raise
        time.sleep(pauses.pop(0))


@runtime_checkable
class PackedSource(Source, Protocol):
    """A source whose models may come in archives."""

    def reader(self, listing: Listing, archive: RemoteFile, buffer_bytes: int) -> BinaryIO:
        """The archive as a file that is read where it is, in pieces. It raises ModelError, SourceSilent."""


class Hashed:
    """A checksum of hashlib's, compared with the digest that was promised."""

    def __init__(self, hashed: "hashlib._Hash", digest: str) -> None:
        self._hash, self._digest = hashed, digest

    def update(self, data: memoryview | bytes, /) -> None:
        self._hash.update(data)

    def is_right(self) -> bool:
        return self._hash.hexdigest() == self._digest

"""Interface of model sources, and their errors. Contains nothing specific to one source."""

import hashlib
import logging
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

logger = logging.getLogger("trimtab_engine.sources")

Answer = TypeVar("Answer")


class SourceUnavailable(ModelError):
    """Raised if the source does not respond: the cached version is used instead."""


class Interrupted(Exception):
    """Raised if a transfer was interrupted and a retry may succeed."""


@dataclass(frozen=True, slots=True)
class FetchOptions:
    """Cache folder, and its size limit in bytes; None for huggingface_hub's folder, and no limit. `endpoint` of the
    hub: None for HF_ENDPOINT.
    """

    folder: Path | None = None
    limit_bytes: int | None = None
    endpoint: str | None = None
    has_weights: bool = True
    """False if random weights are used, so that text files suffice."""
    s3_addressing: str | None = None
    """`path`, `virtual`, or None: virtual for Amazon, path for other endpoints."""
    registry_auth_file: Path | None = None
    """Accounts of registries, in the form of Docker's config.json."""
    registry_plain_http: bool = False


class Checksum(Protocol):
    """Incremental verification of a file's bytes against the source's description."""

    def update(self, data: memoryview | bytes, /) -> None: ...

    def is_right(self) -> bool: ...


class Arriving(Protocol):
    """A file being downloaded: `size` bytes exist, and written bytes are counted and hashed."""

    size: int

    def write(self, data: object, /) -> int: ...

    def restart(self) -> None:
        """Discard the existing bytes: the server ignored the range request."""


class Source(Protocol):
    """Source of models of one scheme."""

    @property
    def shown(self) -> str:
        """Name of the source in messages: `the hub at https://…`."""

    def forbidden(self) -> str | None:
        """Reason why requests are disabled, and what to do; None if they are enabled."""

    def ask(self, model: RemoteModel, *, patient: bool = True) -> Listing:
        """Return the files of the model at its revision.

        Raises:
            ModelError: there is no such model, with what to do.
            SourceSilent: there is no response; if `patient`, after several attempts.
        """

    def checksum(self, listing: Listing, file: RemoteFile) -> Callable[[], Checksum]:
        """Return a new checksum for each attempt at this file.

        Raises:
            ModelError: the checksum cannot be determined.
            SourceSilent: there is no response.
        """

    def fill(self, listing: Listing, file: RemoteFile, arriving: Arriving) -> None:
        """Fetch the rest of the file over one connection.

        Raises:
            Interrupted: a retry may succeed.
            ModelError: a retry would not help.
        """

    def offline_advice(self, model: RemoteModel) -> str:
        """Advice to get the model on a machine with network access, if requests are disabled."""

    def close(self) -> None:
        """Let go of its connections."""


def patiently(once: Callable[[], Answer], *, patient: bool = True) -> Answer:
    """Return the result of `once`, with retries on SourceUnavailable, the first of which is logged.

    Raises:
        SourceUnavailable: All attempts failed.
    """
    pauses = list(PAUSES_SECONDS) if patient else []
    while True:
        try:
            return once()
        except SourceUnavailable as error:
            if not pauses:
                raise
            if len(pauses) == len(PAUSES_SECONDS):
                logger.warning("%s; retrying for %.0f s", error, sum(pauses))
        time.sleep(pauses.pop(0))


@runtime_checkable
class PackedSource(Source, Protocol):
    """A source whose models can be in archives."""

    def reader(self, listing: Listing, archive: RemoteFile, buffer_bytes: int) -> BinaryIO:
        """The archive as a file that is read where it is, in pieces. It raises ModelError, SourceSilent."""


class Hashed:
    """A hashlib checksum, compared with the expected digest."""

    def __init__(self, hashed: "hashlib._Hash", digest: str) -> None:
        self._hash, self._digest = hashed, digest

    def update(self, data: memoryview | bytes, /) -> None:
        self._hash.update(data)

    def is_right(self) -> bool:
        return self._hash.hexdigest() == self._digest

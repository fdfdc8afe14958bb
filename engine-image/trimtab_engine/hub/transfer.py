"""Files from the hub into the cache: several at once, each going on where it was cut, none shown before its checksum
was right.

huggingface_hub's own downloads begin a file anew with every process. A pod that ends in the middle of a shard of 5 GB
must not, so the bytes go through its HTTP client into a file of ours.
"""

import errno
import hashlib
import io
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import httpx2
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there, marked nowhere
from huggingface_hub.utils.tqdm import silent_tqdm

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.hub.cache import Shelf
from trimtab_engine.hub.files import HubFile, Listing
from trimtab_engine.hub.remote import TRANSIENT, refused, shown, url_of

AT_ONCE = 4  # files: one connection seldom fills a data centre's line
MAX_FRUITLESS = 4  # attempts in a row that bring nothing, beside those that huggingface_hub makes for each
LONGEST_PAUSE_SECONDS = 20.0
MAX_WRONG = 2  # times that a file may come with another checksum
LOOK_SECONDS = 0.25
STOP_SECONDS = 1.0  # for threads to see that nobody waits for them any more
READ_BYTES = 1 << 20
NOT_SATISFIABLE = 416


class _Stopped(Exception):
    """Nobody waits for this file any more."""


def transfer(
    listing: Listing,
    files: Sequence[HubFile],
    shelf: Shelf,
    *,
    endpoint: str | None,
    note: Callable[[int], None],
    waiting: Callable[[], None],
) -> None:
    """Fetch what is missing of `files`. `note` is told from several threads of bytes that came, `waiting` is called in
    this one meanwhile. Raises ModelError or ConfigError for the first file that cannot be had."""
    todo: queue.SimpleQueue[HubFile] = queue.SimpleQueue()
    for file in files:
        if not shelf.has(file):
            todo.put(file)
    stop, failures = threading.Event(), queue.SimpleQueue[BaseException]()

    def work() -> None:
        try:
            while not stop.is_set():
                _fetch(listing, todo.get_nowait(), shelf, endpoint, note, stop)
        except (queue.Empty, _Stopped):
            return
        except BaseException as error:
            failures.put(error)
            stop.set()

    threads = [threading.Thread(target=work, name=f"hub-{i}", daemon=True) for i in range(min(AT_ONCE, todo.qsize()))]
    try:
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            waiting()
            for thread in threads:
                thread.join(LOOK_SECONDS / len(threads))
    finally:
        stop.set()
        for thread in threads:
            thread.join(STOP_SECONDS)
    if not failures.empty():
        raise failures.get()


def _fetch(
    listing: Listing,
    file: HubFile,
    shelf: Shelf,
    endpoint: str | None,
    note: Callable[[int], None],
    stop: threading.Event,
) -> None:
    blob, incomplete = shelf.blob(file), shelf.incomplete(file)
    for _ in range(MAX_WRONG):
        try:
            with _Arriving(incomplete, file, note, stop) as arriving:
                _fill(listing, file, arriving, endpoint, stop)
                is_right = arriving.is_right
        except OSError as error:
            raise _cannot_write(incomplete, error) from None
        if is_right:
            incomplete.replace(blob)
            return
        note(-incomplete.stat().st_size)
        incomplete.unlink()
    raise ModelError(
        f"{listing.model}: {file.name} came {MAX_WRONG} times with another checksum than the hub's; something between "
        f"here and {shown(endpoint)} (a proxy, a mirror) changes it: take it out, or fetch from elsewhere"
    )


def _fill(listing: Listing, file: HubFile, arriving: "_Arriving", endpoint: str | None, stop: threading.Event) -> None:
    """Fetch until all bytes are there, over as many connections as it takes."""
    url, fruitless = url_of(listing, file, endpoint), 0
    while arriving.size < file.size:
        before = arriving.size
        try:
            http_get(
                url,
                cast(BinaryIO, arriving),
                resume_size=before,
                headers=build_hf_headers(),
                tqdm_class=cast("type", silent_tqdm),
            )
            words = "it ended early"
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status == NOT_SATISFIABLE:
                arriving.begin_anew()
            elif status not in TRANSIENT:
                raise refused(listing.model, error, endpoint) from None
            words = f"the hub answers {status}"
        except httpx2.HTTPError as error:
            words = " ".join(str(error).split()) or type(error).__name__
        except OSError as error:
            if error.errno is not None:  # the disk's; huggingface_hub's own about a wrong length has no number
                raise
            words = "it ended early"
        fruitless = 0 if arriving.size > before else fruitless + 1
        if fruitless >= MAX_FRUITLESS:
            raise ModelError(
                f"{listing.model}: {file.name} does not come any further than {arriving.size} of {file.size} bytes "
                f"({words}); what is here is kept, so start again when {shown(endpoint)} answers"
            )
        if arriving.size < file.size and stop.wait(min(LONGEST_PAUSE_SECONDS, 0.5 * 2**fruitless)):
            raise _Stopped


class _Arriving(io.RawIOBase):
    """A file that comes in: what is written is counted and hashed. Opened where an earlier process left it."""

    def __init__(self, path: Path, file: HubFile, note: Callable[[int], None], stop: threading.Event) -> None:
        super().__init__()
        self._file, self._note, self._stop = file, note, stop
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._stream = path.open("r+b", buffering=0)
        self.size = 0
        self._hash = self._new_hash()
        while data := self._stream.read(READ_BYTES):
            self._hash.update(data)
            self.size += len(data)
        if self.size > file.size:
            self.begin_anew()

    def _new_hash(self) -> "hashlib._Hash":
        if self._file.has_sha256:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % self._file.size, usedforsecurity=False)

    @property
    def is_right(self) -> bool:
        """Whether all of it is here and is what the hub described."""
        return self.size == self._file.size and self._hash.hexdigest() == self._file.digest

    def write(self, data: object) -> int:
        if self._stop.is_set():
            raise _Stopped
        view = memoryview(cast(bytes, data))
        written = 0
        while written < len(view):
            written += self._stream.write(view[written:])
        self._hash.update(view)
        self.size += len(view)
        self._note(len(view))
        return len(view)

    def tell(self) -> int:
        return self.size

    def seek(self, offset: int, whence: int = 0) -> int:
        """Back to the beginning: the server did not go on where it was asked to."""
        assert (offset, whence) == (0, 0)
        self.begin_anew()
        return 0

    def truncate(self, size: int | None = None) -> int:
        return self.size

    def begin_anew(self) -> None:
        """Throw away what is here."""
        self._note(-self.size)
        self._stream.seek(0)
        self._stream.truncate()
        self.size, self._hash = 0, self._new_hash()

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
        super().close()


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(
            f"{path.parent} is full; what came so far is kept: give the volume more room, or use another folder with "
            f"--download-dir"
        )
    return ConfigError(f"{path} cannot be written: {error.strerror or error}; see to the volume of --download-dir")

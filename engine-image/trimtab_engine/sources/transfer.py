"""Parallel downloads into the cache, each resumable, each published only after its checksum matched: concurrent writers
cost bandwidth but never corrupt a weight.
"""

import errno
import queue
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self, cast

from trimtab_engine.errors import ConfigError, ModelError
from trimtab_engine.sources.cache import ModelCache
from trimtab_engine.sources.files import Listing, RemoteFile
from trimtab_engine.sources.source import Checksum, Interrupted, Source

AT_ONCE = 4  # files: one connection seldom fills a data centre's line
MAX_FRUITLESS = 4  # consecutive attempts without progress, in addition to the client's own retries
LONGEST_PAUSE_SECONDS = 20.0
MAX_WRONG = 2  # attempts after a wrong checksum
LOOK_SECONDS = 0.25
STOP_SECONDS = 1.0  # polling interval of the stop flag in threads
READ_BYTES = 1 << 20


class _Stopped(Exception):
    """Raised in threads when the download was cancelled."""


def transfer(
    source: Source,
    listing: Listing,
    files: Sequence[RemoteFile],
    model_cache: ModelCache,
    *,
    note: Callable[[int], None],
    waiting: Callable[[], None],
) -> None:
    """Fetch the missing parts of `files`. `note` is called from several threads for received bytes, `waiting` from this
    thread meanwhile.

    Raises:
        ModelError, ConfigError: the first file that cannot be fetched.
    """
    todo: queue.SimpleQueue[RemoteFile] = queue.SimpleQueue()
    for file in {one.digest: one for one in files}.values():  # two names may have one content
        if not model_cache.has(file):
            todo.put(file)
    stop, failures = threading.Event(), queue.SimpleQueue[BaseException]()

    def work() -> None:
        try:
            while not stop.is_set():
                _fetch(source, listing, todo.get_nowait(), model_cache, note, stop)
        except (queue.Empty, _Stopped):
            return
        except BaseException as error:
            failures.put(error)
            stop.set()

    threads = [threading.Thread(target=work, name=f"fetch-{i}", daemon=True) for i in range(min(AT_ONCE, todo.qsize()))]
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
    source: Source,
    listing: Listing,
    file: RemoteFile,
    model_cache: ModelCache,
    note: Callable[[int], None],
    stop: threading.Event,
) -> None:
    blob, incomplete = model_cache.blob(file), model_cache.incomplete(file)
    checksum = source.checksum(listing, file)
    for _ in range(MAX_WRONG):
        try:
            with _Incoming(incomplete, file, checksum, note, stop) as arriving:
                _fill(source, listing, file, arriving, stop)
                is_right = arriving.is_right
        except OSError as error:
            raise _cannot_write(incomplete, error) from None
        if is_right:
            _name(incomplete, blob, file, model_cache)
            return
        note(-incomplete.stat().st_size)
        incomplete.unlink()
    raise ModelError(
        f"{listing.model}: {file.name} was received {MAX_WRONG} times with a wrong checksum; something "
        f"between here and {source.shown} (a proxy, a mirror) changes it: take it out, or fetch from elsewhere"
    )


def _name(incomplete: Path, blob: Path, file: RemoteFile, model_cache: ModelCache) -> None:
    """Give a checked file its name; another writer may have been first."""
    try:
        incomplete.replace(blob)
    except FileNotFoundError:
        if not model_cache.has(file):
            raise


def _fill(source: Source, listing: Listing, file: RemoteFile, arriving: "_Incoming", stop: threading.Event) -> None:
    """Fetch until all bytes are there, over as many connections as it takes."""
    fruitless = 0
    while arriving.size < file.size:
        before, words = arriving.size, "it ended early"
        try:
            source.fill(listing, file, arriving)
        except Interrupted as error:
            words = str(error)
        fruitless = 0 if arriving.size > before else fruitless + 1
        if fruitless >= MAX_FRUITLESS:
            raise ModelError(
                f"{listing.model}: {file.name} stopped at {arriving.size} of {file.size} bytes "
                f"({words}); the received part is kept, so start again when {source.shown} is available"
            )
        if arriving.size < file.size and stop.wait(min(LONGEST_PAUSE_SECONDS, 0.5 * 2**fruitless)):
            raise _Stopped


class _Incoming:
    """A file being downloaded: written bytes are counted and hashed. Opened at the position that an earlier process
    reached.
    """

    def __init__(
        self,
        path: Path,
        file: RemoteFile,
        new_checksum: Callable[[], Checksum],
        note: Callable[[int], None],
        stop: threading.Event,
    ) -> None:
        self._file, self._new_checksum, self._note, self._stop = file, new_checksum, note, stop
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        self._stream = path.open("r+b", buffering=0)
        self.size = 0
        self._checksum = new_checksum()
        while data := self._stream.read(READ_BYTES):
            self._checksum.update(data)
            self.size += len(data)
        if self.size > file.size:
            self.restart()

    @property
    def is_right(self) -> bool:
        """Return True if the file is complete and matches its checksum."""
        return self.size == self._file.size and self._checksum.is_right()

    def write(self, data: object, /) -> int:
        if self._stop.is_set():
            raise _Stopped
        view = memoryview(cast(bytes, data))
        if self.size + len(view) > self._file.size:
            self.restart()
            raise Interrupted(f"received more than its {self._file.size} bytes")
        written = 0
        while written < len(view):
            written += self._stream.write(view[written:])
        self._checksum.update(view)
        self.size += len(view)
        self._note(len(view))
        return len(view)

    def restart(self) -> None:
        """Discard the existing bytes."""
        self._note(-self.size)
        self._stream.seek(0)
        self._stream.truncate()
        self.size, self._checksum = 0, self._new_checksum()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()


def _cannot_write(path: Path, error: OSError) -> ConfigError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ConfigError(
            f"{path.parent} is full; the received part is kept: enlarge the volume, or use another folder with "
            f"--download-dir"
        )
    return ConfigError(f"{path} cannot be written: {error.strerror or error}; check the volume of --download-dir")

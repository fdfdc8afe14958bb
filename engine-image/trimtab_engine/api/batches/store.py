"""Files and batches in a directory, which outlive the engine.

Layout: `files/ID` and `files/ID.json`; `batches/ID.json`, and `batches/ID.output` and `batches/ID.errors` while a batch
runs. Records are replaced atomically, answers are appended. One engine at a time holds the lock on the directory,
because two would answer lines twice.
"""

import asyncio
import fcntl
import os
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from trimtab_engine.api.batches.records import FINAL, Batch, FileRecord
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.errors import ConfigError

MAX_FILES = 10_000
MAX_STORED_BYTES = 100 << 30  # over all files, as for an organization at OpenAI
LIFE_SECONDS = 30 * 24 * 3600  # of files and finished batches; OpenAI's default for files of batches

Record = TypeVar("Record", FileRecord, Batch)


def open_lock(folder: Path) -> BinaryIO:
    """Create the directory and return its lock file, which is not locked yet.

    Raises:
        ConfigError: The directory cannot be used.
    """
    try:
        for each in (folder / "files", folder / "batches"):
            each.mkdir(parents=True, exist_ok=True)
        return (folder / "lock").open("wb")
    except OSError as error:
        raise ConfigError(
            f"--batch-dir: {folder} cannot be used ({error.strerror}); give a writable directory"
        ) from None


def try_lock(lock: BinaryIO) -> bool:
    """Lock the directory until the file is closed. Return False if another engine has locked it. The kernel releases
    the lock of a killed engine.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class BatchStore:
    """The records of a locked directory. They are in memory, too; contents are not."""

    def __init__(self, folder: Path, max_files: int = MAX_FILES, max_bytes: int = MAX_STORED_BYTES) -> None:
        """Read the directory, and remove what a killed engine left half-written.

        Raises:
            OSError: A record cannot be read.
        """
        self._files, self._batches = folder / "files", folder / "batches"
        self._max_files, self._max_bytes = max_files, max_bytes
        self._disk = ThreadPoolExecutor(1, "batch-store")
        """One thread, so that the records of a batch are written in the order of its changes."""
        self.batches = {record.id: record for record in _read(self._batches, Batch)}
        self.files = {r.id: r for r in _read(self._files, FileRecord) if self.path_of(r.id).exists()}
        results = {file_id for batch in self.unfinished() for file_id in (batch.result_id("o"), batch.result_id("e"))}
        for path in self._files.iterdir():
            if path.name.removesuffix(".json") not in self.files.keys() | results:
                path.unlink()

    def close(self) -> None:
        """Finish pending writes."""
        self._disk.shutdown()

    async def _on_disk(self, write: Callable[[], None]) -> None:
        await asyncio.get_running_loop().run_in_executor(self._disk, write)

    # --- files --------------------------------------------------------------------------------------------------------

    def path_of(self, file_id: str) -> Path:
        """Return the path of a file's content. `file_id` must be known or made here."""
        return self._files / file_id

    def check_room(self, num_bytes: int = 0) -> None:
        """Raise ApiError 400 if another file of this size exceeds a quota."""
        if len(self.files) >= self._max_files:
            raise ApiError(400, f"{len(self.files)} files are stored, the maximum; delete files that are not needed")
        stored = sum(record.bytes for record in self.files.values())
        if stored + num_bytes > self._max_bytes:
            raise ApiError(
                400, f"{stored} of {self._max_bytes} bytes are stored; delete files that are no longer needed"
            )

    async def add_file(self, record: FileRecord, source: Path) -> None:
        """Move a complete content into the store. Repeating it after a crash has no further effect."""

        def write() -> None:
            if source.exists():
                with source.open("rb") as file:
                    os.fsync(file.fileno())
                os.replace(source, self.path_of(record.id))
            _write(self._files, record)

        await self._on_disk(write)
        self.files[record.id] = record

    async def remove_file(self, record: FileRecord) -> None:
        self.files.pop(record.id, None)

        def remove() -> None:
            self.path_of(record.id).unlink(missing_ok=True)
            (self._files / f"{record.id}.json").unlink(missing_ok=True)

        await self._on_disk(remove)

    # --- batches ------------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[Batch]:
        return [batch for batch in self.batches.values() if batch.status not in FINAL]

    def reader_of(self, file_id: str) -> Batch | None:
        """Return the unfinished batch that reads a file, or None."""
        return next((batch for batch in self.unfinished() if batch.input_file_id == file_id), None)

    async def save(self, batch: Batch) -> None:
        """Write a batch's record as it is now."""
        self.batches[batch.id] = batch
        content = msgspec.json.encode(batch)
        await self._on_disk(lambda: _replace(self._batches / f"{batch.id}.json", content))

    def output_path(self, batch: Batch) -> Path:
        """Return the path of answers with status 200 while the batch runs."""
        return self._batches / f"{batch.id}.output"

    def error_path(self, batch: Batch) -> Path:
        """Return the path of all other answers while the batch runs."""
        return self._batches / f"{batch.id}.errors"

    async def remove_expired(self) -> None:
        """Remove expired files that no unfinished batch reads, and old finished batches."""
        now = time.time()
        for record in list(self.files.values()):
            if record.expires_at is not None and record.expires_at < now and self.reader_of(record.id) is None:
                await self.remove_file(record)
        for batch in list(self.batches.values()):
            if batch.status in FINAL and batch.expires_at + LIFE_SECONDS < now:
                del self.batches[batch.id]
                (self._batches / f"{batch.id}.json").unlink(missing_ok=True)


def new_id(prefix: str) -> str:
    return f"{prefix}{uuid.uuid4().hex}"


def _read(folder: Path, kind: type[Record]) -> Iterable[Record]:
    for path in sorted(folder.glob("*.json")):
        try:
            yield msgspec.json.decode(path.read_bytes(), type=kind)
        except msgspec.DecodeError as error:
            raise OSError(f"{path}: {error}") from None


def _write(folder: Path, record: FileRecord) -> None:
    _replace(folder / f"{record.id}.json", msgspec.json.encode(record))


def _replace(path: Path, content: bytes) -> None:
    """Replace a file. Its content is on the disk before its name is, and both are when this returns."""
    new = path.with_suffix(".new")
    try:
        with new.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
    except OSError:
        new.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

"""The directory of files and batches."""

import asyncio
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from trimtab_engine.api.batches.records import Batch, FileRecord, Status
from trimtab_engine.api.batches.store import LIFE_SECONDS, BatchStore, open_lock, try_lock
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.errors import ConfigError


def make_file(file_id: str = "file-1", **fields: Any) -> FileRecord:
    given: dict[str, Any] = {"owner": "", "filename": "f", "purpose": "batch", "bytes": 3, "created_at": 1} | fields
    return FileRecord(id=file_id, **given)


def make_batch(status: Status = "in_progress", batch_id: str = "batch_1", **fields: Any) -> Batch:
    given: dict[str, Any] = {"owner": "", "endpoint": "/v1/completions", "input_file_id": "file-1"}
    given |= {"completion_window": "24h", "created_at": 1, "expires_at": 2, "result_life": 3600, "status": status}
    return Batch(id=batch_id, **given | fields)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    open_lock(tmp_path / "batches").close()
    return tmp_path / "batches"


def add(store: BatchStore, record: FileRecord) -> None:
    source = store.path_of(f"{record.id}.upload")
    source.write_bytes(b"abc")
    asyncio.run(store.add_file(record, source))


def test_store_restart_keeps_files_and_batches(folder: Path) -> None:
    store = BatchStore(folder)
    add(store, make_file())
    asyncio.run(store.save(make_batch("validating")))
    asyncio.run(store.save(make_batch("in_progress")))
    store.close()
    again = BatchStore(folder)
    assert (again.files, again.batches) == (store.files, store.batches)
    assert again.path_of("file-1").read_bytes() == b"abc"


def test_store_restart_removes_half_written_files(folder: Path) -> None:
    store = BatchStore(folder)
    add(store, make_file())
    asyncio.run(store.save(make_batch()))
    files = folder / "files"
    for name in ("file-2.upload", "file-3", "file-4.new", "file-1o"):  # the last is an output file without a record
        (files / name).write_bytes(b"x")
    (files / "file-5.json").write_bytes((files / "file-1.json").read_bytes().replace(b"file-1", b"file-5"))
    assert list(BatchStore(folder).files) == ["file-1"]
    assert sorted(os.listdir(files)) == ["file-1", "file-1.json", "file-1o"]


def test_store_add_file_can_be_repeated(folder: Path) -> None:
    store = BatchStore(folder)
    add(store, make_file())
    asyncio.run(store.add_file(make_file(), folder / "moved"))
    assert store.path_of("file-1").read_bytes() == b"abc"


def test_store_failed_write_leaves_the_old_record(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(folder)
    asyncio.run(store.save(make_batch("validating")))

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="No space left"):
        asyncio.run(store.save(make_batch("in_progress")))
    monkeypatch.undo()
    assert BatchStore(folder).batches["batch_1"].status == "validating"
    assert os.listdir(folder / "batches") == ["batch_1.json"]


def test_store_quotas_reject_more_files(folder: Path) -> None:
    store = BatchStore(folder, max_files=2, max_bytes=10)
    add(store, make_file())
    store.check_room(7)
    with pytest.raises(ApiError, match="3 of 10 bytes are stored"):
        store.check_room(8)
    add(store, make_file("file-2"))
    with pytest.raises(ApiError, match="2 files are stored"):
        store.check_room()


def test_store_expired_files_of_running_batches_stay(folder: Path) -> None:
    store = BatchStore(folder)
    for file_id in ("file-1", "file-2", "file-3"):
        add(store, make_file(file_id, expires_at=1 if file_id != "file-3" else int(time.time()) + 100))
    asyncio.run(store.save(make_batch()))
    asyncio.run(store.save(make_batch("failed", "batch_2", input_file_id="file-2")))
    recent = int(time.time()) - LIFE_SECONDS + 100
    asyncio.run(store.save(make_batch("failed", "batch_3", expires_at=recent)))
    asyncio.run(store.remove_expired())
    assert sorted(store.files) == ["file-1", "file-3"]
    assert sorted(store.batches) == ["batch_1", "batch_3"]
    again = BatchStore(folder)
    assert (again.files.keys(), again.batches.keys()) == (store.files.keys(), store.batches.keys())


LOCKER = """
import sys
from pathlib import Path
from trimtab_engine.api.batches.store import open_lock, try_lock
lock = open_lock(Path(sys.argv[1]))
print(try_lock(lock), flush=True)
sys.stdin.read()
"""


def test_lock_of_a_killed_engine_is_free(folder: Path) -> None:
    command = [sys.executable, "-c", LOCKER, str(folder)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "True\n"
        lock = open_lock(folder)
        assert not try_lock(lock)
        other.kill()
    assert try_lock(lock)
    lock.close()


def test_directory_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--batch-dir: .*file cannot be used \(Not a directory\); give a writable"):
        open_lock(tmp_path / "file")

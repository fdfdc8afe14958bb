"""Runs batches with the sequence slots that interactive requests leave free, and resumes them after a restart.

Each answer is appended to a file of the batch as soon as it exists, and the next start skips answered lines. Only a
line that was computed but not appended yet is computed again.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, closing
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from starlette.types import ASGIApp

from trimtab_engine.api.batches.internal_call import call
from trimtab_engine.api.batches.lines import (
    AnswerFile,
    InputLine,
    answer_line,
    answered_numbers,
    check_lines,
    requests_after,
)
from trimtab_engine.api.batches.records import FINAL, Batch, FileRecord, LineError, Status
from trimtab_engine.api.batches.store import BatchStore, open_lock, try_lock
from trimtab_engine.api.http.errors import ApiError
from trimtab_engine.api.openai.state import RETRY_SECONDS, ServerState

BATCH_PRIORITY = 1 << 20
"""Smallest priority number of a batch's requests: --scheduling-policy priority admits them after all others."""
IDLE_SHARE, BUSY_SHARE = 3 / 4, 1 / 8
"""Maximum share of max_num_seqs for batches: without and with other requests."""
BUSY_SECONDS = 10.0  # since the last request of others: the next one should find few lines in progress
SLOT_POLL_SECONDS = 0.1  # other requests end without a notification
LOCK_POLL_SECONDS = 1.0
REJECTED_RETRY_SECONDS = 1.0  # after 503, while the engine is paused or its queue is full
FAILED_RETRY_SECONDS = 30.0  # after an error of the disk
SWEEP_SECONDS = 3600.0
TOO_LATE = {"code": "batch_expired", "message": "the request was not run before the batch's completion window ended"}

IN_USE = "another engine uses --batch-dir; send files and batches to that engine, or retry when it has ended"

Item = TypeVar("Item")

logger = logging.getLogger("trimtab_engine.batches")


class BatchRunner:
    """The batches of one server. `app` answers single requests.

    While another engine has locked the directory, `store` raises an error and no batch runs here.
    """

    def __init__(self, state: ServerState, folder: Path, app: ASGIApp) -> None:
        """Create and, if possible, lock the directory. Raises ConfigError if it cannot be used."""
        self._state, self._folder, self._app = state, folder, app
        self._lock = open_lock(folder)
        self._is_locked = try_lock(self._lock)
        self._store: BatchStore | None = None
        self._unavailable = IN_USE
        self._keeper: asyncio.Task[None] | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._turn = asyncio.Lock()
        """Held while a batch waits for a slot: batches take turns."""
        self._num_running = 0
        self._busy_until = 0.0
        self._slot_freed = asyncio.Event()

    @property
    def store(self) -> BatchStore:
        """The directory's records. Raises ApiError 503 while another engine has locked it, or if it is damaged."""
        if self._store is None:
            raise ApiError(503, self._unavailable, retry_after=int(LOCK_POLL_SECONDS))
        return self._store

    async def start(self) -> None:
        """Resume the batches of an earlier engine; their requests wait until this one serves."""
        if self._is_locked:
            await self._resume()
        self._keeper = asyncio.create_task(self._keep())

    async def _keep(self) -> None:
        if not self._is_locked:
            logger.warning("--batch-dir: another engine uses %s; this one takes over when it ends", self._folder)
        while True:
            if not self._is_locked and try_lock(self._lock):
                self._is_locked = True
                await self._resume()
            if self._store is not None:
                await self._store.remove_expired()
            await asyncio.sleep(SWEEP_SECONDS if self._is_locked else LOCK_POLL_SECONDS)

    async def _resume(self) -> None:
        try:
            self._store = await asyncio.to_thread(BatchStore, self._folder)
        except OSError as error:
            self._unavailable = f"--batch-dir cannot be read ({error}); remove the damaged file, and restart the engine"
            logger.error("%s: %s; files and batches return 503", self._folder, self._unavailable)
            return
        for batch in self._store.unfinished():
            logger.info("batch %s is resumed", batch.id)
            self.run(batch)

    def check_accepts(self) -> None:
        """Raise ApiError 503 if the engine ends."""
        if self._state.is_ending:
            raise ApiError(503, "the engine is draining: new batches are rejected", retry_after=RETRY_SECONDS)

    async def create(self, batch: Batch) -> None:
        """Store and run a new batch. Raises OSError, for example if the disk is full."""
        try:
            await self.store.save(batch)
        except OSError:
            del self.store.batches[batch.id]
            raise
        self.run(batch)

    def run(self, batch: Batch) -> None:
        """Run a batch until its end, or until the engine ends."""
        task = self._tasks[batch.id] = asyncio.create_task(self._run(batch))
        task.add_done_callback(lambda _: self._tasks.pop(batch.id, None))

    async def cancel(self, batch: Batch) -> None:
        """Abort a batch's running requests. Answers that exist are kept. Raises OSError."""
        if (task := self._tasks.get(batch.id)) is not None:
            await _stop(task)
        try:
            if batch.status not in FINAL:  # it may have ended meanwhile
                await self._set(batch, "cancelling")
        finally:
            self.run(batch)

    def stop(self) -> None:
        """Abort all requests. The batches are resumed when the next engine starts."""
        for task in self._tasks.values():
            task.cancel()

    async def close(self) -> None:
        """Abort all requests, and release the directory."""
        await _stop(*self._tasks.values(), *([] if self._keeper is None else [self._keeper]))
        if self._store is not None:
            self._store.close()
        self._lock.close()

    # --- one batch ----------------------------------------------------------------------------------------------------

    async def _run(self, batch: Batch) -> None:
        """Run a batch; after an error of the disk, again."""
        while True:
            try:
                if batch.status == "validating":
                    await self._validate(batch)
                if batch.status == "in_progress":
                    await self._answer_lines(batch)
                if batch.status not in FINAL:
                    await self._finish(batch)
                return
            except Exception as error:
                reason = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
                is_bug = not isinstance(reason, OSError)
                logger.error(
                    "batch %s is interrupted (%s); it is resumed in %.0f s",
                    batch.id, reason, FAILED_RETRY_SECONDS, exc_info=is_bug,
                )  # fmt: skip
                await asyncio.sleep(FAILED_RETRY_SECONDS)

    async def _validate(self, batch: Batch) -> None:
        source = self.store.path_of(batch.input_file_id)
        try:
            batch.total, batch.errors = await asyncio.to_thread(check_lines, source, batch.endpoint)
        except FileNotFoundError:
            batch.errors = [LineError(code="file_not_found", message=f"the file {batch.input_file_id} was deleted")]
        await self._set(batch, "failed" if batch.errors else "in_progress")

    async def _answer_lines(self, batch: Batch) -> None:
        """Answer the lines that have no answer, until the end of the file or of the completion window."""
        answered = await asyncio.to_thread(self._count_answers, batch)
        lines = requests_after(self.store.path_of(batch.input_file_id), answered)
        output, errors = AnswerFile(self.store.output_path(batch)), AnswerFile(self.store.error_path(batch))
        with closing(output), closing(errors):
            try:
                async with (
                    asyncio.timeout_at(_loop_time(batch.expires_at)),
                    asyncio.TaskGroup() as running,
                    aclosing(_in_thread(lines)) as unanswered,
                ):
                    async for number, line in unanswered:
                        await self._take_slot()
                        task = running.create_task(self._answer(batch, number, line, output, errors))
                        task.add_done_callback(self._free_slot)  # also if it is cancelled before it starts
            except TimeoutError:
                await asyncio.to_thread(self._expire, batch, errors)

    def _count_answers(self, batch: Batch) -> set[int]:
        """Update the counts of a batch, and return the numbers of the answered lines."""
        done = answered_numbers(self.store.output_path(batch))
        failed = answered_numbers(self.store.error_path(batch))
        batch.completed, batch.failed = len(done), len(failed)
        return done | failed

    async def _take_slot(self) -> None:
        """Wait until a slot is free, and take it. Batches that wait take turns."""
        async with self._turn:
            while self._num_running >= self._compute_max_running():
                self._slot_freed.clear()
                try:
                    await asyncio.wait_for(self._slot_freed.wait(), SLOT_POLL_SECONDS)
                except TimeoutError:
                    continue
            self._num_running += 1

    def _free_slot(self, _: "asyncio.Task[None]") -> None:
        self._num_running -= 1
        self._slot_freed.set()

    def _compute_max_running(self) -> int:
        """Return the number of requests of batches that may run now; 0 while the engine rejects requests."""
        if self._state.not_ready_reason is not None:
            return 0
        now = time.monotonic()
        if self._state.num_http_requests > self._num_running:
            self._busy_until = now + BUSY_SECONDS
        share = BUSY_SHARE if now < self._busy_until else IDLE_SHARE
        return max(1, int(self._state.core.state.max_num_seqs * share))

    async def _answer(self, batch: Batch, number: int, line: InputLine, output: AnswerFile, errors: AnswerFile) -> None:
        """Answer a line with a taken slot. Repeats the request while the engine rejects all requests."""
        request_id, body = f"{batch.id}-{number}", _with_batch_priority(line.body)
        while True:
            status, answer = await call(self._app, batch.endpoint, body, request_id=request_id, owner=batch.owner)
            if status != 503 and self._state.core.is_alive and not _is_aborted(answer):
                break
            await asyncio.sleep(REJECTED_RETRY_SECONDS)
        response = {"status_code": status, "request_id": request_id, "body": msgspec.Raw(answer)}
        (output if status == 200 else errors).append(answer_line(batch.id, number, line.custom_id, response, None))
        if status == 200:
            batch.completed += 1
        else:
            batch.failed += 1

    def _expire(self, batch: Batch, errors: AnswerFile) -> None:
        """Write an error for each line without an answer."""
        answered = self._count_answers(batch)
        for number, line in requests_after(self.store.path_of(batch.input_file_id), answered):
            errors.append(answer_line(batch.id, number, line.custom_id, None, TOO_LATE))
            batch.failed += 1
        batch.times["expired"] = int(time.time())

    async def _finish(self, batch: Batch) -> None:
        """Turn the answers into files, and set the final status."""
        status: Status = "expired" if "expired" in batch.times else "completed"
        if batch.status == "cancelling":
            status = "cancelled"
            if self.store.output_path(batch).exists():  # otherwise its files are complete, before a restart
                await asyncio.to_thread(self._count_answers, batch)
        else:
            await self._set(batch, "finalizing")
        batch.output_file_id = await self._publish(batch, "o", self.store.output_path(batch))
        batch.error_file_id = await self._publish(batch, "e", self.store.error_path(batch))
        await self._set(batch, status)

    async def _publish(self, batch: Batch, kind: Literal["o", "e"], answers: Path) -> str | None:
        """Move answers to the files. Return the file's ID, or None if there are no answers."""
        file_id, now = batch.result_id(kind), int(time.time())
        size = await asyncio.to_thread(_size_of_answers, answers, self.store.path_of(file_id))
        if not size:
            return None
        record = FileRecord(
            id=file_id,
            owner=batch.owner,
            filename=f"{batch.id}_{'output' if kind == 'o' else 'error'}.jsonl",
            purpose="batch_output",
            bytes=size,
            created_at=now,
            expires_at=now + batch.result_life,
        )
        await self.store.add_file(record, answers)
        return file_id

    async def _set(self, batch: Batch, status: Status) -> None:
        batch.status = status
        batch.times[status] = int(time.time())
        await self.store.save(batch)


def _size_of_answers(answers: Path, published: Path) -> int:
    """Return the bytes of answers, which a restart may find already published. Remove an empty file."""
    path = answers if answers.exists() else published
    size = path.stat().st_size if path.exists() else 0
    if not size:
        answers.unlink(missing_ok=True)
    return size


async def _stop(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _loop_time(epoch_seconds: float) -> float:
    return asyncio.get_running_loop().time() + max(0.0, epoch_seconds - time.time())


def _with_batch_priority(body: msgspec.Raw) -> bytes:
    """Return a request body with the priority of batches. Priorities within a batch keep their order."""
    given = msgspec.json.decode(body)
    own = given.get("priority")
    given["priority"] = max(own, BATCH_PRIORITY) if isinstance(own, int) else BATCH_PRIORITY
    return msgspec.json.encode(given)


class _Choice(msgspec.Struct):
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []


def _is_aborted(answer: bytes) -> bool:
    """Return True if the engine has aborted the request, which a pause can do. An answer in an unknown form is not."""
    try:
        return any(choice.finish_reason == "abort" for choice in msgspec.json.decode(answer, type=_Answer).choices)
    except msgspec.DecodeError:
        return False


async def _in_thread(items: Iterator[Item]) -> AsyncGenerator[Item, None]:
    """Yield the items of an iterator that reads a file, without blocking the event loop."""
    while (item := await asyncio.to_thread(next, items, None)) is not None:
        yield item

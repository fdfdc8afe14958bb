"""OpenAI's routes below /v1/files and /v1/batches."""

import asyncio
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import FileResponse
from pydantic import BaseModel, ConfigDict, Field
from starlette.datastructures import FormData, UploadFile

from trimtab_engine.api.batches.lines import ENDPOINTS
from trimtab_engine.api.batches.records import FINAL, Batch, FileRecord
from trimtab_engine.api.batches.runner import BatchRunner
from trimtab_engine.api.batches.store import LIFE_SECONDS, BatchStore, new_id
from trimtab_engine.api.http.errors import ApiError, invalid
from trimtab_engine.api.http.get_and_head import get_and_head
from trimtab_engine.api.http.request_identity import key_salt
from trimtab_engine.api.http.uploads import UPLOADS

FILES, BATCHES = UPLOADS, "/v1/batches"
MAX_UNFINISHED_BATCHES = 100
MAX_UPLOADS = 4  # at once; each may fill the directory of temporary files with as many bytes as a file may have
MAX_NAME_CHARACTERS = 255
UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
WINDOW = re.compile(r"([1-9]\d{0,4})([smhd])")
MIN_LIFE_SECONDS = 3600
FORM_FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})

Json = dict[str, Any]
Limit = Annotated[int, Query(ge=1, le=10_000)]
Id = Annotated[str, Field(max_length=MAX_NAME_CHARACTERS)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class ExpiresAfter(_Strict):
    """Life of a file."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_LIFE_SECONDS, le=LIFE_SECONDS)]


class CreateBatch(_Strict):
    """Body of POST /v1/batches."""

    input_file_id: Id
    endpoint: Literal[ENDPOINTS]  # type: ignore[valid-type]
    completion_window: Annotated[str, Field(max_length=16)]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
        ]
        | None
    ) = None
    output_expires_after: ExpiresAfter | None = None


def batch_router(runner: BatchRunner) -> APIRouter:
    router, uploads = APIRouter(), asyncio.Semaphore(MAX_UPLOADS)

    def file_of(request: Request, file_id: str) -> FileRecord:
        found = runner.store.files.get(file_id)
        if found is None or found.owner != key_salt(request):
            raise ApiError(404, f"no such file: {file_id[:100]!r}", param="id")
        return found

    def batch_of(request: Request, batch_id: str) -> Batch:
        found = runner.store.batches.get(batch_id)
        if found is None or found.owner != key_salt(request):
            raise ApiError(404, f"no such batch: {batch_id[:100]!r}", param="batch_id")
        return found

    # --- files --------------------------------------------------------------------------------------------------------

    @router.post(FILES)
    async def upload(request: Request) -> Json:
        store = runner.store
        store.check_room()
        with _disk_errors("the file"):
            async with uploads, request.form(max_files=1, max_fields=len(FORM_FIELDS)) as form:
                return (await _store_upload(store, form, key_salt(request))).to_json()

    @get_and_head(router, FILES)
    async def files(
        request: Request,
        after: str | None = None,
        limit: Limit = 10_000,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Json:
        own = [
            each
            for each in runner.store.files.values()
            if each.owner == key_salt(request) and purpose in (None, each.purpose)
        ]
        return _page(own, after, limit, newest_first=order == "desc")

    @get_and_head(router, FILES + "/{file_id}")
    async def file(file_id: str, request: Request) -> Json:
        return file_of(request, file_id).to_json()

    @router.delete(FILES + "/{file_id}")
    async def delete(file_id: str, request: Request) -> Json:
        record = file_of(request, file_id)
        if (reader := runner.store.reader_of(file_id)) is not None:
            raise ApiError(409, f"the file is the input of the unfinished batch {reader.id}; cancel it first")
        await runner.store.remove_file(record)
        return {"id": file_id, "object": "file", "deleted": True}

    @router.get(FILES + "/{file_id}/content")
    async def content(file_id: str, request: Request) -> Response:
        path = runner.store.path_of(file_of(request, file_id).id)
        return FileResponse(path, media_type="application/octet-stream")

    # --- batches ------------------------------------------------------------------------------------------------------

    @router.post(BATCHES)
    async def create(body: CreateBatch, request: Request) -> Json:
        runner.check_accepts()
        source = file_of(request, body.input_file_id)
        if source.purpose != "batch":
            raise invalid(f"input_file_id: the file's purpose is {source.purpose}; upload it as batch", "input_file_id")
        if len(runner.store.unfinished()) >= MAX_UNFINISHED_BATCHES:
            raise ApiError(429, f"{MAX_UNFINISHED_BATCHES} batches are unfinished; wait for one, or cancel it")
        now = int(time.time())
        batch = Batch(
            id=new_id("batch_"),
            owner=key_salt(request),
            endpoint=body.endpoint,
            input_file_id=source.id,
            completion_window=body.completion_window,
            created_at=now,
            expires_at=now + _window_seconds(body.completion_window),
            metadata=body.metadata,
            result_life=body.output_expires_after.seconds if body.output_expires_after else LIFE_SECONDS,
        )
        with _disk_errors("the batch"):
            await runner.create(batch)
        return batch.to_json()

    @get_and_head(router, BATCHES)
    async def batches(request: Request, after: str | None = None, limit: Limit = 20) -> Json:
        own = [each for each in runner.store.batches.values() if each.owner == key_salt(request)]
        return _page(own, after, limit, newest_first=True)

    @get_and_head(router, BATCHES + "/{batch_id}")
    async def batch(batch_id: str, request: Request) -> Json:
        return batch_of(request, batch_id).to_json()

    @router.post(BATCHES + "/{batch_id}/cancel")
    async def cancel(batch_id: str, request: Request) -> Json:
        found = batch_of(request, batch_id)
        if found.status in FINAL or found.status == "finalizing":
            raise ApiError(409, f"the batch is {found.status}; only batches that run can be cancelled")
        if found.status != "cancelling":
            with _disk_errors("the cancellation"):
                await runner.cancel(found)
        return found.to_json()

    return router


@contextmanager
def _disk_errors(what: str) -> Iterator[None]:
    """Raise ApiError 507 if the block cannot write."""
    try:
        yield
    except OSError as error:
        raise ApiError(
            507, f"{what} cannot be stored ({error.strerror}); free space in --batch-dir and in /tmp"
        ) from None


async def _store_upload(store: BatchStore, form: FormData, owner: str) -> FileRecord:
    """Return the record of an uploaded file. Raises ApiError 400 for a wrong field, OSError for a full disk."""
    given = form.get("file")
    if not isinstance(given, UploadFile):
        raise invalid("file: missing; send multipart/form-data with the fields file and purpose", "file")
    if unknown := sorted(form.keys() - FORM_FIELDS):
        raise invalid(f"unrecognized request argument: {unknown[0][:100]}", unknown[0][:100])
    if form.get("purpose") != "batch":
        raise invalid(f"purpose: must be batch ({str(form.get('purpose'))[:100]})", "purpose")
    size, now = given.size or 0, int(time.time())
    store.check_room(size)
    record = FileRecord(
        id=new_id("file-"),
        owner=owner,
        filename=(given.filename or "input.jsonl")[:MAX_NAME_CHARACTERS],
        purpose="batch",
        bytes=size,
        created_at=now,
        expires_at=now + _life(form),
    )
    new = store.path_of(f"{record.id}.upload")

    def copy() -> None:
        given.file.seek(0)
        with new.open("wb") as target:
            shutil.copyfileobj(given.file, target)

    try:
        await asyncio.to_thread(copy)
        await store.add_file(record, new)
    finally:
        new.unlink(missing_ok=True)
    return record


def _life(form: FormData) -> int:
    """Return the seconds until an uploaded file expires."""
    given = form.get("expires_after[seconds]")
    if given is None:
        return LIFE_SECONDS
    if not isinstance(given, str) or not given.isdecimal() or not MIN_LIFE_SECONDS <= int(given[:9]) <= LIFE_SECONDS:
        raise invalid(f"expires_after.seconds: use {MIN_LIFE_SECONDS} to {LIFE_SECONDS}", "expires_after")
    return int(given)


def _window_seconds(text: str) -> int:
    match = WINDOW.fullmatch(text)
    if match is None:
        raise invalid(
            f"completion_window: no window ({text!r}); use 24h, or another number of s, m, h or d", "completion_window"
        )
    return int(match.group(1)) * UNIT_SECONDS[match.group(2)]


def _page(records: Sequence[FileRecord | Batch], after: str | None, limit: int, *, newest_first: bool) -> Json:
    """Return one page of a list, which begins after the record with the ID `after`."""
    ordered = sorted(records, key=lambda each: (each.created_at, each.id), reverse=newest_first)
    ids = [each.id for each in ordered]
    if after is not None and after not in ids:
        raise invalid(f"after: no such ID ({after[:100]!r}); use last_id of the previous page", "after")
    start = 0 if after is None else ids.index(after) + 1
    page = ordered[start : start + limit]
    return {
        "object": "list",
        "data": [each.to_json() for each in page],
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": start + limit < len(ordered),
    }

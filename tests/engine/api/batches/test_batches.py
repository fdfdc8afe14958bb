"""OpenAI's Files and Batches APIs with its own client, against servers whose stub core repeats the prompt."""

import json
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
from trimtab_engine.api.batches.runner import BATCH_PRIORITY

CHAT: Any = "/v1/chat/completions"
COMPLETIONS: Any = "/v1/completions"
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"
KEYS = ("--api-key", "first", "second")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("batches")


@pytest.fixture(scope="module")
def server(start_shared_server: Any, folder: Path) -> Any:
    return start_shared_server("--batch-dir", str(folder), "--chat-template", TEMPLATE, *KEYS)


@contextmanager
def client_of(server: Any, key: str = "first") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key=key, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def client(server: Any) -> Iterator[openai.OpenAI]:
    with client_of(server) as made:
        yield made


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    if url == COMPLETIONS:
        body = {"model": "stub", "prompt": f"{custom_id} is here", "max_tokens": 4} | body
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def upload(client: openai.OpenAI, *lines: Any, **fields: Any) -> str:
    content = "".join(json.dumps(each) + "\n" for each in lines).encode()
    return client.files.create(file=("input.jsonl", content), purpose="batch", **fields).id


def create(client: openai.OpenAI, *lines: Any, endpoint: Any = COMPLETIONS, **fields: Any) -> Any:
    window: Any = fields.pop("completion_window", "24h")
    file_id = upload(client, *lines)
    return client.batches.create(input_file_id=file_id, endpoint=endpoint, completion_window=window, **fields)


def wait(client: openai.OpenAI, batch_id: str, condition: Callable[[Any], bool] | None = None) -> Any:
    """Return the batch when it has ended, or when the condition holds."""
    deadline = time.monotonic() + 60
    while True:
        batch = client.batches.retrieve(batch_id)
        if batch.status in ("completed", "failed", "expired", "cancelled") or (condition and condition(batch)):
            return batch
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)


def contents(client: openai.OpenAI, file_id: str | None) -> dict[str, Any]:
    """Return the lines of a file by custom ID, each of which must be there once."""
    if file_id is None:
        return {}
    lines = [json.loads(text) for text in client.files.content(file_id).text.splitlines()]
    by_id = {each["custom_id"]: each for each in lines}
    assert len(by_id) == len(lines)
    return by_id


# --- files ------------------------------------------------------------------------------------------------------------


def test_file_create_retrieve_content_delete(client: openai.OpenAI) -> None:
    made = client.files.create(file=("in.jsonl", b"abc\n"), purpose="batch")
    assert (made.object, made.bytes, made.filename, made.purpose, made.status) == (
        "file", 4, "in.jsonl", "batch", "processed",
    )  # fmt: skip
    assert made.expires_at == made.created_at + 30 * 24 * 3600
    assert client.files.retrieve(made.id) == made
    assert client.files.content(made.id).read() == b"abc\n"
    deleted = client.files.delete(made.id)
    assert (deleted.id, deleted.deleted, deleted.object) == (made.id, True, "file")
    with pytest.raises(openai.NotFoundError, match="no such file"):
        client.files.retrieve(made.id)


def test_file_list_has_pages(client: openai.OpenAI) -> None:
    made = {upload(client, {}) for _ in range(5)}
    listed = [each.id for each in client.files.list(limit=2, order="asc")]
    assert made <= set(listed)
    assert len(listed) == len(set(listed))
    newest = client.files.list(limit=2)
    assert newest.has_more
    assert [each.id for each in newest.data] == listed[::-1][:2]
    assert not client.files.list(purpose="vision").data


def test_file_expires_after_is_kept(client: openai.OpenAI) -> None:
    file = client.files.retrieve(upload(client, {}, expires_after={"anchor": "created_at", "seconds": 3600}))
    assert file.expires_at == file.created_at + 3600


def test_file_of_another_key_is_hidden(server: Any, client: openai.OpenAI) -> None:
    file_id, batch_id = upload(client, {}), create(client, line("a")).id
    with client_of(server, "second") as other:
        assert not other.files.list().data
        assert not other.batches.list().data
        calls: list[Any] = [other.files.retrieve, other.files.delete, other.files.content]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call(file_id)
        calls = [other.batches.retrieve, other.batches.cancel]
        for call in calls:
            with pytest.raises(openai.NotFoundError):
                call(batch_id)
        with pytest.raises(openai.NotFoundError):
            other.batches.create(input_file_id=file_id, endpoint=COMPLETIONS, completion_window="24h")


def test_file_upload_above_the_json_limits_is_stored(client: openai.OpenAI) -> None:
    """Other bodies may have 8 MiB and cost 40 ms to parse; all unfinished ones together 32 MiB."""
    content = b"[[[],[]]]\n" * 4_000_000
    assert client.files.create(file=content, purpose="batch").bytes == len(content)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"data": {"purpose": "batch"}}, "file: missing"),
        ({"json": {"purpose": "batch"}}, "file: missing"),
        ({"files": {"file": b"x"}}, r"purpose: must be batch (None)"),
        ({"files": {"file": b"x"}, "data": {"purpose": "fine-tune"}}, "purpose: must be batch (fine-tune)"),
        ({"files": {"file": b"x"}, "data": {"purpose": "batch", "a": "b"}}, "unrecognized request argument: a"),
        ({"files": [("file", b"x"), ("file", b"y")], "data": {"purpose": "batch"}}, "Too many files"),
        (
            {"files": {"file": b"x"}, "data": {"purpose": "batch", "expires_after[seconds]": "9" * 5000}},
            "expires_after.seconds: use 3600 to 2592000",
        ),
        ({"content": b"x", "headers_of": "multipart/form-data"}, "boundary"),
    ],
)
def test_file_upload_with_wrong_field_is_rejected(server: Any, fields: dict[str, Any], message: str) -> None:
    headers = {"Authorization": "Bearer first"}
    if kind := fields.pop("headers_of", None):
        headers["Content-Type"] = kind
    response = server.http.post("/v1/files", headers=headers, **fields)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["../lock", "..%2Flock", "%2e%2e%2flock", "/etc/passwd", "file-1.json", "x" * 500, "%00"]
)
def test_file_ids_are_no_paths(server: Any, name: str) -> None:
    for suffix in ("", "/content"):
        response = server.http.get(f"/v1/files/{name}{suffix}", headers={"Authorization": "Bearer first"})
        assert response.status_code == 404, response.text


def test_file_names_are_no_paths(client: openai.OpenAI, folder: Path) -> None:
    made = client.files.create(file=("../../escaped", b"abc"), purpose="batch")
    assert not list(folder.parent.rglob("*escaped*"))
    assert client.files.content(made.id).read() == b"abc"


# --- batches ----------------------------------------------------------------------------------------------------------


def test_batch_answers_and_errors_are_files(client: openai.OpenAI) -> None:
    wrong = line("wrong", prompt="x", temperature=-1)
    made = create(client, line("one"), wrong, line("two"), metadata={"job": "nightly"})
    assert (made.object, made.status, made.endpoint, made.metadata) == (
        "batch", "validating", COMPLETIONS, {"job": "nightly"},
    )  # fmt: skip
    assert made.expires_at == made.created_at + 24 * 3600
    batch = wait(client, made.id)
    assert batch.status == "completed"
    assert batch.request_counts.to_dict() == {"total": 3, "completed": 2, "failed": 1}
    assert made.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    answers, errors = contents(client, batch.output_file_id), contents(client, batch.error_file_id)
    assert answers.keys() == {"one", "two"}
    one = answers["one"]
    assert one.keys() == {"id", "custom_id", "response", "error"}
    assert one["error"] is None
    assert one["id"].startswith("batch_req_")
    assert one["response"].keys() == {"status_code", "request_id", "body"}
    assert one["response"]["status_code"] == 200
    assert one["response"]["body"]["choices"][0]["text"] == "one "
    assert one["response"]["body"]["usage"]["completion_tokens"] == 4
    assert errors.keys() == {"wrong"}
    assert errors["wrong"]["response"]["status_code"] == 400
    assert "temperature" in errors["wrong"]["response"]["body"]["error"]["message"]
    file = client.files.retrieve(batch.output_file_id)
    assert (file.purpose, file.filename) == ("batch_output", f"{batch.id}_output.jsonl")


def test_batch_of_chats_and_embeddings(client: openai.OpenAI) -> None:
    chat = line("a", CHAT, model="stub", messages=[{"role": "user", "content": "hello"}], max_tokens=5)
    answer = contents(client, wait(client, create(client, chat, endpoint=CHAT).id).output_file_id)["a"]
    assert answer["response"]["body"]["choices"][0]["message"]["content"] == "hello"
    embed = line("b", "/v1/embeddings", model="stub", input="hello")
    batch = wait(client, create(client, embed, endpoint="/v1/embeddings").id)
    assert contents(client, batch.output_file_id)["b"]["response"]["body"]["data"][0]["embedding"]


def test_batch_with_invalid_lines_fails_with_all_of_them(client: openai.OpenAI) -> None:
    batch = wait(client, create(client, line("a"), line("a"), line("b", stream=True), line("c", CHAT)).id)
    assert (batch.status, batch.output_file_id) == ("failed", None)
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "duplicate_custom_id", "custom_id"),
        (3, "invalid_request", "body.stream"),
        (4, "mismatched_url", "url"),
    ]
    assert batch.failed_at >= batch.created_at


def test_batch_cancel_keeps_answers(client: openai.OpenAI) -> None:
    slow = line("slow", prompt="!slow echo")
    batch = create(client, line("a"), slow)
    wait(client, batch.id, lambda now: now.request_counts.completed == 1)
    with pytest.raises(openai.ConflictError, match="the input of the unfinished batch"):
        client.files.delete(batch.input_file_id)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = wait(client, batch.id)
    assert (batch.status, batch.request_counts.completed) == ("cancelled", 1)
    assert batch.cancelling_at <= batch.cancelled_at
    assert contents(client, batch.output_file_id).keys() == {"a"}
    with pytest.raises(openai.ConflictError, match="the batch is cancelled"):
        client.batches.cancel(batch.id)
    client.files.delete(batch.input_file_id)


def test_batch_window_ends_with_errors_of_the_rest(client: openai.OpenAI) -> None:
    batch = create(client, line("a"), line("slow", prompt="!slow echo"), completion_window="2s")
    batch = wait(client, batch.id)
    assert (batch.status, batch.request_counts.to_dict()) == ("expired", {"total": 2, "completed": 1, "failed": 1})
    assert batch.expired_at >= batch.expires_at
    [error] = contents(client, batch.error_file_id).values()
    assert (error["response"], error["error"]["code"]) == (None, "batch_expired")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"endpoint": "/v1/responses"}, "endpoint"),
        ({"completion_window": "soon"}, "completion_window: no window"),
        ({"completion_window": "0h"}, "completion_window: no window"),
        ({"input_file_id": 3}, "input_file_id"),
        ({"metadata": {"a": 1}}, "metadata"),
        ({"metadata": {str(n): "" for n in range(17)}}, "metadata"),
        ({"other": 1}, "unrecognized request argument: other"),
    ],
)
def test_batch_with_wrong_field_is_rejected(
    server: Any, client: openai.OpenAI, fields: dict[str, Any], message: str
) -> None:
    body = {"input_file_id": upload(client, {}), "endpoint": COMPLETIONS, "completion_window": "24h"} | fields
    response = server.http.post("/v1/batches", headers={"Authorization": "Bearer first"}, json=body)
    assert response.status_code == 400
    assert message in response.json()["error"]["message"]


def test_batch_of_an_output_file_is_rejected(client: openai.OpenAI) -> None:
    batch = wait(client, create(client, line("a")).id)
    with pytest.raises(openai.BadRequestError, match="the file's purpose is batch_output; upload it as batch"):
        client.batches.create(input_file_id=batch.output_file_id, endpoint=COMPLETIONS, completion_window="24h")


def test_batch_list_has_pages(client: openai.OpenAI) -> None:
    made = [create(client, line("a")).id for _ in range(3)]
    listed = [each.id for each in client.batches.list(limit=2)]
    assert set(made) <= set(listed)
    assert len(listed) == len(set(listed))
    with pytest.raises(openai.BadRequestError, match="after: no such ID"):
        client.batches.list(after="batch_none")


def test_batch_requests_have_low_priority(client: openai.OpenAI, server: Any) -> None:
    batch = create(client, line("a", prompt="!slow echo"), line("b", prompt="!slow echo", priority=5_000_000))
    wait(client, batch.id, lambda now: now.status == "in_progress")
    own = {"prompt": "own", "max_tokens": 1}
    assert server.http.post(COMPLETIONS, headers={"Authorization": "Bearer first"}, json=own).status_code == 200
    added = [each["priority"] for each in server.core_state(Authorization="Bearer first")["added"][-3:]]
    client.batches.cancel(batch.id)
    assert sorted(added) == [0, BATCH_PRIORITY, 5_000_000]


# --- restarts ---------------------------------------------------------------------------------------------------------


def test_batch_survives_kills_at_random_points(start_server: Any, tmp_path: Path) -> None:
    """Each line is answered once, although the engine is killed while batches are read, run and finished."""
    moment, batches = random.Random(1), list[str]()
    names = [f"line-{number}" for number in range(100)]
    for round_number in range(5):
        server = start_server("--batch-dir", str(tmp_path))
        with client_of(server) as client:
            if round_number < 2:
                batches.append(create(client, *map(line, names)).id)
            time.sleep(moment.uniform(0, 0.6))
            if round_number < 4:
                server.process.kill()
                server.process.wait()
                continue
            for batch_id in batches:
                batch = wait(client, batch_id)
                assert (batch.status, batch.request_counts.completed) == ("completed", len(names))
                answers = contents(client, batch.output_file_id)
                assert sorted(answers) == sorted(names)
                assert all(answers[name]["response"]["body"]["choices"][0]["text"] == name[:4] for name in names)


def test_batch_stopped_engine_leaves_it_to_the_next(start_server: Any, tmp_path: Path) -> None:
    first = start_server("--batch-dir", str(tmp_path), "--shutdown-timeout", "100")
    with client_of(first) as client:
        batch = create(client, line("a"), line("slow", prompt="!slow echo"))
        wait(client, batch.id, lambda now: now.request_counts.completed == 1)
    began = time.monotonic()
    first.process.terminate()
    assert first.process.wait(100) == 0
    assert time.monotonic() - began < 60  # it does not wait for the slow line
    second = start_server("--batch-dir", str(tmp_path))
    with client_of(second) as client:
        batch = client.batches.retrieve(batch.id)
        assert batch.status == "in_progress"
        client.batches.cancel(batch.id)
        assert contents(client, wait(client, batch.id).output_file_id).keys() == {"a"}


def test_batch_second_engine_takes_over(start_server: Any, tmp_path: Path) -> None:
    first, second = (start_server("--batch-dir", str(tmp_path)) for _ in range(2))
    with client_of(first) as client:
        batch = create(client, *[line(str(number)) for number in range(50)])
    with client_of(second) as client:
        with pytest.raises(openai.InternalServerError, match="another engine uses --batch-dir") as caught:
            client.batches.retrieve(batch.id)
        assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (503, "1")
        first.process.kill()
        second.wait_for(lambda: second.status(f"/v1/batches/{batch.id}") == 200, "the lock")
        batch = wait(client, batch.id)
        assert len(contents(client, batch.output_file_id)) == 50


def test_batch_damaged_record_is_named(start_server: Any, tmp_path: Path) -> None:
    (tmp_path / "batches").mkdir()
    (tmp_path / "batches" / "batch_1.json").write_text("{")
    response = start_server("--batch-dir", str(tmp_path)).http.get("/v1/batches")
    assert response.status_code == 503
    assert "batch_1.json: Input data was truncated); remove the damaged file" in response.text


def test_batch_several_api_servers_are_rejected(start_server: Any, tmp_path: Path) -> None:
    server = start_server("--batch-dir", str(tmp_path), "--api-server-count", "2", wait=False)
    assert server.process.wait(60) != 0
    assert "--batch-dir: requires one API server (2); set --api-server-count 1" in server.log.read_text()


def test_batch_without_directory_names_the_flag(start_server: Any) -> None:
    server = start_server()
    assert "start the engine with --batch-dir DIR" in server.http.post("/v1/files").text


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_batch_directory_without_permission_is_an_error(start_server: Any, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    server = start_server("--batch-dir", str(tmp_path), wait=False)
    assert server.process.wait(60) != 0
    assert "--batch-dir" in server.log.read_text()

"""Fetching of models from a bucket into the cache, with faults. The store is moto's."""

import base64
import hashlib
import itertools
import logging
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import botocore.loaders
import botocore.session
import pytest
from botocore.client import BaseClient
from botocore.exceptions import EndpointConnectionError
from bucket_server import KEYS, BucketServer, Faults
from hub_repository import SHARD_BYTES, a_repository
from trimtab_engine.cli import main
from trimtab_engine.errors import ModelError
from trimtab_engine.sources import source, transfer
from trimtab_engine.sources.cache import ModelCache
from trimtab_engine.sources.fetch import Fetched, describe, fetch
from trimtab_engine.sources.files import Listing, RemoteFile
from trimtab_engine.sources.name import RemoteModel, Scheme
from trimtab_engine.sources.s3 import HashedInParts, S3Source
from trimtab_engine.sources.source import FetchOptions, SourceUnavailable

FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def store() -> Iterator[BucketServer]:
    with BucketServer().running() as server:
        yield server


LOADER = botocore.loaders.create_loader()


def a_session() -> botocore.session.Session:
    """A session that need not parse the description of S3 again."""
    session = botocore.session.Session()
    session.register_component("data_loader", LOADER)
    return session


@pytest.fixture
def bucket(store: BucketServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A bucket with a model below `llms/tiny` that this process may use; all other environment settings are removed."""
    store.faults, name = Faults(), f"models-{next(NUMBERS)}"
    for variable, value in {**KEYS, "AWS_ENDPOINT_URL": store.url, "AWS_EC2_METADATA_DISABLED": "true"}.items():
        monkeypatch.setenv(variable, value)
    for variable in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(variable, str(tmp_path / "none"))
    for variable in ("AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(source, "PAUSES_SECONDS", (0.0, 0.0))
    monkeypatch.setattr(transfer, "LONGEST_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(transfer, "MAX_FRUITLESS", 2)
    monkeypatch.setattr("botocore.session.get_session", a_session)
    store.client.create_bucket(Bucket=name)
    store.put(name, "llms/tiny", a_repository(tmp_path / "there"))
    store.asked.clear()
    return name


@pytest.fixture
def model(bucket: str) -> RemoteModel:
    return RemoteModel(Scheme.S3, f"{bucket}/llms/tiny")


@pytest.fixture
def options(tmp_path: Path) -> FetchOptions:
    return FetchOptions(folder=tmp_path / "cache")


def fetched(model: RemoteModel, options: FetchOptions) -> Fetched:
    found = fetch(model, options)
    found.close()
    return found


def test_weights_and_texts_below_the_prefix_come_and_nothing_else(
    model: RemoteModel, options: FetchOptions, tmp_path: Path
) -> None:
    found = fetched(model, options)
    names = {path.name for path in found.path.iterdir()}
    assert names == {FIRST, SECOND, "model.safetensors.index.json", "config.json", "tokenizer.json"}
    for name in names:
        assert (found.path / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


def test_single_gguf_file_can_be_named(store: BucketServer, bucket: str, options: FetchOptions) -> None:
    for name in ("a-q4.gguf", "a-q8.gguf"):
        store.client.put_object(Bucket=bucket, Key=f"ggufs/{name}", Body=name.encode())
    found = fetched(RemoteModel(Scheme.S3, f"{bucket}/ggufs", None, "a-q8.gguf"), options)
    assert found.path.read_bytes() == b"a-q8.gguf"
    with pytest.raises(ModelError, match=rf"name one: s3://{bucket}/ggufs/a-q4\.gguf"):
        fetch(RemoteModel(Scheme.S3, f"{bucket}/ggufs"), options)


# --- pins -------------------------------------------------------------------------------------------------------------


def test_the_same_objects_have_the_same_pin_and_other_ones_another(
    store: BucketServer, bucket: str, model: RemoteModel
) -> None:
    def pin() -> str:
        return S3Source.reached(None).ask(model).commit

    before = pin()
    store.client.put_object(Bucket=bucket, Key="llms/tiny/README.md", Body=b"of no model")
    assert pin() == before
    store.client.put_object(Bucket=bucket, Key="llms/tiny/config.json", Body=b"{}")
    assert pin() != before


def test_a_pin_that_is_here_asks_nobody(store: BucketServer, model: RemoteModel, options: FetchOptions) -> None:
    pinned = fetched(model, options).model
    assert pinned.is_pinned
    store.asked.clear()
    assert fetched(pinned, options).model == pinned
    assert store.asked == []


def test_objects_that_changed_since_are_refused_with_the_way_on(
    store: BucketServer, bucket: str, model: RemoteModel, options: FetchOptions
) -> None:
    pinned = fetched(model, options).model
    store.client.put_object(Bucket=bucket, Key=f"llms/tiny/{FIRST}", Body=b"others")
    now = S3Source.reached(None).ask(model).commit
    with pytest.raises(ModelError, match=rf"have changed since they were pinned.*s3://{bucket}/llms/tiny@{now}"):
        fetch(pinned, replace(options, folder=options.folder and options.folder / "of another replica"))


def test_versioned_bucket_restores_pinned_objects(
    store: BucketServer, bucket: str, options: FetchOptions, tmp_path: Path
) -> None:
    model = RemoteModel(Scheme.S3, f"{bucket}/kept")
    enabled = {"Status": "Enabled"}
    store.client.put_bucket_versioning(Bucket=bucket, VersioningConfiguration=enabled)
    store.put(bucket, "kept", tmp_path / "there")
    pinned = replace(model, revision=S3Source.reached(None).ask(model).commit)
    store.client.put_object(Bucket=bucket, Key=f"kept/{FIRST}", Body=b"others")
    store.client.delete_object(Bucket=bucket, Key=f"kept/{SECOND}")
    found = fetched(pinned, options)
    assert found.commit == pinned.revision
    for name in (FIRST, SECOND):
        assert (found.path / name).read_bytes() == (tmp_path / "there" / name).read_bytes()


# --- on the way -------------------------------------------------------------------------------------------------------


def test_a_download_that_was_cut_goes_on_where_it_was(
    store: BucketServer, model: RemoteModel, options: FetchOptions, tmp_path: Path
) -> None:
    store.faults.cuts = {FIRST: [100_000, 50_000]}
    found = fetched(model, options)
    assert found.path.joinpath(FIRST).read_bytes() == tmp_path.joinpath("there", FIRST).read_bytes()
    assert [one.range for one in store.asked_for(FIRST)] == ["bytes=0-", "bytes=100000-", "bytes=150000-"]


def test_another_process_goes_on_where_the_first_was_ended(
    store: BucketServer, model: RemoteModel, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "AT_ONCE", 1)  # the first file is whole when the second fails
    store.faults.cuts = {SECOND: [200_000] + [0] * 50}
    with pytest.raises(ModelError, match=f"{SECOND} stopped at 200000 of {SHARD_BYTES} bytes"):
        fetch(model, options)
    store.faults.cuts = {}
    store.asked.clear()
    fetched(model, options)
    assert [one.range for one in store.asked_for(SECOND)] == ["bytes=200000-"]
    assert store.asked_for(FIRST) == []


def test_a_store_that_is_away_for_a_moment_is_asked_again(
    store: BucketServer, model: RemoteModel, options: FetchOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, away = BaseClient._make_api_call, ["once"]

    def sometimes(client: BaseClient, operation: str, arguments: dict[str, Any]) -> Any:
        if operation == "GetObject" and away:
            away.clear()
            raise EndpointConnectionError(endpoint_url=store.url)
        return call(client, operation, arguments)

    monkeypatch.setattr(BaseClient, "_make_api_call", sometimes)
    assert fetched(model, options).path.joinpath(FIRST).stat().st_size == SHARD_BYTES
    assert not away


def test_a_store_that_begins_anew_is_followed(
    store: BucketServer, model: RemoteModel, options: FetchOptions, tmp_path: Path
) -> None:
    store.faults.cuts, store.faults.ignores_range = {FIRST: [100_000]}, True
    found = fetched(model, options)
    assert found.path.joinpath(FIRST).read_bytes() == tmp_path.joinpath("there", FIRST).read_bytes()


def test_wrong_checksum_is_retried_then_rejected(
    store: BucketServer, model: RemoteModel, options: FetchOptions, tmp_path: Path
) -> None:
    store.faults.wrong = {"config.json": 1, FIRST: 99}
    with pytest.raises(ModelError, match=f"{FIRST} was received 2 times with a wrong checksum"):
        fetch(model, options)
    assert options.folder is not None
    model_cache = ModelCache.of(options.folder, model)
    assert not [*model_cache.folder.glob(f"snapshots/*/{FIRST}")]
    (config,) = model_cache.folder.glob("snapshots/*/config.json")
    assert config.read_bytes() == tmp_path.joinpath("there", "config.json").read_bytes()


def test_a_store_that_stumbles_is_asked_again(store: BucketServer, model: RemoteModel, options: FetchOptions) -> None:
    store.faults.errors = [(503, "SlowDown"), (500, "InternalError"), (503, "SlowDown")]
    with pytest.raises(SourceUnavailable, match="answers SlowDown; try again later"):
        fetch(model, options)
    store.faults.errors = [(503, "SlowDown")]
    fetched(model, options)


def test_cached_model_is_served_if_store_is_unavailable(
    model: RemoteModel, options: FetchOptions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    known = fetched(model, options)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    assert fetched(model, options).path == known.path
    assert "which the cache has" in caplog.text
    with pytest.raises(SourceUnavailable, match=r"http://127\.0\.0\.1:9 cannot be reached .*AWS_ENDPOINT_URL"):
        fetch(RemoteModel(Scheme.S3, "other/model"), options)


# --- checksums --------------------------------------------------------------------------------------------------------


def test_the_etag_of_parts_is_the_md5_of_their_md5() -> None:
    data = hashlib.shake_128(b"parts").digest(25)
    parts = [hashlib.md5(data[begin : begin + 10]).digest() for begin in (0, 10, 20)]
    etag = f"{hashlib.md5(b''.join(parts)).hexdigest()}-3"
    for chunk in (1, 7, 10, 25):
        checksum = HashedInParts(10, etag)
        for begin in range(0, 25, chunk):
            checksum.update(data[begin : begin + chunk])
        assert checksum.is_right()
    wrong = HashedInParts(10, etag)
    wrong.update(data[::-1])
    assert not wrong.is_right()


class Heads:
    """A store that only serves an object's head."""

    def __init__(self, **head: object) -> None:
        self.head, self.asked = head, dict[str, object]()

    def head_object(self, **asked: object) -> dict[str, object]:
        self.asked = asked
        return self.head


def checks(etag: str, data: bytes, **head: object) -> list[bool]:
    """Return True if these bytes match an object with this ETag and head, and others do not."""
    client: Any = Heads(**head)
    listing = Listing(RemoteModel(Scheme.S3, "b/p"), "pin", ())
    file = RemoteFile("name", len(data), "d", etag)
    new = S3Source(client, "http://s3", is_anonymous=False).checksum(listing, file)
    found = []
    for said in (data, data[::-1]):
        checksum = new()
        checksum.update(said)
        found.append(checksum.is_right())
    assert ("PartNumber" in client.asked) == ("-" in etag)
    return found


def test_an_object_is_compared_by_the_strongest_checksum_that_it_has(caplog: pytest.LogCaptureFixture) -> None:
    data = b"0123456789abcdefghij+"
    md5 = hashlib.md5(data).hexdigest()
    sha256 = base64.b64encode(hashlib.sha256(data).digest()).decode()
    crc32 = base64.b64encode(zlib.crc32(data).to_bytes(4, "big")).decode()
    of_parts = hashlib.md5(hashlib.md5(data[:11]).digest() + hashlib.md5(data[11:]).digest()).hexdigest() + "-2"
    assert checks(md5, data, ContentLength=21) == [True, False]
    assert checks(of_parts, data, ContentLength=11) == [True, False]
    assert checks("f" * 32, data, ServerSideEncryption="aws:kms", ChecksumSHA256=sha256) == [True, False]
    assert checks("f" * 32, data, ServerSideEncryption="aws:kms", ChecksumCRC32=crc32) == [True, False]
    caplog.set_level(logging.WARNING)
    assert checks("f" * 32, data, ServerSideEncryption="aws:kms") == [True, True]
    assert "no checksum of name that could be compared" in caplog.text


# --- refusals ---------------------------------------------------------------------------------------------------------


def test_a_bucket_and_a_prefix_that_are_not_there_are_named(
    store: BucketServer, bucket: str, options: FetchOptions
) -> None:
    with pytest.raises(ModelError, match=r"there is no bucket nowhere at http.*AWS_ENDPOINT_URL"):
        fetch(RemoteModel(Scheme.S3, "nowhere/llms"), options)
    with pytest.raises(ModelError, match=rf"nothing below llms/tyni/ in the bucket {bucket}"):
        fetch(RemoteModel(Scheme.S3, f"{bucket}/llms/tyni"), options)
    with pytest.raises(ModelError, match=r"holds no files, but the folders tiny/; name one of them"):
        fetch(RemoteModel(Scheme.S3, f"{bucket}/llms"), options)


def test_pickles_are_refused_by_name(store: BucketServer, bucket: str, options: FetchOptions) -> None:
    store.client.put_object(Bucket=bucket, Key="old/config.json", Body=b"{}")
    store.client.put_object(Bucket=bucket, Key="old/pytorch_model.bin", Body=b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin only.*never loaded"):
        fetch(RemoteModel(Scheme.S3, f"{bucket}/old"), options)


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "AccessDenied", r"may not read it \(AccessDenied\); let them s3:ListBucket .* and s3:GetObject"),
        (403, "RequestTimeTooSkewed", r"the clock of this machine differs too much .* set it by NTP"),
        (403, "InvalidAccessKeyId", r"does not know these credentials \(InvalidAccessKeyId\); give others"),
        (403, "SignatureDoesNotMatch", r"does not know these credentials \(SignatureDoesNotMatch\)"),
        (400, "ExpiredToken", r"the credentials have expired"),
        (400, "AuthorizationHeaderMalformed", r"is in another region .*AWS_DEFAULT_REGION, or spec\.model\.s3\.region"),
        (405, "MethodNotAllowed", r"answers MethodNotAllowed; see the bucket"),
    ],
)
def test_a_refusal_says_what_to_do(
    store: BucketServer, model: RemoteModel, options: FetchOptions, status: int, code: str, said: str
) -> None:
    store.faults.errors = [(status, code)] * 4
    with pytest.raises(ModelError, match=said):
        fetch(model, options)


def test_an_object_that_is_overwritten_meanwhile_is_not_mixed_with_the_new_one(
    store: BucketServer, bucket: str, model: RemoteModel
) -> None:
    reached = S3Source.reached(None)
    listing = reached.ask(model)
    store.client.put_object(Bucket=bucket, Key="llms/tiny/config.json", Body=b"{}")
    config = listing.named("config.json")
    assert config is not None

    class Nothing:
        size = 0

        def write(self, data: object, /) -> int:
            raise AssertionError("nothing may come")

        def restart(self) -> None: ...

    with pytest.raises(ModelError, match=r"config\.json was overwritten while it was fetched"):
        reached.fill(listing, config, Nothing())


def test_without_credentials_the_bucket_is_asked_as_everybody_may(
    store: BucketServer,
    bucket: str,
    options: FetchOptions,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = RemoteModel(Scheme.S3, f"{bucket}/open")
    store.put(bucket, "open", tmp_path / "there", ACL="public-read")
    store.asked.clear()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    fetched(model, options)
    assert not any(one.is_signed for one in store.asked)
    store.faults.errors = [(403, "AccessDenied")]
    with pytest.raises(ModelError, match=r"public access is denied \(AccessDenied\), and no credentials were found"):
        fetch(replace(model, place=f"{model.place}-private"), options)


# --- commands ---------------------------------------------------------------------------------------------------------


def test_metadata_is_fetched_without_weights(
    store: BucketServer, model: RemoteModel, options: FetchOptions, tmp_path: Path
) -> None:
    found = describe(model, options, tmp_path / "described")
    assert (found.weights_bytes, found.is_safetensors) == (2 * SHARD_BYTES, True)
    assert found.folder.joinpath("config.json").exists()
    assert store.asked_for(FIRST) == []


def test_fetch_prints_the_folder_and_another_store_is_asked_by_its_path(
    store: BucketServer, bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["fetch", f"s3://{bucket}/llms/tiny", "--download-dir", str(tmp_path / "cache")]
    assert main(command) == 0
    assert Path(capsys.readouterr().out.strip(), FIRST).stat().st_size == SHARD_BYTES
    assert all(one.path.startswith(f"/{bucket}") for one in store.asked)

"""S3 buckets and compatible stores (MinIO, Ceph, …): the objects below a prefix are a model's files.

Credentials, region, endpoint and proxies are botocore's own: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, a profile,
the role of a service account (AWS_WEB_IDENTITY_TOKEN_FILE, or a pod's identity), AWS_DEFAULT_REGION, AWS_ENDPOINT_URL.
Without credentials requests are anonymous.
"""

import base64
import hashlib
import json
import logging
import math
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import botocore.session
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionError,
    HTTPClientError,
    IncompleteReadError,
)

from trimtab_engine.errors import ModelError, one_line
from trimtab_engine.sources.files import LOADED_SUFFIXES, Listing, RemoteFile
from trimtab_engine.sources.name import RemoteModel
from trimtab_engine.sources.source import (
    ANSWER_SECONDS,
    PART_BYTES,
    TRANSIENT,
    Arriving,
    Checksum,
    Hashed,
    Interrupted,
    SourceUnavailable,
    patiently,
)

MAX_OBJECTS = 10_000  # directly below a prefix: a folder with more is no model
MAX_STATES = 1_000  # earlier states of a prefix that are looked through for the pinned one
MD5 = re.compile(r"[0-9a-f]{32}")
MD5_OF_PARTS = re.compile(r"(?P<digest>[0-9a-f]{32})-(?P<count>\d{1,5})")
MAX_NAMED = 5  # folders that an error names
BUSY = frozenset(
    {"SlowDown", "Throttling", "ThrottlingException", "RequestTimeout", "InternalError", "RequestLimitExceeded"}
)
WRONG_KEYS = frozenset({"InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidSecurity", "InvalidToken"})
GIVE = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or spec.model.s3.credentialsSecret in an InferenceDeployment"

logger = logging.getLogger("trimtab_engine.sources")

Answer = TypeVar("Answer")


class _Client(Protocol):
    """The calls of botocore's client that are made here; their answers are checked where they are read."""

    def list_objects_v2(self, **asked: object) -> Mapping[str, Any]: ...

    def list_object_versions(self, **asked: object) -> Mapping[str, Any]: ...

    def head_object(self, **asked: object) -> Mapping[str, Any]: ...

    def get_object(self, **asked: object) -> Mapping[str, Any]: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class S3Source:
    """Client of the endpoint from the environment. `is_anonymous`: no credentials were found."""

    client: _Client
    endpoint: str
    is_anonymous: bool

    @classmethod
    def reached(cls, addressing: str | None) -> "S3Source":
        """Create the client from the environment.

        Raises:
            ModelError: the settings are contradictory.
        """
        style: dict[str, str] = {} if addressing is None else {"addressing_style": addressing}
        settings = Config(
            connect_timeout=ANSWER_SECONDS,
            read_timeout=ANSWER_SECONDS,
            retries={"total_max_attempts": 1},  # callers retry, and can be stopped between attempts
            s3=style,
        )
        try:
            session = botocore.session.get_session()
            is_anonymous = session.get_credentials() is None
            if is_anonymous:
                settings = settings.merge(Config(signature_version=UNSIGNED))
            client = session.create_client("s3", config=settings)
        except (BotoCoreError, ValueError) as error:
            raise ModelError(f"s3:// is not usable: {one_line(error)}; check the AWS_… environment variables") from None
        return cls(cast(_Client, client), str(client.meta.endpoint_url), is_anonymous)

    @property
    def shown(self) -> str:
        return self.endpoint

    def forbidden(self) -> str | None:
        return None

    def ask(self, model: RemoteModel, *, patient: bool = True) -> Listing:
        """Return the objects directly below the prefix, pinned by their names, sizes and ETags. An earlier state is
        restored if the bucket has versioning.
        """
        files, folders = self._listed(model, patient)
        if not files:
            raise self._empty_prefix_error(model, folders)
        pin = pin_of(files)
        if model.is_pinned and pin != model.revision:
            return Listing(model, str(model.revision), self._earlier_objects(model, pin, patient))
        return Listing(model, pin, files)

    def checksum(self, listing: Listing, file: RemoteFile) -> Callable[[], Checksum]:
        """The strongest that the object was stored with. One that was encrypted with a key of KMS, and uploaded without
        a checksum, has none that could be compared: its length and the transport's own must do.
        """
        of_parts = MD5_OF_PARTS.fullmatch(file.etag)
        first_part = {"PartNumber": 1} if of_parts else {}
        head = self._answer(
            lambda: self.client.head_object(**_object(listing, file), ChecksumMode="ENABLED", **first_part),
            listing.model,
        )
        sha256, crc32 = head.get("ChecksumSHA256"), head.get("ChecksumCRC32")
        is_md5 = "aws:kms" not in str(head.get("ServerSideEncryption")) and not head.get("SSECustomerAlgorithm")
        if isinstance(sha256, str) and "-" not in sha256 and not of_parts:
            return lambda: Hashed(hashlib.sha256(), base64.b64decode(sha256).hex())
        if is_md5 and MD5.fullmatch(file.etag):
            return lambda: Hashed(hashlib.md5(usedforsecurity=False), file.etag)
        part_bytes = int(head.get("ContentLength") or 0)
        if is_md5 and of_parts and part_bytes and math.ceil(file.size / part_bytes) == int(of_parts["count"]):
            return lambda: HashedInParts(part_bytes, file.etag)
        if isinstance(crc32, str) and "-" not in crc32 and not of_parts:
            return lambda: Crc32(int.from_bytes(base64.b64decode(crc32), "big"))
        logger.warning("%s: the bucket has no checksum of %s that could be compared", listing.model, file.name)
        return Unchecked

    def fill(self, listing: Listing, file: RemoteFile, arriving: Arriving) -> None:
        wanted = {"Range": f"bytes={arriving.size}-", "IfMatch": f'"{file.etag}"'}
        try:
            answer = self.client.get_object(**_object(listing, file), **wanted)
            if arriving.size and "ContentRange" not in answer:
                arriving.restart()
            for part in answer["Body"].iter_chunks(PART_BYTES):
                arriving.write(part)
        except ClientError as error:
            code, status = _code_of(error)
            if status == 416:
                arriving.restart()
            elif status == 412:
                raise ModelError(
                    f"{listing.model}: {file.name} was overwritten while it was fetched; start again, and write a new "
                    f"prefix for each version of a model"
                ) from None
            elif not _is_retryable(code, status):
                raise self._refused(listing.model, error) from None
            raise Interrupted(f"{self.endpoint} answers {code}") from None
        except (IncompleteReadError, ConnectionError, HTTPClientError) as error:
            raise Interrupted(one_line(error)) from None
        except BotoCoreError as error:
            raise ModelError(f"{listing.model}: {one_line(error)}; {_credentials()}") from None

    def offline_advice(self, model: RemoteModel) -> str:
        return f"trimtab-engine fetch {model}"

    def close(self) -> None:
        self.client.close()

    # --- listing ------------------------------------------------------------------------------------------------------

    def _listed(self, model: RemoteModel, patient: bool) -> tuple[tuple[RemoteFile, ...], tuple[str, ...]]:
        """The objects and the folders directly below the prefix."""
        bucket, prefix = bucket_and_prefix(model)
        found: list[RemoteFile] = []
        folders: list[str] = []
        more: dict[str, str] = {}
        while len(found) < MAX_OBJECTS:
            page = self._answer(
                partial(self.client.list_objects_v2, Bucket=bucket, Prefix=prefix, Delimiter="/", **more),
                model,
                patient=patient,
            )
            found += [_file(entry, prefix) for entry in page.get("Contents", ()) if entry["Key"] != prefix]
            folders += [str(entry["Prefix"]).removeprefix(prefix) for entry in page.get("CommonPrefixes", ())]
            if not page.get("IsTruncated"):
                break
            more = {"ContinuationToken": str(page["NextContinuationToken"])}
        return tuple(found), tuple(folders)

    def _earlier_objects(self, model: RemoteModel, pin_now: str, patient: bool) -> tuple[RemoteFile, ...]:
        """The objects at the time when they had the pin. Raises ModelError where the bucket does not keep it."""
        changed = (
            f"{model}: the objects have changed since they were pinned; put those back, or take the present ones, "
            f"{replaced(model, pin_now)} (an InferenceDeployment does when its ConfigMap NAME-facts is deleted)"
        )
        bucket, prefix = bucket_and_prefix(model)
        entries: list[Mapping[str, Any]] = []
        more: dict[str, str] = {}
        try:
            while len(entries) < MAX_OBJECTS:
                page = self._answer(
                    partial(self.client.list_object_versions, Bucket=bucket, Prefix=prefix, Delimiter="/", **more),
                    model,
                    patient=patient,
                )
                entries += [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
                if not page.get("IsTruncated"):
                    break
                more = {"KeyMarker": page["NextKeyMarker"], "VersionIdMarker": page["NextVersionIdMarker"]}
        except SourceUnavailable:
            raise
        except ModelError:  # listing a bucket does not imply the permission to list its versions
            raise ModelError(changed) from None
        for files in states_of(entries, prefix):
            if pin_of(files) == model.revision:
                return files
        raise ModelError(changed)

    def _empty_prefix_error(self, model: RemoteModel, folders: Sequence[str]) -> ModelError:
        if folders:
            names = ", ".join(folders[:MAX_NAMED]) + (", …" if len(folders) > MAX_NAMED else "")
            return ModelError(f"{model}: holds no files, but the folders {names}; name one of them")
        bucket, prefix = bucket_and_prefix(model)
        return ModelError(
            f"{model}: there is nothing below {prefix or '/'} in the bucket {bucket} at {self.endpoint}; check the "
            f"spelling of the prefix, and that the model was uploaded"
        )

    # --- requests -----------------------------------------------------------------------------------------------------

    def _answer(self, ask: Callable[[], Answer], model: RemoteModel, *, patient: bool = True) -> Answer:
        """Return the response after retries.

        Raises:
            ModelError: the request failed, with what to do.
            SourceSilent: there was no response.
        """

        def once() -> Answer:
            try:
                return ask()
            except ClientError as error:
                code, status = _code_of(error)
                if not _is_retryable(code, status):
                    raise self._refused(model, error) from None
                raise SourceUnavailable(f"{model}: {self.endpoint} answers {code}; try again later") from None
            except (HTTPClientError, ConnectionError) as error:
                raise SourceUnavailable(
                    f"{model}: {self.endpoint} cannot be reached ({one_line(error)}); check the network, HTTPS_PROXY "
                    f"or AWS_ENDPOINT_URL (spec.model.s3.endpoint)"
                ) from None
            except BotoCoreError as error:
                raise ModelError(f"{model}: {one_line(error)}; {_credentials()}") from None

        return patiently(once, patient=patient)

    def _refused(self, model: RemoteModel, error: ClientError) -> ModelError:
        """Return the message for an error response, with what to do."""
        code, status = _code_of(error)
        bucket = bucket_and_prefix(model)[0]
        if code == "NoSuchBucket":
            return ModelError(
                f"{model}: there is no bucket {bucket} at {self.endpoint}; check the spelling, and that "
                f"AWS_ENDPOINT_URL (spec.model.s3.endpoint) is the store that has it"
            )
        if code == "RequestTimeTooSkewed":
            return ModelError(
                f"{model}: the clock of this machine differs too much from that of {self.endpoint} ({code}); set it by "
                f"NTP: requests are signed with their time"
            )
        if code in ("ExpiredToken", "TokenRefreshRequired"):
            return ModelError(f"{model}: the credentials have expired ({code}); give new ones: {GIVE}")
        if code in WRONG_KEYS:
            return ModelError(f"{model}: {self.endpoint} does not know these credentials ({code}); give others: {GIVE}")
        if code in ("NoSuchKey", "NoSuchVersion") or status == 404:
            return ModelError(f"{model}: an object is no longer in the bucket {bucket} ({code}); start again")
        if code in ("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraintException"):
            return ModelError(
                f"{model}: the bucket {bucket} is in another region ({code}); name it: AWS_DEFAULT_REGION, or "
                f"spec.model.s3.region"
            )
        if status == 403:
            if self.is_anonymous:
                return ModelError(
                    f"{model}: public access is denied ({code}), and no credentials were found; provide some: {GIVE}"
                )
            return ModelError(
                f"{model}: these credentials may not read it ({code}); let them s3:ListBucket {bucket} and "
                f"s3:GetObject below the prefix, or give others: {GIVE}"
            )
        return ModelError(f"{model}: {self.endpoint} answers {code}; see the bucket {bucket} there")


# --- objects and pins, pure -------------------------------------------------------------------------------------------


def bucket_and_prefix(model: RemoteModel) -> tuple[str, str]:
    """Return the bucket and the key prefix of the model's files: empty, or a folder with a trailing slash."""
    bucket, _, rest = model.place.partition("/")
    return bucket, f"{rest}/" if rest else ""


def pin_of(files: Iterable[RemoteFile]) -> str:
    """Return the digest of all objects that can be part of a model; other files, such as a README, do not change it."""
    said = sorted((file.name, file.size, file.etag) for file in files if file.name.endswith(LOADED_SUFFIXES))
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()


def replaced(model: RemoteModel, pin: str) -> str:
    """The same model at another pin, as it is written."""
    return str(RemoteModel(model.scheme, model.place, pin, model.file))


def states_of(entries: Sequence[Mapping[str, Any]], prefix: str) -> Iterator[tuple[RemoteFile, ...]]:
    """Return the states below the prefix after each change, newest first, from object versions and delete markers
    (which have no ETag).

    Modification times have a resolution of one second. Of changes in the same second, those of existing keys are undone
    first: a model is complete before any of its objects is overwritten.
    """
    versions: dict[str, list[Mapping[str, Any]]] = {}
    newest_first = sorted(entries, key=lambda entry: (entry["LastModified"], bool(entry.get("IsLatest"))), reverse=True)
    for entry in newest_first:
        versions.setdefault(entry["Key"], []).append(entry)
    changes = [(one["LastModified"], one is not kept[-1], key) for key, kept in versions.items() for one in kept]
    taken_back = dict.fromkeys(versions, 0)
    yield _state(versions, taken_back, prefix)
    for _, _, key in sorted(changes, key=lambda change: change[:2], reverse=True)[:MAX_STATES]:
        taken_back[key] += 1
        yield _state(versions, taken_back, prefix)


def _state(
    versions: Mapping[str, Sequence[Mapping[str, Any]]], taken_back: Mapping[str, int], prefix: str
) -> tuple[RemoteFile, ...]:
    present = [kept[taken_back[key]] for key, kept in versions.items() if taken_back[key] < len(kept)]
    return tuple(_file(entry, prefix) for entry in present if "ETag" in entry and entry["Key"] != prefix)


def _file(entry: Mapping[str, Any], prefix: str) -> RemoteFile:
    name, etag, size = str(entry["Key"]).removeprefix(prefix), str(entry["ETag"]).strip('"'), int(entry["Size"])
    version = str(entry["VersionId"]) if "VersionId" in entry else None
    digest = hashlib.sha256(f"{name}\n{size}\n{etag}".encode()).hexdigest()
    return RemoteFile(name, size, digest, etag, version)


def _object(listing: Listing, file: RemoteFile) -> dict[str, str]:
    bucket, prefix = bucket_and_prefix(listing.model)
    return {"Bucket": bucket, "Key": prefix + file.name} | ({"VersionId": file.version} if file.version else {})


# --- checksums --------------------------------------------------------------------------------------------------------


class HashedInParts:
    """Return the ETag of a multipart upload with parts of equal size: the MD5 of the parts' MD5s, and their number."""

    def __init__(self, part_bytes: int, etag: str) -> None:
        self._part_bytes, self._etag = part_bytes, etag
        self._parts: list[bytes] = []
        self._part, self._left = hashlib.md5(usedforsecurity=False), part_bytes

    def update(self, data: memoryview | bytes, /) -> None:
        view = memoryview(data)
        while view:
            self._part.update(view[: self._left])
            taken = min(self._left, len(view))
            view, self._left = view[taken:], self._left - taken
            if not self._left:
                self._close_part()

    def _close_part(self) -> None:
        self._parts.append(self._part.digest())
        self._part, self._left = hashlib.md5(usedforsecurity=False), self._part_bytes

    def is_right(self) -> bool:
        parts = [*self._parts, *([self._part.digest()] if self._left < self._part_bytes else [])]
        return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}" == self._etag


class Crc32:
    """Default checksum algorithm of Amazon's clients."""

    def __init__(self, promised: int) -> None:
        self._promised, self._value = promised, 0

    def update(self, data: memoryview | bytes, /) -> None:
        self._value = zlib.crc32(data, self._value)

    def is_right(self) -> bool:
        return self._value == self._promised


class Unchecked:
    """No checksum, for objects without one; the length is still compared."""

    def update(self, data: memoryview | bytes, /) -> None:
        """Nothing is kept of it."""

    def is_right(self) -> bool:
        return True


# --- errors -----------------------------------------------------------------------------------------------------------


def _code_of(error: ClientError) -> tuple[str, int]:
    """The store's word for it, and the status of HTTP."""
    response = cast(Mapping[str, Any], error.response)
    status = int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))
    return str(response.get("Error", {}).get("Code") or status), status


def _is_retryable(code: str, status: int) -> bool:
    return code in BUSY or status in TRANSIENT


def _credentials() -> str:
    return f"check the credentials: {GIVE}"

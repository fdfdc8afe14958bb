"""OCI registries, over the HTTP API of the distribution specification: manifests, blobs, tokens.

Maintained Python clients cannot resume a blob, and only two kinds of GET are needed, so the API is used directly.
"""

import base64
import binascii
import hashlib
import io
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

import httpx

from trimtab_engine.errors import ConfigError, ModelError, one_line
from trimtab_engine.sources.files import Listing, RemoteFile
from trimtab_engine.sources.name import RemoteModel
from trimtab_engine.sources.oci_manifest import ACCEPTED, INDEX_TYPES, chosen_manifest, layers_of, parsed
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

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_MANIFEST_BYTES = 16 << 20
DOCKER_HUB, DOCKER_HUB_HOST = "docker.io", "registry-1.docker.io"
DOCKER_HUB_KEYS = ("https://index.docker.io/v1/", "index.docker.io", DOCKER_HUB)
OF_THIS_MACHINE = re.compile(r"(?:localhost|127(?:\.\d{1,3}){3}|\[::1\])(?::\d+)?")
CHALLENGE = re.compile(r'([a-z_]+)="([^"]*)"')
PARTIAL, NOT_SATISFIABLE = 206, 416
GIVE = "--registry-auth-file, or spec.model.oci.pullSecret in an InferenceDeployment"


@dataclass(frozen=True, slots=True)
class Account:
    """Registry credentials. `token` is an identity token, which some registries issue instead of a password."""

    user: str
    password: str
    token: str | None = None


@dataclass(slots=True)
class _Authorization:
    """Last accepted authorization: sent with every request until it is rejected."""

    header: str | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)


@dataclass(frozen=True, slots=True)
class RegistrySource:
    """One repository of a registry."""

    host: str
    repository: str
    url: str
    client: httpx.Client
    account: Account | None
    door: _Authorization = field(default_factory=_Authorization)

    @classmethod
    def reached(cls, model: RemoteModel, *, plain_http: bool, auth_file: Path | None) -> "RegistrySource":
        """The registry that the model names. Raises ConfigError for a file of accounts that cannot be read."""
        host, _, repository = model.place.partition("/")
        scheme = "http" if plain_http or OF_THIS_MACHINE.fullmatch(host) else "https"
        if host == DOCKER_HUB and "/" not in repository:
            repository = f"library/{repository}"
        there = DOCKER_HUB_HOST if host == DOCKER_HUB else host
        client = httpx.Client(timeout=ANSWER_SECONDS, follow_redirects=True, headers={"Accept-Encoding": "identity"})
        return cls(host, repository, f"{scheme}://{there}", client, account_of(host, auth_file))

    @property
    def shown(self) -> str:
        return self.url

    def forbidden(self) -> str | None:
        return None

    def ask(self, model: RemoteModel, *, patient: bool = True) -> Listing:
        digest, manifest = self._manifest(model, model.asked, patient)
        if manifest.get("mediaType") in INDEX_TYPES or "manifests" in manifest:
            _, inner = self._manifest(model, chosen_manifest(model, manifest), patient)
        else:
            inner = manifest
        files, archives = layers_of(model, inner)
        return Listing(model, digest, files, archives)

    def checksum(self, listing: Listing, file: RemoteFile) -> Callable[[], Checksum]:
        return lambda: Hashed(hashlib.sha256(), file.digest)

    def fill(self, listing: Listing, file: RemoteFile, arriving: Arriving) -> None:
        wanted = {"Range": f"bytes={arriving.size}-"} if arriving.size else {}
        try:
            with self._asked(f"blobs/sha256:{file.digest}", wanted) as response:
                if response.status_code == NOT_SATISFIABLE:
                    arriving.restart()
                if response.status_code >= 400 and response.status_code not in (NOT_SATISFIABLE, *TRANSIENT):
                    raise self._refused(listing.model, response)
                if response.status_code >= 400:
                    raise Interrupted(f"{self.host} answers {response.status_code}")
                if arriving.size and response.status_code != PARTIAL:
                    arriving.restart()
                for part in response.iter_raw(PART_BYTES):
                    arriving.write(part)
        except httpx.TransportError as error:
            raise Interrupted(one_line(error)) from None

    def reader(self, listing: Listing, archive: RemoteFile, buffer_bytes: int) -> BinaryIO:
        return cast(BinaryIO, io.BufferedReader(_Blob(self, listing, archive), buffer_bytes))

    def part_of(self, listing: Listing, file: RemoteFile, begin: int, end: int) -> bytes:
        """Bytes of a blob. Raises ModelError, or SourceSilent after several attempts."""

        def once() -> bytes:
            try:
                path = f"blobs/sha256:{file.digest}"
                with self._asked(path, {"Range": f"bytes={begin}-{end - 1}"}) as response:
                    if response.status_code >= 400 and response.status_code not in TRANSIENT:
                        raise self._refused(listing.model, response)
                    if response.status_code >= 400:
                        raise SourceUnavailable(
                            f"{listing.model}: {self.host} answers {response.status_code}; try again"
                        )
                    if response.status_code != PARTIAL and (begin, end) != (0, file.size):
                        raise ModelError(
                            f"{listing.model}: {self.host} gives no part of a layer, so it cannot be described without "
                            f"being fetched; trimtab-engine fetch {listing.model}, then inspect that"
                        )
                    return response.read()
            except httpx.TransportError as error:
                raise SourceUnavailable(f"{listing.model}: {self.host} does not give it ({one_line(error)})") from None

        return patiently(once)

    def offline_advice(self, model: RemoteModel) -> str:
        return f"trimtab-engine fetch {model}"

    def close(self) -> None:
        self.client.close()

    # --- requests -----------------------------------------------------------------------------------------------------

    def _manifest(self, model: RemoteModel, reference: str, patient: bool) -> tuple[str, Mapping[str, Any]]:
        """Return the manifest and its digest.

        Raises:
            ModelError: the digest differs from the requested or the announced one.
        """
        text, promised = patiently(lambda: self._manifest_once(model, reference), patient=patient)
        digest = f"sha256:{hashlib.sha256(text).hexdigest()}"
        for said in (reference if ":" in reference else None, promised):
            if said is not None and said.startswith("sha256:") and said != digest:
                raise ModelError(
                    f"{model}: the manifest from {self.host} has digest {digest}, not {said}; something "
                    f"between here and there changes it: take it out, or pull from elsewhere"
                )
        return digest, parsed(model, text)

    def _manifest_once(self, model: RemoteModel, reference: str) -> tuple[bytes, str | None]:
        try:
            with self._asked(f"manifests/{reference}", {"Accept": ACCEPTED}) as response:
                if response.status_code in TRANSIENT:
                    raise SourceUnavailable(f"{model}: {self.host} answers {response.status_code}; try again later")
                if response.status_code >= 400:
                    raise self._refused(model, response)
                text = b""
                for part in response.iter_raw(PART_BYTES):
                    text += part
                    if len(text) > MAX_MANIFEST_BYTES:
                        raise ModelError(f"{model}: the manifest is larger than any; name another tag")
                return text, response.headers.get("Docker-Content-Digest")
        except httpx.HTTPError as error:
            raise SourceUnavailable(
                f"{model}: {self.url} cannot be reached ({one_line(error)}); check the network or HTTPS_PROXY; a "
                f"registry without TLS wants --registry-plain-http (spec.model.oci.plainHttp)"
            ) from None

    @contextmanager
    def _asked(self, path: str, headers: Mapping[str, str]) -> Iterator[httpx.Response]:
        """Return one streaming response. A 401 is answered once with the authorization that the registry requests."""
        url = f"{self.url}/v2/{self.repository}/{path}"
        used = self.door.header
        with self.client.stream("GET", url, headers=_with(headers, used)) as response:
            # A redirect target gets no credentials: a blob's address is signed or public.
            is_elsewhere = bool(response.history) and response.url.netloc != httpx.URL(self.url).netloc
            if response.status_code != 401 or is_elsewhere:
                yield response
                return
            response.read()
            challenge = response.headers.get("WWW-Authenticate", "")
        with self.door.lock:
            if self.door.header == used:
                self.door.header = self._opened(challenge)
        with self.client.stream("GET", url, headers=_with(headers, self.door.header)) as response:
            yield response

    def _opened(self, challenge: str) -> str | None:
        """The header that the registry wants: the account itself, or a token that another server gives for it."""
        kind, _, rest = challenge.partition(" ")
        if kind.lower() == "basic":
            return None if self.account is None else _basic(self.account)
        parameters = dict(CHALLENGE.findall(rest))
        if kind.lower() != "bearer" or not parameters.get("realm"):
            return None
        if self.account is not None and self.url.startswith("https:") and not parameters["realm"].startswith("https:"):
            raise ModelError(
                f"{self.host} has its tokens at {parameters['realm']}, without TLS, where its account would be sent in "
                f"clear text; correct the registry's realm, or remove its account ({GIVE})"
            )
        asked = {
            "service": parameters.get("service", ""),
            "scope": parameters.get("scope", f"repository:{self.repository}:pull"),
        }
        if self.account is not None and self.account.token is not None:
            form = {**asked, "grant_type": "refresh_token", "refresh_token": self.account.token, "client_id": "trimtab"}
            answer = self.client.post(parameters["realm"], data=form)
        else:
            account = {} if self.account is None else {"Authorization": _basic(self.account)}
            answer = self.client.get(parameters["realm"], params=asked, headers=account)
        if answer.status_code in TRANSIENT:
            raise httpx.ReadError(f"the server that gives its tokens answers {answer.status_code}")
        try:
            given = answer.json()
            token = given.get("token") or given.get("access_token")
        except (ValueError, AttributeError):
            token = None
        return f"Bearer {token}" if answer.is_success and token else None

    def _refused(self, model: RemoteModel, response: httpx.Response) -> ModelError:
        """Return the message for an HTTP error, with what to do."""
        status, code = response.status_code, _code_of(response)
        if status in (401, 403):
            if self.account is None:
                return ModelError(
                    f"{model}: {self.host} has no such public model ({code}); check the spelling, "
                    f"and if it is private, give an account: {GIVE}"
                )
            return ModelError(
                f"{model}: {self.host} does not let {self.account.user or 'this token'} pull it ({code}); check "
                f"the spelling, or give another account: {GIVE}"
            )
        if status == 404 and code == "NAME_UNKNOWN":
            return ModelError(f"{model}: {self.host} has no repository {self.repository}; check the spelling")
        if status == 404 and code == "BLOB_UNKNOWN":
            return ModelError(f"{model}: {self.host} has lost a layer of it ({code}); push it again")
        if status == 404:
            what = "manifest" if model.is_pinned else "tag"
            return ModelError(
                f"{model}: {self.host} has no {what} {model.asked} in {self.repository} ({code}); check both names"
            )
        return ModelError(f"{model}: {self.host} answers {status} ({code}); check the registry")


class _Blob(io.RawIOBase):
    """Seekable view of a blob in the registry."""

    def __init__(self, source: RegistrySource, listing: Listing, file: RemoteFile) -> None:
        super().__init__()
        self._source, self._listing, self._file = source, listing, file
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._file.size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        view = memoryview(buffer).cast("B")
        end = min(self._at + len(view), self._file.size)
        if end <= self._at:
            return 0
        data = self._source.part_of(self._listing, self._file, self._at, end)
        view[: len(data)] = data
        self._at += len(data)
        return len(data)


# --- accounts ---------------------------------------------------------------------------------------------------------


def account_of(host: str, auth_file: Path | None) -> Account | None:
    """Return the credentials for a registry from a Docker config file (config.json, or a pull secret's
    .dockerconfigjson), or None if it has none.

    Raises:
        ConfigError: the file cannot be read, or uses a credential helper.
    """
    if auth_file is None:
        return None
    try:
        said = json.loads(auth_file.read_text(encoding="utf-8"))
        accounts = said.get("auths") or {}
        helpers = said.get("credHelpers") or {}
        found = next((accounts[key] for key in _keys(host) if isinstance(accounts.get(key), dict)), None)
    except (OSError, ValueError, AttributeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON with auths"
        raise ConfigError(
            f"--registry-auth-file {auth_file} cannot be read: {why}; write it as Docker's config.json"
        ) from None
    if found is None and host in helpers:
        raise ConfigError(
            f"--registry-auth-file {auth_file} leaves {host} to the helper {helpers[host]}, and helpers are not run "
            f"here; write the credentials into a separate file"
        )
    return None if found is None else _account(found, auth_file)


def _account(found: Mapping[str, Any], auth_file: Path) -> Account | None:
    user, password, token = (str(found.get(key) or "") for key in ("username", "password", "identitytoken"))
    if isinstance(found.get("auth"), str) and found["auth"]:
        try:
            user, _, password = base64.b64decode(found["auth"], validate=True).decode().partition(":")
        except (binascii.Error, UnicodeDecodeError):
            raise ConfigError(
                f"--registry-auth-file {auth_file}: an auth in it is no base64 of USER:PASSWORD"
            ) from None
    return Account(user, password, token or None) if user or password or token else None


def _keys(host: str) -> tuple[str, ...]:
    """The names under which Docker keeps the account of a registry."""
    return DOCKER_HUB_KEYS if host == DOCKER_HUB else (host, f"https://{host}", f"http://{host}", f"https://{host}/v2/")


def _basic(account: Account) -> str:
    return "Basic " + base64.b64encode(f"{account.user}:{account.password}".encode()).decode()


def _with(headers: Mapping[str, str], authorization: str | None) -> dict[str, str]:
    return dict(headers) if authorization is None else {**headers, "Authorization": authorization}


def _code_of(response: httpx.Response) -> str:
    """The registry's word for it, else the status of HTTP."""
    try:
        response.read()
        return str(response.json()["errors"][0]["code"])
    except (httpx.HTTPError, ValueError, KeyError, IndexError, TypeError):
        return str(response.status_code)

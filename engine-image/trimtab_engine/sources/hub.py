"""The Hugging Face hub or a mirror: model listing, downloads, and error messages. Addresses, tokens and proxies are
huggingface_hub's own, from HF_ENDPOINT, HF_TOKEN or HF_TOKEN_PATH, HTTPS_PROXY etc.

huggingface_hub's own downloads restart a file in every process. A pod killed in the middle of a 5 GB shard must resume
it, so the bytes go through huggingface_hub's HTTP client into a file that is managed here.
"""

import hashlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import BinaryIO, cast

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented there, marked nowhere
from huggingface_hub.utils.tqdm import silent_tqdm

from trimtab_engine.errors import ModelError, one_line
from trimtab_engine.sources.files import Listing, RemoteFile
from trimtab_engine.sources.name import PINS, RemoteModel, Scheme
from trimtab_engine.sources.source import (
    ANSWER_SECONDS,
    TRANSIENT,
    Arriving,
    Checksum,
    Hashed,
    Interrupted,
    SourceUnavailable,
    patiently,
)

OFFLINE = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
NOT_SATISFIABLE = 416
DIGEST = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")  # also the name of a file in the cache
SHA256_LENGTH = 64  # hex digits; the hub's other digest is git's SHA-1, of small files


def silence_library_logs() -> None:
    """Suppress huggingface_hub's log lines for requests and retries; the server logs its own."""
    for name in ("httpx2", "huggingface_hub"):  # the latter sets its level when it is imported: here that is done
        logging.getLogger(name).setLevel(logging.ERROR)


def default_cache() -> str:
    """Return huggingface_hub's cache folder: HF_HUB_CACHE, or below HF_HOME."""
    return str(constants.HF_HUB_CACHE)


@dataclass(frozen=True, slots=True)
class HubSource:
    """The hub at `endpoint`; None for HF_ENDPOINT."""

    endpoint: str | None = None

    @property
    def shown(self) -> str:
        return f"the hub at {_address(self.endpoint)}"

    def forbidden(self) -> str | None:
        return f"the hub is not used, as {OFFLINE}: unset it" if constants.is_offline_mode() else None

    def ask(self, model: RemoteModel, *, patient: bool = True) -> Listing:
        if self.forbidden() is not None:
            raise SourceUnavailable(
                f"{model}: the hub is not used, as {OFFLINE}; unset it, or, where the cache has the model, give "
                f"the folder that trimtab-engine fetch {model} prints"
            )
        return patiently(lambda: self._ask_once(model), patient=patient)

    def _ask_once(self, model: RemoteModel) -> Listing:
        try:
            info = HfApi(endpoint=self.endpoint).model_info(
                model.place, revision=model.revision, files_metadata=True, timeout=ANSWER_SECONDS
            )
        except HfHubHTTPError as error:
            if error.response.status_code not in TRANSIENT:
                raise _refused(model, error, self.endpoint) from None
            raise SourceUnavailable(
                f"{model}: {self.shown} answers {error.response.status_code}; try again later"
            ) from None
        except httpx2.HTTPError as error:
            raise SourceUnavailable(
                f"{model}: {self.shown} cannot be reached ({one_line(error)}); check the network, HTTPS_PROXY or "
                f"HF_ENDPOINT (a mirror)"
            ) from None
        return _listing(model, info, self.endpoint)

    def checksum(self, listing: Listing, file: RemoteFile) -> Callable[[], Checksum]:
        """SHA-256 where the hub keeps it as a large file, else git's SHA-1."""
        if len(file.digest) == SHA256_LENGTH:
            return lambda: Hashed(hashlib.sha256(), file.digest)
        header = b"blob %d\0" % file.size
        return lambda: Hashed(hashlib.sha1(header, usedforsecurity=False), file.digest)

    def fill(self, listing: Listing, file: RemoteFile, arriving: Arriving) -> None:
        url = str(hf_hub_url(listing.model.place, file.name, revision=listing.commit, endpoint=self.endpoint))
        try:
            http_get(
                url,
                cast(BinaryIO, _AsFile(arriving)),
                resume_size=arriving.size,
                headers=build_hf_headers(),
                tqdm_class=cast("type", silent_tqdm),
            )
        except HfHubHTTPError as error:
            status = error.response.status_code
            if status == NOT_SATISFIABLE:
                arriving.restart()
            elif status not in TRANSIENT:
                raise _refused(listing.model, error, self.endpoint) from None
            raise Interrupted(f"the hub answers {status}") from None
        except httpx2.HTTPError as error:
            raise Interrupted(one_line(error)) from None
        except OSError as error:
            if error.errno is not None:  # the disk's; huggingface_hub's own about a wrong length has no number
                raise

    def offline_advice(self, model: RemoteModel) -> str:
        return f"trimtab-engine fetch {model}, or hf download {model.place} --local-dir FOLDER, then give FOLDER"

    def close(self) -> None:
        """Its connections are huggingface_hub's, which other threads may use."""


class _AsFile:
    """File object for huggingface_hub's download. If a server ignores the range request, it restarts at the
    beginning.
    """

    def __init__(self, arriving: Arriving) -> None:
        self._arriving = arriving

    def write(self, data: object) -> int:
        return self._arriving.write(data)

    def tell(self) -> int:
        return self._arriving.size

    def seek(self, offset: int, whence: int = 0) -> int:
        assert (offset, whence) == (0, 0)
        self._arriving.restart()
        return 0

    def truncate(self, size: int | None = None) -> int:
        return self._arriving.size


def _listing(model: RemoteModel, info: object, endpoint: str | None) -> Listing:
    commit, siblings = getattr(info, "sha", None), getattr(info, "siblings", None)
    files = []
    for sibling in siblings or ():
        digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
        size = sibling.size if sibling.lfs is None else sibling.lfs.size
        if size is None or not digest:
            raise ModelError(
                f"{model}: {_address(endpoint)} has no size and digest for {sibling.rfilename}, so that nothing "
                f"could be checked; use a mirror that passes on ?blobs=true, or the hub itself"
            )
        if DIGEST.fullmatch(str(digest)) is None:
            raise ModelError(
                f"{model}: what {_address(endpoint)} gives as the digest of {sibling.rfilename} is none; use another "
                f"mirror, or the hub itself"
            )
        files.append(RemoteFile(sibling.rfilename, int(size), str(digest)))
    if PINS[Scheme.HUB].fullmatch(str(commit)) is None:
        raise ModelError(f"{model}: {_address(endpoint)} has no commit for it; use another mirror, or the hub itself")
    if model.is_pinned and commit != model.revision:
        raise ModelError(
            f"{model}: {_address(endpoint)} answers with the commit {commit}; use another mirror, or the hub itself"
        )
    return Listing(model, str(commit), tuple(files))


def _refused(model: RemoteModel, error: HfHubHTTPError, endpoint: str | None) -> ModelError:
    """Return the message for an HTTP error, with what to do."""
    status, page = error.response.status_code, f"{_address(endpoint)}/{model.place}"
    has_token = get_token() is not None
    give = "HF_TOKEN, or spec.model.tokenSecretRef in an InferenceDeployment"
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{model}: there is no such revision; name a branch, a tag or a commit of {page}")
    if isinstance(error, GatedRepoError):
        whose = "the token's account" if has_token else "your account"
        then = "" if has_token else f", then give a token of it: {give}"
        return ModelError(f"{model}: is gated ({status}); accept its terms at {page} with {whose}{then}")
    if isinstance(error, RepositoryNotFoundError):
        seen = "that this token may read" if has_token else "that is public"
        then = "give a token that may read it" if has_token else f"give a token: {give}"
        return ModelError(
            f"{model}: the hub has no such model {seen} ({status}); see whether {page} is spelt so, and if it is "
            f"private or gated, {then}"
        )
    if status == 401:
        return ModelError(f"{model}: the hub refuses the token (401): it is wrong or has expired; give another: {give}")
    if status == 403:
        return ModelError(f"{model}: the token may not read it (403); give one with read access to {page}: {give}")
    return ModelError(f"{model}: the hub at {_address(endpoint)} answers {status}; see {page}")


def _address(endpoint: str | None) -> str:
    return endpoint or str(constants.ENDPOINT)

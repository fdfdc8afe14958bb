"""What the hub says of a model, and why it says nothing. Addresses, tokens and proxies are huggingface_hub's own, from
HF_ENDPOINT, HF_TOKEN or HF_TOKEN_PATH, HTTPS_PROXY and their like."""

import logging
import time

import httpx2
from huggingface_hub import HfApi, constants, get_token, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from trimtab_engine.errors import ModelError
from trimtab_engine.hub.files import HubFile, Listing
from trimtab_engine.hub.name import HubModel

ANSWER_SECONDS = 20.0
TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
OFFLINE = "HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE is set"
PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0)
"""Between attempts at an answer."""


class HubSilent(ModelError):
    """The hub cannot be reached, or not now: what is in the cache already has to do."""


def is_offline() -> bool:
    """Whether HF_HUB_OFFLINE or TRANSFORMERS_OFFLINE forbids to ask."""
    return bool(constants.is_offline_mode())


def say_errors_alone() -> None:
    """Keep what huggingface_hub says of every request and every cut out of a server's log, which has its own words."""
    for name in ("httpx2", "huggingface_hub"):  # the latter sets its level when it is imported: here that is done
        logging.getLogger(name).setLevel(logging.ERROR)


def default_cache() -> str:
    """Where huggingface_hub keeps what it fetches: HF_HUB_CACHE, or below HF_HOME."""
    return str(constants.HF_HUB_CACHE)


def url_of(listing: Listing, file: HubFile, endpoint: str | None) -> str:
    return str(hf_hub_url(listing.model.repo, file.name, revision=listing.commit, endpoint=endpoint))


def ask(model: HubModel, endpoint: str | None, *, patient: bool = True) -> Listing:
    """The files of the model at the commit that its revision means now. Raises ModelError with what to do, HubSilent
    where there is no answer; `patient`: not before it was asked several times."""
    pauses = list(PAUSES_SECONDS) if patient else []
    while True:
        try:
            info = HfApi(endpoint=endpoint).model_info(
                model.repo, revision=model.revision, files_metadata=True, timeout=ANSWER_SECONDS
            )
        except OfflineModeIsEnabled:
            raise HubSilent(
                f"{model}: the hub is not asked, as {OFFLINE}; unset it, or, where the cache has the model, give the "
                f"folder that trimtab-engine fetch {model} prints"
            ) from None
        except HfHubHTTPError as error:
            if error.response.status_code not in TRANSIENT:
                raise refused(model, error, endpoint) from None
            words = f"{model}: the hub at {shown(endpoint)} answers {error.response.status_code}; try again later"
        except httpx2.HTTPError as error:
            words = (
                f"{model}: the hub at {shown(endpoint)} cannot be reached ({_one_line(error)}); see to the network, "
                f"HTTPS_PROXY or HF_ENDPOINT (a mirror)"
            )
        else:
            return _listing(model, info, endpoint)
        if not pauses:
            raise HubSilent(words)
        time.sleep(pauses.pop(0))


def _listing(model: HubModel, info: object, endpoint: str | None) -> Listing:
    commit, siblings = getattr(info, "sha", None), getattr(info, "siblings", None)
    files = []
    for sibling in siblings or ():
        digest = sibling.blob_id if sibling.lfs is None else sibling.lfs.sha256
        size = sibling.size if sibling.lfs is None else sibling.lfs.size
        if size is None or not digest:
            raise ModelError(
                f"{model}: {shown(endpoint)} does not say size and digest of {sibling.rfilename}, so that nothing "
                f"could be checked; use a mirror that passes on ?blobs=true, or the hub itself"
            )
        files.append(HubFile(sibling.rfilename, int(size), str(digest)))
    if not commit:
        raise ModelError(f"{model}: {shown(endpoint)} does not say its commit; use another mirror, or the hub itself")
    return Listing(model, str(commit), tuple(files))


def refused(model: HubModel, error: HfHubHTTPError, endpoint: str | None) -> ModelError:
    """What the hub's refusal means, and who does what now."""
    status, page = error.response.status_code, f"{shown(endpoint)}/{model.repo}"
    has_token = get_token() is not None
    give = "HF_TOKEN, or spec.model.tokenSecretRef in an InferenceDeployment"
    if isinstance(error, RevisionNotFoundError):
        return ModelError(f"{model}: there is no such revision; name a branch, a tag or a commit of {page}")
    if isinstance(error, GatedRepoError):
        whose = "the token's account" if has_token else "your account"
        then = "" if has_token else f", then give a token of it: {give}"
        return ModelError(f"{model}: is gated ({status}); accept its terms at {page} with {whose}{then}")
    if isinstance(error, RepositoryNotFoundError):
        seen = "that this token may read" if has_token else "that everybody may read"
        then = "give a token that may read it" if has_token else f"give a token: {give}"
        return ModelError(
            f"{model}: the hub has no such model {seen} ({status}); see whether {page} is spelt so, and if it is "
            f"private or gated, {then}"
        )
    if status == 401:
        return ModelError(f"{model}: the hub refuses the token (401): it is wrong or has expired; give another: {give}")
    if status == 403:
        return ModelError(f"{model}: the token may not read it (403); give one with read access to {page}: {give}")
    return ModelError(f"{model}: the hub at {shown(endpoint)} answers {status}; see {page}")


def shown(endpoint: str | None) -> str:
    return endpoint or str(constants.ENDPOINT)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__

"""How the operator comes to know a model before any engine runs: a Job reads it once, a ConfigMap keeps the result.

Pure: observed children and the time go in; what is known, and what to apply or delete, comes out. The result is kept by
uri, revision and image. A Job that fails is tried again with a growing pause, and its last words are kept meanwhile.
Deleting the ConfigMap has the model read again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from trimtab_operator.builders.config_map import facts_config_map
from trimtab_operator.builders.facts_job import facts_job
from trimtab_operator.builders.labels import facts_name
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.observed.actions import Action, Apply, Delete
from trimtab_operator.observed.groups import Observed, groups_of, is_terminating
from trimtab_operator.observed.phases import failure_of
from trimtab_operator.observed.pods import unschedulable
from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import PIN, InferenceDeployment, ModelSource
from trimtab_operator.resource.validation_error import Refusal

SUBJECT_ANNOTATION = "trimtab.dev/facts-of"  # on the Job: the model and the image that it reads
RENDERED_ANNOTATION = "trimtab.dev/facts-job"  # on the Job: what it was rendered from, hashed
SUBJECT_KEY = "model.json"  # in the ConfigMap: likewise
FACTS_KEY = "facts.json"
MAX_KEPT_FACTS = 256  # models that resources serve, whose facts are read at each look
COMMIT_KEY = "commit"  # what the revision of a downloaded model meant when it was first read
FAILURE_KEY = "failure.json"

FIRST_PAUSE_SECONDS = 10.0  # a claim or a node that comes late is there soon
LONGEST_PAUSE_SECONDS = 600.0  # somebody must act; a Job every ten minutes costs nothing
DIGEST_LENGTH = 10  # hex digits
MAX_WEIGHTS_BYTES = 20 << 40  # ten times the largest model that anybody has published
MAX_WORDS = 1024  # characters of the last words that are kept


@dataclass(frozen=True, slots=True)
class Known:
    """The model was read and understood."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class NotUsable:
    """The model was read, and is none that the engine can serve."""

    message: str


@dataclass(frozen=True, slots=True)
class Reading:
    """The model is being read, or is about to be."""

    message: str


@dataclass(frozen=True, slots=True)
class Unreadable:
    """The latest attempt to read the model failed; `message` holds its last words. It is tried again."""

    message: str


FactsState = Known | NotUsable | Reading | Unreadable


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    attempts: int
    retry_at: float
    """Unix time."""
    rendered: str
    """What the Job that failed was rendered from, hashed."""


def subject_of(deployment: InferenceDeployment) -> str:
    """Whose facts these are, as JSON: equal for equal models by equal images."""
    return compact({"image": deployment.image, **_place_of(deployment.spec.model)})


def _place_of(model: ModelSource) -> dict[str, str | None]:
    """Everything that says which model it is. What came later stands there only where it is written, so that facts of
    before stay known."""
    further = {
        "endpoint": None if model.s3 is None else model.s3.endpoint,
        "folder": None if model.oci is None else model.oci.folder,
    }
    written = {name: value for name, value in further.items() if value is not None}
    return {"revision": model.revision, "uri": model.uri, **written}


def with_model_facts(deployment: InferenceDeployment, observed: Observed) -> InferenceDeployment:
    """The resource with what its model was found to be, where it has been read: how large it is, and what a downloaded
    one is pinned to. By whichever image, so that a new one serves the same."""
    found = _config_map(deployment, observed)
    data = {} if found is None else found.get("data") or {}
    of, commit = _json_object(data.get(SUBJECT_KEY)) or {}, data.get(COMMIT_KEY)
    model = deployment.spec.model
    if {name: value for name, value in of.items() if name != "image"} != _place_of(model):
        return deployment
    is_pinned = model.is_downloaded and PIN.fullmatch(commit or "") is not None
    return replace(deployment, commit=commit if is_pinned else None, weights_bytes=_weights_bytes(data))


def _weights_bytes(data: Mapping[str, str]) -> int | None:
    """What stands there and no model has counts as nothing: whoever may write ConfigMaps does not stop the clocks."""
    said = (_json_object(data.get(FACTS_KEY)) or {}).get("weights_bytes")
    is_size = isinstance(said, int) and not isinstance(said, bool) and 0 < said <= MAX_WEIGHTS_BYTES
    return said if is_size else None


def facts_state(deployment: InferenceDeployment, observed: Observed) -> FactsState:
    """What is known of the model that the spec names now."""
    data = _data(deployment, observed)
    known = _understood(data.get(FACTS_KEY))
    if known is not None:
        return known
    job, failure = _job(deployment, observed), _failure(data)
    pod = None if job is None else _pod_of(job, observed)
    stuck = None if pod is None else failure_of(pod)
    if stuck is not None or failure is not None:
        return Unreadable(stuck or (failure.message if failure is not None else ""))
    waits = None if pod is None else unschedulable(pod)
    return Reading(
        "the model's layers and sizes are being read" + (f"; the pod finds no node: {waits}" if waits else "")
    )


def cached_facts(deployment: InferenceDeployment, config_map: Manifest | None) -> ModelFacts | None:
    """What the ConfigMap holds of the model that the spec names now: for the webhook, which waits for nobody."""
    observed = Observed(config_maps=() if config_map is None else (config_map,))
    state = facts_state(deployment, observed)
    return state.facts if isinstance(state, Known) else None


@functools.lru_cache(maxsize=MAX_KEPT_FACTS)
def _understood(text: str | None) -> Known | NotUsable | None:
    """What the engine said of the model; None for what no engine says that this operator understands."""
    said = _json_object(text)
    if said is None:
        return None
    if said.get("supported") is False and isinstance(said.get("architecture"), str):
        why = f" ({said['refusal']:.500})" if isinstance(said.get("refusal"), str) else ""
        return NotUsable(
            f"is a {said['architecture']}, which this engine does not run{why}; use another model or image"
        )
    try:
        return Known(ModelFacts.parse(said))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether engines may be started or changed: not before the model is known and the layout can work."""

    model: FactsState
    refusals: tuple[Refusal, ...] = ()
    is_open: bool = True


def gate_of(
    deployment: InferenceDeployment,
    observed: Observed,
    *,
    revision: str,
    gpu: Gpu | None = None,
    is_proven: bool = False,
) -> Gate:
    """`revision` is what the spec renders to. What runs it already, or has run it (`is_proven`), is believed over what
    is predicted: an operator that learned to read models, or to check layouts, disturbs no deployment that works, and
    one that was scaled to 0 comes back though the nodes that it ran on have gone meanwhile.
    """
    model = facts_state(deployment, observed)
    groups = [group for group in groups_of(observed) if group.revision == revision]
    if is_proven or any(group.is_ready for group in groups):
        return Gate(model)
    if isinstance(model, NotUsable):
        return Gate(model, (Refusal("spec.model.uri", model.message),))
    if isinstance(model, Known):
        return Gate(model, check_layout(deployment.spec, model.facts, gpu))
    return Gate(model, is_open=bool(groups))


# --- what to do -------------------------------------------------------------------------------------------------------


def plan_facts(deployment: InferenceDeployment, observed: Observed, *, now: float) -> tuple[Action, ...]:
    """Read the model when it is not known; keep what a Job said, then delete it. `now` is Unix time.

    What stands in the ConfigMap and cannot be what a Job said is as good as nothing. An edit that changes the Job ends
    the one that runs or waits for its node, and the pause after one that failed.
    """
    data = _data(deployment, observed)
    job = _job(deployment, observed)
    if _understood(data.get(FACTS_KEY)) is not None:
        return () if job is None else (_removal(job, "the model is known"),)
    failure, wanted = _failure(data), _wanted_job(deployment)
    if job is None:
        is_held = _goes_away(deployment, observed) or _pauses(failure, wanted, now)
        return () if is_held else (Apply(wanted, True, "the model is not known yet"),)
    if _annotation(job, SUBJECT_ANNOTATION) != subject_of(deployment):
        return (_removal(job, "the model or the image is another one now"),)
    words = _words_of(job, observed)
    text = words[1] if words is not None and words[0] == 0 else None
    is_known = _understood(text) is not None
    if not is_known and _annotation(job, RENDERED_ANNOTATION) != _annotation(wanted, RENDERED_ANNOTATION):
        return (_removal(job, "it would be made otherwise now"),)
    if words is None:
        return ()
    said = (_json_object(text) or {}) if is_known else {}
    if is_known:
        kept = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: compact(said)}
    else:
        kept = {SUBJECT_KEY: subject_of(deployment), FAILURE_KEY: _failed(failure, job, words, now)}
    commit = deployment.commit or str(said.get("revision", ""))
    if deployment.spec.model.is_downloaded and PIN.fullmatch(commit):
        kept[COMMIT_KEY] = commit
    is_new = _config_map(deployment, observed) is None
    reason = "the model was read" if is_known else "the model could not be read"
    return Apply(facts_config_map(deployment, kept), is_new, reason), _removal(job, reason)


def with_kept(observed: Observed, actions: Iterable[Action]) -> Observed:
    """The children as they will be once what a Job said is kept: engines may start in the turn that learns it."""
    kept = [a.manifest for a in actions if isinstance(a, Apply) and a.manifest["kind"] == "ConfigMap"]
    names = {manifest["metadata"]["name"] for manifest in kept}
    others = (m for m in observed.config_maps if m["metadata"]["name"] not in names)
    return replace(observed, config_maps=(*others, *kept))


def _wanted_job(deployment: InferenceDeployment) -> Manifest:
    rendered = compact(facts_job(deployment, {})["spec"])
    digest = hashlib.sha256(rendered.encode()).hexdigest()[:DIGEST_LENGTH]
    return facts_job(deployment, {SUBJECT_ANNOTATION: subject_of(deployment), RENDERED_ANNOTATION: digest})


def _goes_away(deployment: InferenceDeployment, observed: Observed) -> bool:
    """Whether the previous Job is still there."""
    return any(job["metadata"]["name"] == facts_name(deployment) for job in observed.jobs)


def _pauses(failure: _Failure | None, wanted: Manifest, now: float) -> bool:
    """Whether it is too soon to try the same again. A time that no pause reaches was written by somebody else."""
    if failure is None or failure.rendered != _annotation(wanted, RENDERED_ANNOTATION):
        return False
    return now < failure.retry_at <= now + LONGEST_PAUSE_SECONDS


def _failed(before: _Failure | None, job: Manifest, words: tuple[int | None, str], now: float) -> str:
    exit_code, text = words
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = lines[-1] if lines else "it said nothing"
    if exit_code == 0 and _json_object(text) is not None:
        said = f"an engine whose answer is not understood read it; use another image ({_why_not_understood(text)})"
    attempts = 1 if before is None else before.attempts + 1
    pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(attempts - 1, 10))
    message = said[:MAX_WORDS] + ("" if exit_code is None else f" (exit code {exit_code})")
    rendered = _annotation(job, RENDERED_ANNOTATION)
    return compact({"attempts": attempts, "job": rendered, "message": message, "retryAt": int(now + pause)})


def _why_not_understood(text: str) -> str:
    try:
        ModelFacts.parse(_json_object(text) or {})
    except ValueError as error:
        return str(error)
    return "it does not name the architecture"


def _removal(job: Manifest, reason: str) -> Delete:
    return Delete("Job", job["metadata"]["name"], str(job["metadata"].get("uid", "")), reason)


# --- what is there ----------------------------------------------------------------------------------------------------


def _config_map(deployment: InferenceDeployment, observed: Observed) -> Manifest | None:
    return next((m for m in observed.config_maps if m["metadata"]["name"] == facts_name(deployment)), None)


def _data(deployment: InferenceDeployment, observed: Observed) -> Mapping[str, str]:
    """What the ConfigMap holds of the present model; nothing when it speaks of another one."""
    found = _config_map(deployment, observed)
    data = {} if found is None else found.get("data") or {}
    return data if data.get(SUBJECT_KEY) == subject_of(deployment) else {}


def _failure(data: Mapping[str, str]) -> _Failure | None:
    said = _json_object(data.get(FAILURE_KEY))
    if said is None:
        return None
    attempts, retry_at = said.get("attempts"), said.get("retryAt")
    if not isinstance(attempts, int) or not isinstance(retry_at, int | float):
        return None
    return _Failure(str(said.get("message", "")), max(1, attempts), float(retry_at), str(said.get("job", "")))


def _job(deployment: InferenceDeployment, observed: Observed) -> Manifest | None:
    """The Job, unless it is being deleted."""
    named = (job for job in observed.jobs if job["metadata"]["name"] == facts_name(deployment))
    return next((job for job in named if not is_terminating(job)), None)


def _annotation(job: Manifest, name: str) -> str:
    return str((job["metadata"].get("annotations") or {}).get(name, ""))


def _pod_of(job: Manifest, observed: Observed) -> Manifest | None:
    uid = job["metadata"].get("uid")
    for pod in observed.pods:
        if any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or []):
            return pod
    return None


def _words_of(job: Manifest, observed: Observed) -> tuple[int | None, str] | None:
    """Exit code and last words of a Job that has ended; None while it has not. No exit code: it was ended."""
    pod = _pod_of(job, observed)
    for container in ((pod or {}).get("status") or {}).get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            said = str(ended.get("message") or ended.get("reason") or "")
            return int(ended.get("exitCode", 1)), said
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in ("Failed", "Complete"):
            return None, str(condition.get("message") or "its pod is gone, and so are its last words")
    return None


def _json_object(text: str | None) -> dict[str, Any] | None:
    """A JSON object; None when there is no text, or no object in it."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

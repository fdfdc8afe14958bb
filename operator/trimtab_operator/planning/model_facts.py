"""Reading of a model before any engine runs: a Job reads it once, and a ConfigMap stores the result. Pure.

The result is keyed by uri, revision and image. A failed Job is retried with exponential back-off, and its last message
is kept meanwhile. Deleting the ConfigMap makes the operator read the model again. Its contents are signed, because they
choose the commit of the weights and the start timeout: `with_verified_facts` drops contents of others.
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
from trimtab_operator.observed.groups import ObservedChildren, groups_of, is_terminating
from trimtab_operator.observed.phases import pod_failure_message
from trimtab_operator.observed.pods import unschedulable_message
from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.signed_text import sign, verify
from trimtab_operator.resource.spec import PIN, InferenceDeployment, ModelSource
from trimtab_operator.resource.validation_error import ValidationError

SUBJECT_ANNOTATION = "trimtab.dev/facts-of"  # on the Job: identity of the model and the image
RENDERED_ANNOTATION = "trimtab.dev/facts-job"  # on the Job: hash of its rendered spec
SUBJECT_KEY = "model.json"  # in the ConfigMap: identity of the model and the image
FACTS_KEY = "facts.json"
MAX_KEPT_FACTS = 256  # cached parsed facts, which every iteration reads
COMMIT_KEY = "commit"  # commit that the revision of a downloaded model had when it was first read
FAILURE_KEY = "failure.json"
SIGNATURE_KEY = "signature"  # over all other keys
SIGNED_KIND = "facts"

INITIAL_BACKOFF_SECONDS = 10.0  # a volume or node may only be late
MAX_BACKOFF_SECONDS = 600.0  # a user must act; a Job every ten minutes is cheap
DIGEST_LENGTH = 10  # hex digits
MAX_WEIGHTS_BYTES = 20 << 40  # ten times the largest published model
MAX_FAILURE_LENGTH = 1024  # characters of the failure message


def with_verified_facts(
    deployment: InferenceDeployment, observed: ObservedChildren, *, key: str, former_key: str | None = None
) -> ObservedChildren:
    """Return the children with an empty facts ConfigMap if the operator did not sign its contents."""
    found = _config_map(deployment, observed)
    if found is None or verify_facts(found, key=key, former_key=former_key):
        return observed
    others = (one for one in observed.config_maps if one is not found)
    return replace(observed, config_maps=(*others, {**found, "data": {}}))


def verify_facts(config_map: Manifest, *, key: str, former_key: str | None = None) -> bool:
    """Return True if the operator signed the contents with `key` or `former_key`."""
    data = dict(config_map.get("data") or {})
    signed = data.pop(SIGNATURE_KEY, None)
    return verify(signed, key=key, kind=SIGNED_KIND, former_key=former_key) == _digest(data)


def plan_signature(
    deployment: InferenceDeployment, observed: ObservedChildren, actions: Iterable[Action], *, key: str
) -> tuple[Action, ...]:
    """Return the actions with signed contents; also sign verified contents again after the key was rotated."""
    actions = tuple(actions)
    signed = tuple(_signed(action, key) if _is_facts(action) else action for action in actions)
    found = _config_map(deployment, observed)
    data = {} if found is None else dict(found.get("data") or {})
    if any(map(_is_facts, actions)) or found is None or not data or verify_facts(found, key=key):
        return signed
    data.pop(SIGNATURE_KEY, None)
    return (*signed, _signed(Apply(facts_config_map(deployment, data), False, "the key was rotated"), key))


def _is_facts(action: Action) -> bool:
    return isinstance(action, Apply) and action.manifest["kind"] == "ConfigMap"


def _signed(action: Action, key: str) -> Apply:
    assert isinstance(action, Apply)
    return replace(action, manifest={**action.manifest, "data": sign_facts(action.manifest["data"], key=key)})


def sign_facts(data: Mapping[str, str], *, key: str) -> dict[str, str]:
    """Return the contents with their signature."""
    return {**data, SIGNATURE_KEY: sign(_digest(data), key=key, kind=SIGNED_KIND)}


def _digest(data: Mapping[str, str]) -> str:
    return hashlib.sha256(compact(dict(data)).encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class ModelKnown:
    """The model was read and parsed."""

    facts: ModelFacts


@dataclass(frozen=True, slots=True)
class ModelUnsupported:
    """The model was read, but the engine cannot serve it."""

    message: str


@dataclass(frozen=True, slots=True)
class ModelBeingRead:
    """The model is being read, or will be."""

    message: str


@dataclass(frozen=True, slots=True)
class ModelUnreadable:
    """The latest attempt to read the model failed with `message` and will be retried."""

    message: str


FactsState = ModelKnown | ModelUnsupported | ModelBeingRead | ModelUnreadable


@dataclass(frozen=True, slots=True)
class _Failure:
    message: str
    attempts: int
    retry_at: float
    """Unix time."""
    rendered: str
    """Hash of the failed Job's rendered spec."""


def subject_of(deployment: InferenceDeployment) -> str:
    """Return the identity of the model and the image as JSON."""
    return compact({"image": deployment.image, **_model_identity(deployment.spec.model)})


def _model_identity(model: ModelSource) -> dict[str, str | None]:
    """Return everything that identifies the model.

    Fields that were added later are included only if set, so that stored facts stay valid.
    """
    optional = {
        "endpoint": None if model.s3 is None else model.s3.endpoint,
        "folder": None if model.oci is None else model.oci.folder,
    }
    present = {name: value for name, value in optional.items() if value is not None}
    return {"revision": model.revision, "uri": model.uri, **present}


def with_model_facts(deployment: InferenceDeployment, observed: ObservedChildren) -> InferenceDeployment:
    """Return the resource with its model's size and pinned commit, if the model was read.

    The image does not matter, so that a new image serves the same commit.
    """
    found = _config_map(deployment, observed)
    data = {} if found is None else found.get("data") or {}
    of, commit = _json_object(data.get(SUBJECT_KEY)) or {}, data.get(COMMIT_KEY)
    model = deployment.spec.model
    if {name: value for name, value in of.items() if name != "image"} != _model_identity(model):
        return deployment
    is_pinned = model.is_downloaded and PIN.fullmatch(commit or "") is not None
    return replace(deployment, commit=commit if is_pinned else None, weights_bytes=_weights_bytes(data))


def _weights_bytes(data: Mapping[str, str]) -> int | None:
    """Return the size of the weights; None for an implausible value, which would disable start timeouts."""
    size = (_json_object(data.get(FACTS_KEY)) or {}).get("weights_bytes")
    is_size = isinstance(size, int) and not isinstance(size, bool) and 0 < size <= MAX_WEIGHTS_BYTES
    return size if is_size else None


def facts_state(deployment: InferenceDeployment, observed: ObservedChildren) -> FactsState:
    """Return what is known of the model that the spec names."""
    data = _stored_data(deployment, observed)
    known = _parse_facts(data.get(FACTS_KEY))
    if known is not None:
        return known
    job, failure = _job(deployment, observed), _parse_failure(data)
    pod = None if job is None else _pod_of(job, observed)
    stuck = None if pod is None else pod_failure_message(pod)
    if stuck is not None or failure is not None:
        return ModelUnreadable(stuck or (failure.message if failure is not None else ""))
    return ModelBeingRead(f"the model's layers and sizes are being read{_reading_obstacle(job, pod, observed)}")


def _reading_obstacle(job: Manifest | None, pod: Manifest | None, observed: ObservedChildren) -> str:
    """Return why the Job's pod does not run, as the rest of a sentence; empty if nothing is known."""
    waiting_for = None if pod is None else unschedulable_message(pod)
    if waiting_for is not None:
        return f"; the pod is unschedulable: {waiting_for}"
    for waiting, what in ((pod, "does not start"), (job, "is not created")):
        error = None if waiting is None else observed.start_errors.get(waiting["metadata"]["name"])
        if error is not None:
            return f"; the pod {what}: {error.message}"
    return ""


def cached_facts(deployment: InferenceDeployment, config_map: Manifest | None) -> ModelFacts | None:
    """Return the stored facts of the spec's model, for the webhook, which cannot wait for a Job."""
    observed = ObservedChildren(config_maps=() if config_map is None else (config_map,))
    state = facts_state(deployment, observed)
    return state.facts if isinstance(state, ModelKnown) else None


@functools.lru_cache(maxsize=MAX_KEPT_FACTS)
def _parse_facts(text: str | None) -> ModelKnown | ModelUnsupported | None:
    """Parse the engine's description of the model; None if it is missing or not understood."""
    parsed = _json_object(text)
    if parsed is None:
        return None
    if parsed.get("supported") is False and isinstance(parsed.get("architecture"), str):
        why = f" ({parsed['refusal']:.500})" if isinstance(parsed.get("refusal"), str) else ""
        return ModelUnsupported(
            f"architecture {parsed['architecture']} is not supported by this engine{why}; use another model or image"
        )
    try:
        return ModelKnown(ModelFacts.parse(parsed))
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class StartGate:
    """Whether engines may be started or changed: not before the model is known and the layout is valid."""

    model: FactsState
    validation_errors: tuple[ValidationError, ...] = ()
    is_open: bool = True


def evaluate_start_gate(
    deployment: InferenceDeployment,
    observed: ObservedChildren,
    *,
    revision: str,
    gpu: Gpu | None = None,
    is_known_good: bool = False,
) -> StartGate:
    """Return whether engines of `revision`, the revision of the spec, may start.

    A revision that runs or has run (`is_known_good`) is trusted over predictions: a new operator version with stricter
    checks does not disturb a working deployment, and one that was scaled to 0 can start again although its nodes are
    gone.
    """
    model = facts_state(deployment, observed)
    groups = [group for group in groups_of(observed) if group.revision == revision]
    if is_known_good or any(group.is_ready for group in groups):
        return StartGate(model)
    if isinstance(model, ModelUnsupported):
        return StartGate(model, (ValidationError("spec.model.uri", model.message),))
    if isinstance(model, ModelKnown):
        return StartGate(model, check_layout(deployment.spec, model.facts, gpu))
    return StartGate(model, is_open=bool(groups))


# --- plan -------------------------------------------------------------------------------------------------------------


def plan_facts(deployment: InferenceDeployment, observed: ObservedChildren, *, now: float) -> tuple[Action, ...]:
    """Read the model if it is unknown; store a finished Job's result and delete the Job. `now` is Unix time.

    ConfigMap contents that no Job can have written are ignored. An edit that changes the Job deletes a running or
    pending one and resets the back-off.
    """
    data = _stored_data(deployment, observed)
    job = _job(deployment, observed)
    if _parse_facts(data.get(FACTS_KEY)) is not None:
        return () if job is None else (_delete_job(job, "the model is known"),)
    failure, wanted = _parse_failure(data), _build_job(deployment)
    if job is None:
        is_held = _is_job_terminating(deployment, observed) or _is_backing_off(failure, wanted, now)
        return () if is_held else (Apply(wanted, True, "the model has not been read yet"),)
    if _annotation(job, SUBJECT_ANNOTATION) != subject_of(deployment):
        return (_delete_job(job, "the model or the image changed"),)
    result = _job_result(job, observed)
    text = result[1] if result is not None and result[0] == 0 else None
    is_known = _parse_facts(text) is not None
    if not is_known and _annotation(job, RENDERED_ANNOTATION) != _annotation(wanted, RENDERED_ANNOTATION):
        return (_delete_job(job, "its spec changed"),)
    if result is None:
        return ()
    parsed = (_json_object(text) or {}) if is_known else {}
    if is_known:
        kept = {SUBJECT_KEY: subject_of(deployment), FACTS_KEY: compact(parsed)}
    else:
        kept = {SUBJECT_KEY: subject_of(deployment), FAILURE_KEY: _dump_failure(failure, job, result, now)}
    commit = deployment.commit or str(parsed.get("revision", ""))
    if deployment.spec.model.is_downloaded and PIN.fullmatch(commit):
        kept[COMMIT_KEY] = commit
    is_new = _config_map(deployment, observed) is None
    reason = "the model was read" if is_known else "the model could not be read"
    return Apply(facts_config_map(deployment, kept), is_new, reason), _delete_job(job, reason)


def with_stored_facts(observed: ObservedChildren, actions: Iterable[Action]) -> ObservedChildren:
    """Return the children as they will be once the Job's result is stored, so that engines can start in the same
    iteration.
    """
    kept = [a.manifest for a in actions if isinstance(a, Apply) and a.manifest["kind"] == "ConfigMap"]
    names = {manifest["metadata"]["name"] for manifest in kept}
    others = (m for m in observed.config_maps if m["metadata"]["name"] not in names)
    return replace(observed, config_maps=(*others, *kept))


def _build_job(deployment: InferenceDeployment) -> Manifest:
    rendered = compact(facts_job(deployment, {})["spec"])
    digest = hashlib.sha256(rendered.encode()).hexdigest()[:DIGEST_LENGTH]
    return facts_job(deployment, {SUBJECT_ANNOTATION: subject_of(deployment), RENDERED_ANNOTATION: digest})


def _is_job_terminating(deployment: InferenceDeployment, observed: ObservedChildren) -> bool:
    """Return True if the previous Job still exists."""
    return any(job["metadata"]["name"] == facts_name(deployment) for job in observed.jobs)


def _is_backing_off(failure: _Failure | None, wanted: Manifest, now: float) -> bool:
    """Return True during the back-off. A time beyond the longest back-off was not written by the operator."""
    if failure is None or failure.rendered != _annotation(wanted, RENDERED_ANNOTATION):
        return False
    return now < failure.retry_at <= now + MAX_BACKOFF_SECONDS


def _dump_failure(before: _Failure | None, job: Manifest, result: tuple[int | None, str], now: float) -> str:
    exit_code, text = result
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    reason = lines[-1] if lines else "no output"
    if exit_code == 0 and _json_object(text) is not None:
        reason = f"the engine's output is not understood; use another image ({_parse_error(text)})"
    attempts = 1 if before is None else before.attempts + 1
    pause = min(MAX_BACKOFF_SECONDS, INITIAL_BACKOFF_SECONDS * 2 ** min(attempts - 1, 10))
    message = reason[:MAX_FAILURE_LENGTH] + ("" if exit_code is None else f" (exit code {exit_code})")
    rendered = _annotation(job, RENDERED_ANNOTATION)
    return compact({"attempts": attempts, "job": rendered, "message": message, "retryAt": int(now + pause)})


def _parse_error(text: str) -> str:
    try:
        ModelFacts.parse(_json_object(text) or {})
    except ValueError as error:
        return str(error)
    return "it has no architecture"


def _delete_job(job: Manifest, reason: str) -> Delete:
    return Delete("Job", job["metadata"]["name"], str(job["metadata"].get("uid", "")), reason)


# --- observed objects -------------------------------------------------------------------------------------------------


def _config_map(deployment: InferenceDeployment, observed: ObservedChildren) -> Manifest | None:
    return next((m for m in observed.config_maps if m["metadata"]["name"] == facts_name(deployment)), None)


def _stored_data(deployment: InferenceDeployment, observed: ObservedChildren) -> Mapping[str, str]:
    """Return the ConfigMap's data if it belongs to the spec's model; otherwise an empty mapping."""
    found = _config_map(deployment, observed)
    data = {} if found is None else found.get("data") or {}
    return data if data.get(SUBJECT_KEY) == subject_of(deployment) else {}


def _parse_failure(data: Mapping[str, str]) -> _Failure | None:
    parsed = _json_object(data.get(FAILURE_KEY))
    if parsed is None:
        return None
    attempts, retry_at = parsed.get("attempts"), parsed.get("retryAt")
    if not isinstance(attempts, int) or not isinstance(retry_at, int | float):
        return None
    return _Failure(str(parsed.get("message", "")), max(1, attempts), float(retry_at), str(parsed.get("job", "")))


def _job(deployment: InferenceDeployment, observed: ObservedChildren) -> Manifest | None:
    """Return the Job unless it is being deleted."""
    named = (job for job in observed.jobs if job["metadata"]["name"] == facts_name(deployment))
    return next((job for job in named if not is_terminating(job)), None)


def _annotation(job: Manifest, name: str) -> str:
    return str((job["metadata"].get("annotations") or {}).get(name, ""))


def _pod_of(job: Manifest, observed: ObservedChildren) -> Manifest | None:
    """Return the first pod of the Job. A later one may claim to be of it, after its creator has read the Job's uid."""
    uid = job["metadata"].get("uid")
    owned = [
        pod
        for pod in observed.pods
        if any(owner.get("uid") == uid for owner in pod["metadata"].get("ownerReferences") or [])
    ]
    return min(owned, key=lambda pod: str(pod["metadata"].get("creationTimestamp") or ""), default=None)


def _job_result(job: Manifest, observed: ObservedChildren) -> tuple[int | None, str] | None:
    """Return the exit code and last message of a finished Job; None while it runs.

    The exit code is None if the Job was ended by Kubernetes.
    """
    pod = _pod_of(job, observed)
    for container in ((pod or {}).get("status") or {}).get("containerStatuses") or []:
        ended = (container.get("state") or {}).get("terminated")
        if ended:
            parsed = str(ended.get("message") or ended.get("reason") or "")
            return int(ended.get("exitCode", 1)), parsed
    for condition in (job.get("status") or {}).get("conditions") or []:
        if condition.get("status") == "True" and condition.get("type") in ("Failed", "Complete"):
            return None, str(condition.get("message") or "its pod and termination message are gone")
    return None


def _json_object(text: str | None) -> dict[str, Any] | None:
    """Return the parsed JSON object; None if there is no text or no object in it."""
    try:
        found = json.loads(text or "")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

"""Validation rules of a resource, shared by webhook, reconciler and `trimtab-operator validate`.

The CRD's schema validates single fields. These rules validate combinations, and reject fields that the schema knows but
this version does not support: a field is either implemented or rejected, never accepted and ignored.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.builders.download import ACCOUNTS_VOLUME, CACHE_VOLUME, TOKEN_VOLUME
from trimtab_operator.builders.pod import PRE_STOP_SECONDS, stop_seconds
from trimtab_operator.builders.startup import MAX_START_TIMEOUT_SECONDS
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.resource.allowed_privileges import (
    HOST_PATH,
    LOCK_MEMORY,
    LOCK_MEMORY_SECURITY_CONTEXT,
    POD_FIELDS,
    privilege_remedy,
)
from trimtab_operator.resource.live_parameters import live_parameters
from trimtab_operator.resource.patterns import DNS_LABEL, SERVED_NAME
from trimtab_operator.resource.quantity import parse_quantity, parse_seconds
from trimtab_operator.resource.spec import (
    DEADLINE_WITHOUT_TARGET,
    DOWNLOADED,
    IDLE_TIMEOUT_UNUSED,
    MAX_NAME_LENGTH,
    MODALITIES,
    ZERO_WITHOUT_ROUTER,
    InferenceDeployment,
    ModelSource,
    PodOverlay,
    Scheme,
    Spec,
)
from trimtab_operator.resource.validation_error import ValidationError
from trimtab_operator.tuner.samples.prometheus import ENGINES_LABELS, LABEL_NAME
from trimtab_operator.validation.engine_flags import EngineFlag, engine_flags, flag_errors, spelled
from trimtab_operator.validation.scheduling_flags import scheduling_flags

MAX_LABEL_VALUE = 256
MAX_DRAIN_SECONDS = 3600.0  # a longer stop would block node drains
MAX_BAKE_SECONDS = 3600.0  # longer than a user would watch a rollout
MAX_HOLD_SECONDS = 3600.0  # clients and load balancers give up long before
NAME_SYNTAX = "begin with a lower-case letter; then lower-case letters, digits and dashes, no dots"

Rule = Callable[[InferenceDeployment], Iterable[ValidationError]]


def validation_errors(
    deployment: InferenceDeployment, facts: ModelFacts | None = None, gpu: Gpu | None = None
) -> tuple[ValidationError, ...]:
    """Return all validation errors of a resource, in the order of the rules; empty if it is valid.

    Layout errors come last; they depend on the model and the GPU if those are known.
    """
    by_table = tuple(error for rule in RULES for error in rule(deployment))
    return (*by_table, *check_layout(deployment.spec, facts, gpu))


# --- the resource as a whole ------------------------------------------------------------------------------------------


def validate_name(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    if len(deployment.name) > MAX_NAME_LENGTH:
        yield ValidationError(
            "metadata.name",
            f"has {len(deployment.name)} characters; use at most {MAX_NAME_LENGTH}: "
            "names of pods and Services are derived from it",
        )
    elif deployment.name and not re.fullmatch(r"(?=[a-z])" + DNS_LABEL.strip("^$"), deployment.name):
        yield ValidationError(
            "metadata.name",
            f"is {deployment.name!r}: Services are named after it; {NAME_SYNTAX}",
        )
    if deployment.namespace and not re.fullmatch(DNS_LABEL.strip("^$"), deployment.namespace):
        yield ValidationError(
            "metadata.namespace",
            f"is {deployment.namespace!r}; use the name of a namespace: up to 63 lower-case letters, digits and dashes",
        )


def validate_scaling(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    """Check the replica bounds; only a router holds requests while there is no replica."""
    scaling = deployment.spec.scaling
    if scaling is None:
        return
    if scaling.min_replicas > scaling.max_replicas:
        yield ValidationError(
            "spec.scaling.minReplicas",
            f"is {scaling.min_replicas}, above maxReplicas {scaling.max_replicas}; lower it or raise maxReplicas",
        )
    if scaling.min_replicas == 0 and deployment.spec.active_router is None:
        yield ValidationError("spec.scaling.minReplicas", ZERO_WITHOUT_ROUTER)
    if scaling.min_replicas > 0 and scaling.idle_timeout is not None:
        yield ValidationError("spec.scaling.idleTimeout", IDLE_TIMEOUT_UNUSED)


def validate_router(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    """Check the router's bounds, names and resources; nothing of a disabled router is used."""
    router = deployment.spec.router
    if router is None:
        return
    if parse_seconds(router.max_hold) > MAX_HOLD_SECONDS:
        yield ValidationError("spec.router.maxHold", f"is {router.max_hold}; set at most 1h")
    scaling = deployment.spec.scaling
    if scaling is not None and scaling.min_replicas == 0 and parse_seconds(router.max_hold) == 0:
        yield ValidationError(
            "spec.router.maxHold",
            f"is {router.max_hold}, but with scaling.minReplicas 0 requests wait for a replica; set a time above zero",
        )
    names = [priority.name for priority in router.priorities]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield ValidationError("spec.router.priorities", f"{name} is listed more than once; remove all but one")
    keys = [digest for priority in router.priorities for digest in priority.api_key_sha256s]
    for digest in sorted({digest for digest in keys if keys.count(digest) > 1}):
        yield ValidationError("spec.router.priorities", f"API key {digest[:8]}… has two priorities; remove one")
    headers = {
        "priorityHeader": router.priority_header,
        "sessionHeader": router.session_header,
        "tenantHeader": router.tenant_header,
    }
    used: dict[str, str] = {}
    for field, header in headers.items():
        first = None if header is None else used.setdefault(header.lower(), field)
        if first not in (None, field):
            yield ValidationError(f"spec.router.{field}", f"is {header}, the same as {first}; choose another header")
    if router.image is not None and re.search(r"\s", router.image):
        yield ValidationError("spec.router.image", f"{router.image!r} contains white space; use name:tag")
    for kind, amounts in (router.resources or {}).items():
        yield from _router_resource_errors(kind, amounts, router.resources or {})


def _router_resource_errors(kind: str, amounts: Any, resources: Mapping[str, Any]) -> Iterator[ValidationError]:
    where = f"spec.router.resources.{kind}"
    if kind not in ("requests", "limits") or not isinstance(amounts, Mapping):
        yield ValidationError(where, "is not a set of quantities; use requests and limits")
        return
    found = [error for name, amount in amounts.items() for error in _quantity_errors(f"{where}.{name}", amount)]
    yield from found
    limits = resources.get("limits")
    if kind == "requests" and not found and isinstance(limits, Mapping):
        yield from _above_limit(where, amounts, limits)


def validate_objectives(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    """Check that objectives have a target and one common percentile."""
    objectives = deployment.spec.objectives
    if objectives is None:
        return
    if objectives.ttft is None and objectives.itl is None:
        yield ValidationError("spec.objectives", "is empty; set at least one of ttft and itl, or remove it")
    for name, objective in (("ttft", objectives.ttft), ("itl", objectives.itl)):
        if objective is not None and parse_seconds(objective.target) == 0:
            yield ValidationError(f"spec.objectives.{name}.target", f"is {objective.target}; set a time above zero")
    ttft, itl = objectives.ttft, objectives.itl
    if ttft is not None and itl is not None and ttft.percentile != itl.percentile:
        yield ValidationError(
            "spec.objectives.itl.percentile",
            f"is {itl.percentile}, but that of ttft is {ttft.percentile}; set the same percentile for both",
        )


# --- the model --------------------------------------------------------------------------------------------------------


def validate_model_path(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    scheme, _, rest = deployment.spec.model.uri.partition("://")
    if scheme == "file" and not (rest.startswith("/") and rest.strip("/")):
        yield ValidationError("spec.model.uri", f"{deployment.spec.model.uri} has no absolute path; use file:///path")
    if scheme == "pvc" and not re.match(DNS_LABEL, rest.split("/", 1)[0]):
        claim = rest.split("/", 1)[0]
        problem = (
            f"{claim!r} is not a valid PersistentVolumeClaim name"
            if claim
            else f"{deployment.spec.model.uri} has no claim"
        )
        yield ValidationError("spec.model.uri", f"{problem}; use pvc://CLAIM/path, such as pvc://models/smollm2")
    if scheme in ("file", "pvc") and (".." in rest.split("/") or re.search(r"[\s\x00?#$]", rest)):
        yield ValidationError(
            "spec.model.uri", "the path must not contain '..', white space, ?, # or $; use a plain path"
        )
    elif rest.strip("/") and not re.fullmatch(SERVED_NAME, deployment.spec.model.name_for_clients):
        yield ValidationError(
            "spec.model.servedName",
            f"is missing, and the last part of the uri ({deployment.spec.model.name_for_clients!r}) is not a valid "
            "model name; set it to letters, digits and -_./:",
        )


HUB_REPO = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
HUB_REVISION = r"refs/pr/\d+|\w[\w.-]*"  # as the engine reads it
BUCKET_PATH = r"[A-Za-z0-9][\w.-]{1,62}(/[^/\s\x00$]+)*"
REGISTRY_PATH = (
    r"(localhost|[\w-]+(\.[\w-]+)+|[\w.-]+(?=:\d)|\[[0-9a-f:]+\])(:\d{1,5})?(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)+"
)
IMAGE_REVISION = r"\w[\w.-]{0,127}|sha256:[0-9a-f]{64}"
FIELDS_BY_SCHEME = {
    "revision": ("revision", (Scheme.HUB,), "an hf:// model; s3:// and oci:// models have it in the uri"),
    "token_secret_ref": (
        "tokenSecretRef",
        (Scheme.HUB,),
        "an hf:// model; others use s3.credentialsSecret or oci.pullSecret",
    ),
    "s3": ("s3", (Scheme.S3,), "an s3:// model"),
    "oci": ("oci", (Scheme.OCI,), "an oci:// model"),
    "cache": ("cache", DOWNLOADED, "downloaded models (hf://, s3://, oci://)"),
}
"""By field of the model: its name in the spec, the schemes it applies to, and their description."""


def validate_downloaded_model(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    model = deployment.spec.model
    place, revision = model.parts
    if model.scheme in DOWNLOADED and (place.endswith(".gguf") or (revision or "").endswith(".gguf")):
        yield ValidationError(
            "spec.model.uri",
            f"{model.uri} is one GGUF file; of these only folders are downloaded in a cluster: GGUF files that are "
            "downloaded are not supported yet, so put it on a PersistentVolumeClaim and use pvc://CLAIM/path",
        )
    elif model.scheme is Scheme.HUB:
        yield from _validate_hub_model(model)
    elif model.scheme is Scheme.S3 and re.fullmatch(BUCKET_PATH, place) is None:
        yield ValidationError("spec.model.uri", f"{model.uri} has no bucket and prefix; use s3://BUCKET/PREFIX")
    elif model.scheme is Scheme.OCI:
        yield from _validate_registry_model(model)
    size = None if model.cache is None else model.cache.size
    if model.is_downloaded and size is not None and parse_quantity(size) <= 0:
        yield ValidationError("spec.model.cache.size", "is 0, too small for any model; raise it")


def _validate_hub_model(model: ModelSource) -> Iterator[ValidationError]:
    repo, revision = model.parts
    if re.fullmatch(HUB_REPO, repo) is None:
        yield ValidationError(
            "spec.model.uri", f"{model.uri} is not a model repository; use hf://ORG/NAME or hf://ORG/NAME@REVISION"
        )
    elif model.uri.endswith("@"):
        yield ValidationError(
            "spec.model.uri", f"{model.uri} has no revision after the @; use {model.uri}main, or remove the @"
        )
    if revision is not None and (re.fullmatch(HUB_REVISION, revision) is None or ".." in revision):
        yield ValidationError(
            "spec.model.revision",
            f"{revision!r} is not a supported branch, tag or commit; use one such as main or refs/pr/1, and for a "
            "branch with a / in its name use the commit",
        )
    if model.revision is not None and revision != model.revision:
        yield ValidationError(
            "spec.model.revision", f"is {model.revision}, but the uri has {revision}; set only one of them"
        )


def _validate_registry_model(model: ModelSource) -> Iterator[ValidationError]:
    place, revision = model.parts
    syntax = "oci://REGISTRY/REPOSITORY:TAG or …@sha256:DIGEST"
    if re.fullmatch(REGISTRY_PATH, place) is None:
        yield ValidationError(
            "spec.model.uri",
            f"{model.uri} is not a repository; use {syntax}, the registry with its domain or port "
            "(docker.io/… for Docker's) and the repository in lower case",
        )
    elif model.is_in_image_volume and not (revision or "").startswith("sha256:"):
        yield ValidationError(
            "spec.model.uri",
            f"{model.uri} is not pinned, and with oci.imageVolume nodes may pull different images; use …@sha256:DIGEST",
        )
    elif model.uri.endswith((":", "@")) or (revision is not None and re.fullmatch(IMAGE_REVISION, revision) is None):
        yield ValidationError("spec.model.uri", f"{model.uri} has no tag or digest; use {syntax}")


def validate_image_volume(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    model = deployment.spec.model
    if model.oci is None or not model.is_in_image_volume:
        if model.oci is not None and model.oci.folder is not None:
            yield ValidationError("spec.model.oci.folder", "is only supported with imageVolume; remove it")
        return
    if ".." in (model.oci.folder or "").split("/"):
        yield ValidationError("spec.model.oci.folder", "must not contain '..'; use a plain path")
    if model.oci.pull_secret is not None:
        yield ValidationError(
            "spec.model.oci.pullSecret",
            "is not supported with imageVolume, as the node pulls the image; use template.spec.imagePullSecrets",
        )
    if model.oci.plain_http:
        yield ValidationError(
            "spec.model.oci.plainHttp", "is not supported with imageVolume; configure the nodes' container runtime"
        )
    if model.cache is not None:
        yield ValidationError(
            "spec.model.cache", "is not supported with imageVolume, as the node caches the image; remove it"
        )


def validate_model_options(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    model = deployment.spec.model
    for field, (name, schemes, description) in FIELDS_BY_SCHEME.items():
        if getattr(model, field) is not None and model.scheme not in schemes:
            yield ValidationError(f"spec.model.{name}", f"is only supported for {description}; remove it")


# --- the runtime ------------------------------------------------------------------------------------------------------


def validate_runtime_kind(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    if deployment.spec.runtime.kind != "trimtab":
        yield ValidationError("spec.runtime.kind", f"{deployment.spec.runtime.kind} is not supported yet; use trimtab")


def validate_image(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    if deployment.image is None:
        yield ValidationError(
            "spec.runtime.image",
            "is missing and the operator has no default; set it, or the operator's --default-image",
        )
    elif re.search(r"\s", deployment.image):
        yield ValidationError("spec.runtime.image", f"{deployment.image!r} contains white space; use name:tag")


# Flags that are set through fields. All other flags except OPERATOR_FLAGS are passed to the engine unchanged.
OWNED_FLAGS: Mapping[str, str] = {
    "--model": "spec.model.uri",
    "--served-model-name": "spec.model.servedName",
    "--revision": "spec.model.revision",
    "--download-dir": "spec.model.cache",
    "--download-dir-size": "spec.model.cache.size",
    "--s3-addressing-style": "spec.model.s3.addressing",
    "--registry-auth-file": "spec.model.oci.pullSecret",
    "--registry-plain-http": "spec.model.oci.plainHttp",
    "--device": "spec.runtime.device",
    "--gpu-memory-utilization": "spec.engine.gpuMemoryUtilization",
    "--gpu-memory-utilization-cap": "spec.tuning.bounds.gpuMemoryUtilization.max",
    "--max-num-seqs": "spec.engine.maxNumSeqs",
    "--max-num-seqs-cap": "spec.tuning.bounds.maxNumSeqs.max",
    "--max-num-batched-tokens": "spec.engine.maxNumBatchedTokens",
    "--max-num-batched-tokens-cap": "spec.tuning.bounds.maxNumBatchedTokens.max",
    "--max-model-len": "spec.engine.maxModelLen",
    "--block-size": "spec.engine.blockSize",
    "--kv-cache-dtype": "spec.engine.kvCacheDtype",
    "--quantization": "spec.engine.quantization",
    "--preemption-mode": "spec.engine.preemptionMode",
    "--swap-space": "spec.engine.swapSpace",
    "--swap-space-cap": "spec.engine.swapSpace",
    "--kv-offload-size": "spec.engine.kvOffloadSize",
    "--kv-offload-size-cap": "spec.engine.kvOffloadSize",
    "--enable-prefix-caching": "spec.engine.enablePrefixCaching",
    "--no-enable-prefix-caching": "spec.engine.enablePrefixCaching",
    "--speculative-config": "spec.engine.speculative",
    "--spec-method": "spec.engine.speculative.method",
    "--spec-model": "spec.engine.speculative.model",
    "--spec-tokens": "spec.engine.speculative.numSpeculativeTokens",
    "--api-server-count": "spec.engine.apiServerCount",
    "--mm-processor-cache-gb": "spec.engine.mmProcessorCache",
    "--limit-mm-per-prompt": "spec.engine.limitMmPerPrompt",
    "--enforce-eager": "spec.engine.enforceEager",
    "--no-enforce-eager": "spec.engine.enforceEager",
    "--cudagraph-capture-sizes": "spec.engine.cudagraphCaptureSizes",
    "--tensor-parallel-size": "spec.parallelism.tensor",
    "--pipeline-parallel-size": "spec.parallelism.pipeline",
    "--data-parallel-size": "spec.parallelism.data",
    "--enable-expert-parallel": "spec.parallelism.expert",
    "--no-enable-expert-parallel": "spec.parallelism.expert",
    "--shutdown-timeout": "spec.rollout.drainTimeout",
}
OPERATOR_FLAGS = (
    "--host",
    "--port",
    "--admin-port",
    "--admin-token-sha256",
    "--state-token-sha256",
    # Addresses and ranks within a replica: derived from the layout, different for each pod.
    "--nnodes",
    "--node-rank",
    "--master-addr",
    "--master-port",
    "--rendezvous-id",
    "--rendezvous-secret-file",
    "--headless",
    "--data-parallel-address",
    "--data-parallel-external-lb",
    "--data-parallel-hybrid-lb",
    "--data-parallel-rank",
    "--data-parallel-rpc-port",
    "--data-parallel-size-local",
    "--data-parallel-start-rank",
)


def validate_args(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    args, flags = deployment.spec.runtime.args, engine_flags()
    found: set[int] = set()
    for index, argument in enumerate(args):
        if message := _argument_error(index, argument, flags):
            found.add(index)
            yield ValidationError(f"spec.runtime.args[{index}]", message)
    if deployment.spec.runtime.image is None:  # an own image may have an engine of another version
        for index, message in flag_errors(args):
            if index not in found:
                yield ValidationError(f"spec.runtime.args[{index}]", message)
    if deployment.spec.engine.scheduling_policy is not None:
        for index, flag in scheduling_flags(deployment.spec):
            where = f"spec.runtime.args[{index}]"
            yield ValidationError(where, f"{flag} conflicts with spec.engine.schedulingPolicy; set only one")


def validate_device_memory(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    """On the CPU the device is the container's memory: a larger device would be ended by the kernel."""
    spec = deployment.spec
    size = next((a.partition("=")[2] for a in spec.runtime.args if spelled(a) == "--device-memory-bytes"), "")
    limit = next(((c.resources or {}).get("limits") for c in spec.template.spec.containers), None)
    memory = limit.get("memory") if isinstance(limit, Mapping) else None
    if spec.runtime.device != "cpu" or not size or memory is None:
        return
    try:
        is_above = parse_quantity(size) > parse_quantity(memory)
    except ValueError:
        return  # another rule reports the value
    if is_above:
        yield ValidationError(
            "spec.runtime.args",
            f"--device-memory-bytes={size} is above the container's memory limit {memory}; lower it or raise the limit",
        )


def _argument_error(index: int, argument: str, flags: Mapping[str, EngineFlag]) -> str | None:
    """Return why the operator does not pass an argument on, or None. It must not hide a flag that a field sets."""
    name = spelled(argument)
    if argument.startswith("$(") or (index == 0 and not argument.startswith("-")):
        return f"{argument!r} is not a flag; use --flag=value (with a variable: --flag=$(NAME))"
    if not name.lstrip().startswith("-"):
        return None
    if re.search(r"\s", name):
        return f"{argument!r} contains white space; use --flag=value, or flag and value as two items"
    if "$(" in name:
        return f"{argument!r} has a variable in the flag's name; only values may be variables: --flag=$(NAME)"
    aliases = flags[name].names if name in flags else (name,)
    field = next((OWNED_FLAGS[alias] for alias in aliases if alias in OWNED_FLAGS), None)
    if field is not None:
        return f"{name} conflicts with {field}; set that field instead"
    if any(alias in OPERATOR_FLAGS for alias in aliases):
        return f"{name} is set by the operator; remove it"
    if name == "--config":
        return "--config reads flags from a file that cannot be validated; use the flags themselves"
    is_short = re.fullmatch(r"-[A-Za-z].*", argument) is not None
    if is_short and name not in flags:  # the engine's parser would read -tp2 as -tp 2
        return f"{argument!r} is not a short flag of the engine; use the long form, such as --seed=1"
    return None


# --- the layout -------------------------------------------------------------------------------------------------------


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field of spec.engine that this version does not fully support."""

    attribute: str
    field: str
    is_supported: Callable[[Any], bool]
    message: str


UNSUPPORTED_ENGINE_FIELDS = (
    UnsupportedField(
        "quantization",
        "quantization",
        lambda v: v == "fp8",
        "only fp8 is built; remove it if the checkpoint is quantized, because its format is read from it, or set fp8",
    ),
)


def validate_engine_fields(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    for entry in UNSUPPORTED_ENGINE_FIELDS:
        value = getattr(deployment.spec.engine, entry.attribute)
        if value is not None and not entry.is_supported(value):
            yield ValidationError(f"spec.engine.{entry.field}", entry.message)


def validate_deadline_policy(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    objectives = deployment.spec.objectives
    if deployment.spec.engine.scheduling_policy == "deadline" and (objectives is None or objectives.ttft is None):
        yield ValidationError("spec.engine.schedulingPolicy", DEADLINE_WITHOUT_TARGET)


def validate_swap_space(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    """Check the swap space: without it every swap would silently fall back to recomputation."""
    engine = deployment.spec.engine
    swaps = engine.preemption_mode in ("swap", "auto")
    if swaps and (engine.swap_space is None or parse_quantity(engine.swap_space) == 0):
        yield ValidationError(
            "spec.engine.swapSpace",
            f"is {engine.swap_space or 'missing'}, but preemptionMode {engine.preemption_mode} moves KV blocks there; "
            "set it, for example to 1Gi (on a CPU it is part of the container's memory), or use preemptionMode "
            "recompute",
        )


def validate_speculative_decoding(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    speculative = deployment.spec.engine.speculative
    if speculative is None:
        return
    where, method = "spec.engine.speculative", speculative.method
    if method in ("ngram", "mtp") and speculative.model is not None:
        source = "the request's own text" if method == "ngram" else "the model's own layer"
        yield ValidationError(f"{where}.model", f"is set, but {method} drafts from {source}; remove it")
    elif method in ("draft_model", "eagle") and not (speculative.model or "").startswith("file:///"):
        given = "is missing" if speculative.model is None else f"is {speculative.model}"
        what = "a draft model" if method == "draft_model" else "a head"
        yield ValidationError(f"{where}.model", f"{given}; {what} is read from the image; use file:///path")
    if method in ("eagle", "mtp"):
        yield from _validate_hidden_states(deployment, f"{where}.method", method)


def _validate_hidden_states(deployment: InferenceDeployment, field: str, method: str) -> Iterator[ValidationError]:
    """Check methods that read hidden states: they need the whole model in one rank, on a CPU."""
    instead = "use ngram or draft_model"
    parallelism = deployment.spec.parallelism
    if deployment.spec.runtime.device != "cpu":
        yield ValidationError(field, f"{method} is not supported yet for spec.runtime.device cuda; {instead}")
    elif parallelism.tensor * parallelism.pipeline > 1:
        ranks = f"spec.parallelism.tensor × pipeline = {parallelism.tensor * parallelism.pipeline}"
        yield ValidationError(field, f"{method} is not supported yet for {ranks}; {instead}, or one rank")


def validate_modalities(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    limits = deployment.spec.engine.limit_mm_per_prompt or {}
    for name in sorted(limits.keys() - set(MODALITIES)):
        yield ValidationError(
            "spec.engine.limitMmPerPrompt", f"has the unsupported key {name}; use {' and '.join(MODALITIES)}"
        )


def validate_gpu_memory_utilization(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    given = deployment.spec.engine.gpu_memory_utilization
    if given is not None and parse_quantity(given) == 0:
        yield ValidationError("spec.engine.gpuMemoryUtilization", 'is 0; set a share such as "0.90"')


def validate_token_budget(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    _, seqs, tokens = live_parameters(deployment.spec)
    if seqs.start is not None and tokens.start is not None and seqs.start > tokens.start:
        field = "maxNumBatchedTokens" if tokens.is_start_given else "maxNumSeqs"
        yield ValidationError(
            f"spec.engine.{field}",
            f"maxNumBatchedTokens ({tokens.start}) must be at least maxNumSeqs ({seqs.start}), as every running "
            "request needs one token per step; raise maxNumBatchedTokens or lower maxNumSeqs",
        )


# --- tuning -----------------------------------------------------------------------------------------------------------


def validate_tuning_bounds(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    """Check min ≤ start ≤ max for every live parameter; a start value that only the engine knows must be set
    explicitly.
    """
    names = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
    fields = ("gpuMemoryUtilization", "maxNumSeqs", "maxNumBatchedTokens")
    for name, field, knob in zip(names, fields, live_parameters(deployment.spec), strict=True):
        bounds = getattr(deployment.spec.tuning.bounds, name)
        if bounds is None:
            continue
        low = None if bounds.min is None else parse_quantity(bounds.min)
        high = None if bounds.max is None else parse_quantity(bounds.max)
        where = f"spec.tuning.bounds.{field}"
        if high == 0:
            yield ValidationError(f"{where}.max", 'is 0; set a share such as "0.95"')
        elif low is not None and high is not None and low > high:
            yield ValidationError(where, f"min {bounds.min} exceeds max {bounds.max}; lower min or raise max")
        elif knob.start is None:
            yield ValidationError(
                f"spec.engine.{field}",
                f"is missing, and its default depends on the GPU; set it to use {where}",
            )
        elif (low is not None and knob.start < low) or (high is not None and knob.start > high):
            yield ValidationError(
                f"spec.engine.{field}",
                f"starts at {knob.start}{'' if knob.is_start_given else ' (the default)'}, outside "
                f"{where} [{bounds.min if low is not None else '-'}, {bounds.max if high is not None else '-'}]; "
                "move the start or the bounds",
            )


def validate_restart_class(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    if deployment.spec.tuning.restart_class != "Never":
        yield ValidationError("spec.tuning.restartClass", "canaried restarts are not supported yet; set Never")


# --- metrics and rollout ----------------------------------------------------------------------------------------------


def validate_metrics_labels(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    metrics = deployment.spec.metrics
    for name, value in metrics.labels.items():
        if LABEL_NAME.fullmatch(name) is None or name.startswith("__"):
            yield ValidationError(
                "spec.metrics.labels", f"{name!r} is not a valid Prometheus label name; use letters, digits and _"
            )
        elif name in ENGINES_LABELS:
            yield ValidationError(
                "spec.metrics.labels", f"{name} is a label of the engines' metrics; use labels added by scraping"
            )
        if len(value) > MAX_LABEL_VALUE:
            yield ValidationError(
                "spec.metrics.labels", f"the value of {name} is longer than {MAX_LABEL_VALUE} characters; shorten it"
            )
    if metrics.labels and metrics.source == "Pods":
        yield ValidationError(
            "spec.metrics.labels", "is only supported with Prometheus; remove it, or set source to Auto"
        )


def validate_max_unavailable(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    value = deployment.spec.rollout.max_unavailable
    if isinstance(value, int) and not 1 <= value <= 1000:
        yield ValidationError("spec.rollout.maxUnavailable", f"is {value}; set 1 to 1000")
    if isinstance(value, str) and not re.match(r"^(100|[1-9][0-9]?)%$", value):
        yield ValidationError(
            "spec.rollout.maxUnavailable", f"is {value!r}; set a number, or a percentage from 1% to 100%"
        )


def validate_max_surge(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    value = deployment.spec.rollout.max_surge
    if isinstance(value, int) and not 0 <= value <= 1000:
        yield ValidationError("spec.rollout.maxSurge", f"is {value}; set 0 (replicas are updated in place) to 1000")
    if isinstance(value, str) and not re.match(r"^(100|[1-9]?[0-9])%$", value):
        yield ValidationError("spec.rollout.maxSurge", f"is {value!r}; set a number, or a percentage from 0% to 100%")


def validate_drain_timeout(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    try:
        seconds = parse_seconds(deployment.spec.rollout.drain_timeout)
    except ValueError as error:
        yield ValidationError("spec.rollout.drainTimeout", str(error))
        return
    if not 0 < seconds <= MAX_DRAIN_SECONDS:
        yield ValidationError(
            "spec.rollout.drainTimeout", f"is {seconds:g} s; set more than 0 s and at most {MAX_DRAIN_SECONDS:g} s"
        )
    grace = deployment.spec.template.spec.termination_grace_period_seconds
    if grace is not None and grace <= stop_seconds(seconds):
        yield ValidationError(
            "spec.template.spec.terminationGracePeriodSeconds",
            f"is {grace} s, but a stop may take {stop_seconds(seconds):g} s ({PRE_STOP_SECONDS} s until traffic "
            f"stops, and {seconds:g} s to drain, spec.rollout.drainTimeout); raise it above that, or "
            "requests are aborted",
        )


def validate_start_timeout(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    where, written = "spec.rollout.startTimeout", deployment.spec.rollout.start_timeout
    if written is None:
        return
    try:
        seconds = parse_seconds(written)
    except ValueError as error:
        yield ValidationError(where, str(error))
        return
    if not 0 < seconds <= MAX_START_TIMEOUT_SECONDS:
        yield ValidationError(where, f"is {seconds:g} s; set more than 0 s and at most {MAX_START_TIMEOUT_SECONDS:g} s")


def validate_bake_time(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    where = "spec.rollout.bakeTime"
    try:
        seconds = parse_seconds(deployment.spec.rollout.bake_time)
    except ValueError as error:
        yield ValidationError(where, str(error))
        return
    if seconds > MAX_BAKE_SECONDS:
        yield ValidationError(where, f"is {seconds:g} s; set at most {MAX_BAKE_SECONDS:g} s")


# --- the pod template overlay -----------------------------------------------------------------------------------------

REFUSED_POD_FIELDS: Mapping[str, str] = {
    "hostPID": "would give the pod access to the node's processes; remove it",
    "serviceAccount": "is deprecated; use serviceAccountName",
    "automountServiceAccountToken": "engine pods get no API server token; remove it",
    "initContainers": "init containers are not supported; remove them",
    "restartPolicy": "must be Always in a StatefulSet; remove it",
    "shareProcessNamespace": "is not supported; remove it",
}
ACCOUNT_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
VOLUME_SOURCES = (  # types of the Pod Security Standard "restricted"
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
RESERVED_VOLUMES = ("rendezvous", "model", "shm", "tmp", CACHE_VOLUME, TOKEN_VOLUME, ACCOUNTS_VOLUME)
RESERVED_MOUNTS = ("/dev/shm", "/etc/trimtab", "/tmp", "/models")  # noqa: S108 - paths in the pod, not here
SECURITY_FIELDS = ("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "supplementalGroups")
RESERVED_LABEL_PREFIXES = ("trimtab.dev/", "app.kubernetes.io/")
CONFINEMENT_ANNOTATIONS = (  # older Kubernetes versions use these instead of securityContext
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
LABEL_KEY = r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def validate_overlay_pod_fields(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    for name, value in (deployment.spec.template.spec.model_extra or {}).items():
        where = f"spec.template.spec.{name}"
        if name in POD_FIELDS:
            yield from _privilege_errors(where, name, value, deployment.allowed_privileges)
            continue
        reason = REFUSED_POD_FIELDS.get(name, "cannot be overridden; see docs/reference/resource.md")
        yield ValidationError(where, reason)
    for index, container in enumerate(deployment.spec.template.spec.containers):
        where = f"spec.template.spec.containers[{index}]"
        if container.name != "main":
            yield ValidationError(f"{where}.name", f"is {container.name!r}; only the container main can be overridden")
        for name, value in (container.model_extra or {}).items():
            if name != "securityContext" or value != LOCK_MEMORY_SECURITY_CONTEXT:
                yield ValidationError(f"{where}.{name}", _container_field_error(name))
            elif LOCK_MEMORY not in deployment.allowed_privileges:
                reason = "would let the engine lock memory, as RDMA needs"
                yield ValidationError(f"{where}.{name}", f"{reason}; {privilege_remedy(LOCK_MEMORY)}")


def _privilege_errors(
    where: str, name: str, value: Any, allowed_privileges: frozenset[str]
) -> Iterator[ValidationError]:
    if name not in allowed_privileges:
        yield ValidationError(where, f"{POD_FIELDS[name]}; {privilege_remedy(name)}")
    elif name == "serviceAccountName" and not (isinstance(value, str) and re.fullmatch(ACCOUNT_NAME, value)):
        yield ValidationError(where, f"is {value!r}, which is not a valid service account name; correct it")
    elif name != "serviceAccountName" and not isinstance(value, bool):
        yield ValidationError(where, f"is {value!r}; set true or false")


def _container_field_error(name: str) -> str:
    known = {
        "image": "use spec.runtime.image",
        "args": "use spec.runtime.args",
        "command": "use spec.runtime.args",
        "securityContext": "the operator sets it: non-root, no capabilities, not privileged; remove it",
    }
    return known.get(name, "cannot be overridden; remove it")


def validate_overlay_security(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    overlay = deployment.spec.template.spec
    for index, volume in enumerate(overlay.volumes):
        where = f"spec.template.spec.volumes[{index}]"
        sources = [key for key in volume if key != "name"]
        if volume.get("name") in RESERVED_VOLUMES:
            yield ValidationError(
                f"{where}.name", f"{volume['name']} is reserved for the operator; choose another name"
            )
        if not re.fullmatch(DNS_LABEL, str(volume.get("name", ""))) or len(sources) != 1:
            yield ValidationError(
                where, "needs a name of lower-case letters, digits and dashes, and exactly one source"
            )
        if volume.get("name") in [other.get("name") for other in overlay.volumes[:index]]:
            yield ValidationError(f"{where}.name", f"{volume.get('name')!r} is used twice; choose another name")
        for source in sources:
            if source == HOST_PATH and HOST_PATH in deployment.allowed_privileges:
                continue
            if source == HOST_PATH:
                yield ValidationError(
                    f"{where}.{source}", f"would give the pod access to the node's files; {privilege_remedy(HOST_PATH)}"
                )
            elif source not in VOLUME_SOURCES:
                yield ValidationError(f"{where}.{source}", f"is not allowed; use one of {', '.join(VOLUME_SOURCES)}")
        yield from _token_errors(f"{where}.projected", volume.get("projected"))
    for name, value in (overlay.security_context or {}).items():
        where = f"spec.template.spec.securityContext.{name}"
        if name not in SECURITY_FIELDS:
            yield ValidationError(where, f"cannot be overridden; use one of {', '.join(SECURITY_FIELDS)}")
        elif name == "runAsUser" and value in (0, "0"):
            yield ValidationError(where, "engine pods never run as root; use another user")
        elif name in ("runAsUser", "runAsGroup", "fsGroup") and not (
            value is None or (type(value) is int and 0 <= value < 2**31)
        ):
            message = f"is {value!r}; set a number from 0 to 2147483647, or null to let the cluster choose"
            yield ValidationError(where, message)


def _token_errors(where: str, projected: object) -> Iterator[ValidationError]:
    """Yield an error for a projected token of the API server: engines do not call it."""
    sources = projected.get("sources") if isinstance(projected, Mapping) else None
    for index, source in enumerate(sources if isinstance(sources, list | tuple) else ()):
        token = source.get("serviceAccountToken") if isinstance(source, Mapping) else None
        if token is not None and not (isinstance(token, Mapping) and token.get("audience")):
            field = f"{where}.sources[{index}].serviceAccountToken"
            yield ValidationError(f"{field}.audience", "is empty, so the token would be for the API server; set it")


def validate_overlay_reserved_names(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    template = deployment.spec.template
    for name in template.metadata.annotations:
        if name.startswith(CONFINEMENT_ANNOTATIONS):
            yield ValidationError(
                f"spec.template.metadata.annotations[{name}]", "would loosen the pod's confinement; remove it"
            )
    for kind, names in (("labels", template.metadata.labels), ("annotations", template.metadata.annotations)):
        for name in names:
            if name.startswith(RESERVED_LABEL_PREFIXES):
                yield ValidationError(
                    f"spec.template.metadata.{kind}[{name}]", "is reserved for the operator; choose another name"
                )
    for container in template.spec.containers:
        for index, mount in enumerate(container.volume_mounts):
            yield from _mount_errors(f"spec.template.spec.containers[0].volumeMounts[{index}]", mount, template.spec)
        for index, variable in enumerate(container.env):
            where = f"spec.template.spec.containers[0].env[{index}]"
            if not variable.get("name") or not isinstance(variable["name"], str):
                yield ValidationError(where, "needs a name")
            elif not isinstance(variable.get("value", ""), str | None):
                yield ValidationError(
                    f"{where}.value", f"is {variable['value']!r}, which is not a string; put it in quotes"
                )


def _mount_errors(where: str, mount: Mapping[str, Any], overlay: PodOverlay) -> Iterator[ValidationError]:
    path, volumes = mount.get("mountPath"), [volume.get("name") for volume in overlay.volumes]
    if not isinstance(path, str) or not path.startswith("/"):
        yield ValidationError(f"{where}.mountPath", f"is {path!r}; use an absolute path")
        return
    path = "/" + posixpath.normpath(path).lstrip("/")  # normpath leaves a double slash in front
    if any(
        f"{path.rstrip('/')}/".startswith(f"{reserved}/") or f"{reserved}/".startswith(f"{path.rstrip('/')}/")
        for reserved in RESERVED_MOUNTS
    ):
        yield ValidationError(
            f"{where}.mountPath", f"{path} overlaps a path that is reserved for the operator; use another one"
        )
    if mount.get("name") not in volumes:
        yield ValidationError(
            f"{where}.name", f"is {mount.get('name')!r}, which is not in spec.template.spec.volumes; add it there"
        )


def validate_overlay_labels(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    template = deployment.spec.template
    places = (("metadata.labels", template.metadata.labels), ("spec.nodeSelector", template.spec.node_selector))
    for place, labels in places:
        for name, value in labels.items():
            if not re.fullmatch(LABEL_KEY, name) or not re.fullmatch(LABEL_VALUE, value):
                yield ValidationError(
                    f"spec.template.{place}[{name}]",
                    f"{name!r}: {value!r} is not a valid label; use at most 63 letters, digits and -_. for "
                    "name and value, with a letter or digit at both ends",
                )


OTHER_GPUS = re.compile(
    r"nvidia\.com/(mig-.+|gpu\.shared)|amd\.com/gpu.*|gpu\.intel\.com/.+|habana\.ai/gaudi|google\.com/tpu|aws\.amazon\.com/neuron.*"
)


def validate_overlay_resources(deployment: InferenceDeployment) -> Iterator[ValidationError]:
    for container in deployment.spec.template.spec.containers:
        for kind, amounts in (container.resources or {}).items():
            where = f"spec.template.spec.containers[0].resources.{kind}"
            if kind not in ("requests", "limits") or not isinstance(amounts, Mapping):
                yield ValidationError(where, "is not a set of quantities; use requests and limits")
                continue
            found = [
                r for name, amount in amounts.items() for r in _resource_errors(deployment.spec, where, name, amount)
            ]
            yield from found
            limits = (container.resources or {}).get("limits")
            if kind == "requests" and not found and isinstance(limits, Mapping):
                yield from _above_limit(where, amounts, limits)


def _above_limit(where: str, requests: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[ValidationError]:
    for name in sorted(requests.keys() & limits.keys()):
        try:
            is_above = parse_quantity(requests[name]) > parse_quantity(limits[name])
        except ValueError:
            continue  # the limit has its own error
        if is_above:
            yield ValidationError(
                f"{where}.{name}", f"is {requests[name]}, above the limit {limits[name]}; lower it or raise the limit"
            )


def _resource_errors(spec: Spec, where: str, name: str, amount: Any) -> Iterator[ValidationError]:
    yield from _quantity_errors(f"{where}.{name}", amount)
    if name == "nvidia.com/gpu":
        fix = "use runtime.device cuda and spec.parallelism" if spec.runtime.device == "cpu" else "use spec.parallelism"
        yield ValidationError(f"{where}.{name}", f"is derived from the layout; remove it and {fix}")
    elif OTHER_GPUS.fullmatch(name):
        message = "is not supported, because engines use whole GPUs of the resource nvidia.com/gpu; remove it"
        if name.startswith("nvidia.com/mig-"):
            message += ", and use nodes whose device plugin has the MIG strategy single"
        yield ValidationError(f"{where}.{name}", message)


def _quantity_errors(where: str, amount: Any) -> Iterator[ValidationError]:
    try:
        if parse_quantity(amount) < 0:
            yield ValidationError(where, f"is {amount}; set a value of at least 0")
    except ValueError as error:
        yield ValidationError(where, str(error))


RULES: tuple[Rule, ...] = (
    validate_name,
    validate_scaling,
    validate_router,
    validate_objectives,
    validate_model_path,
    validate_downloaded_model,
    validate_model_options,
    validate_image_volume,
    validate_runtime_kind,
    validate_image,
    validate_args,
    validate_device_memory,
    validate_engine_fields,
    validate_deadline_policy,
    validate_swap_space,
    validate_modalities,
    validate_speculative_decoding,
    validate_gpu_memory_utilization,
    validate_token_budget,
    validate_tuning_bounds,
    validate_restart_class,
    validate_metrics_labels,
    validate_max_unavailable,
    validate_max_surge,
    validate_bake_time,
    validate_drain_timeout,
    validate_start_timeout,
    validate_overlay_pod_fields,
    validate_overlay_security,
    validate_overlay_reserved_names,
    validate_overlay_labels,
    validate_overlay_resources,
)

"""What a resource may ask for: one table of rules, for webhook, loop and `trimtab-operator validate`.

The CRD's schema says what each field may be alone. The rules here say what fields may be together, and
refuse by name what the schema knows but this version does not do yet: a field is either carried out or refused,
never accepted and ignored.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.builders.download import ACCOUNTS_VOLUME, CACHE_VOLUME, TOKEN_VOLUME
from trimtab_operator.builders.pod import PRE_STOP_SECONDS, stop_seconds
from trimtab_operator.builders.startup import MAX_WRITTEN_SECONDS
from trimtab_operator.layout.check import check_layout
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.resource.allowed_privileges import (
    HOST_PATH,
    LOCK_MEMORY,
    LOCKS_MEMORY,
    POD_FIELDS,
    privilege_remedy,
)
from trimtab_operator.resource.forms import DNS_LABEL
from trimtab_operator.resource.live_parameters import knobs
from trimtab_operator.resource.quantity import parse_quantity, parse_seconds
from trimtab_operator.resource.spec import (
    DEADLINE_WITHOUT_TARGET,
    DOWNLOADED,
    MAX_NAME_LENGTH,
    MODALITIES,
    NO_MEASURE_WITHOUT_REPLICAS,
    SERVED_NAME,
    InferenceDeployment,
    ModelSource,
    PodOverlay,
    Scheme,
    Spec,
)
from trimtab_operator.resource.validation_error import Refusal
from trimtab_operator.tuner.samples.prometheus import ENGINES_LABELS, LABEL_NAME
from trimtab_operator.validation.queue_flags import queue_flags

MAX_LABEL_VALUE = 256
MAX_DRAIN_SECONDS = 3600.0  # a pod that takes longer to stop holds its node for ever
MAX_BAKE_SECONDS = 3600.0  # a change that nobody sees finish is forgotten
NAME_IS_MADE_OF = "begin with a lower-case letter; then lower-case letters, digits and dashes, no dots"

Rule = Callable[[InferenceDeployment], Iterable[Refusal]]


def refusals(
    deployment: InferenceDeployment, facts: ModelFacts | None = None, gpu: Gpu | None = None
) -> tuple[Refusal, ...]:
    """Everything that is wrong with a resource, in the order of the table; empty when it can be carried out.

    The layout comes last: judged by the spec alone, and by the model and the GPU where they are known.
    """
    by_table = tuple(refusal for rule in RULES for refusal in rule(deployment))
    return (*by_table, *check_layout(deployment.spec, facts, gpu))


# --- the resource as a whole ------------------------------------------------------------------------------------------


def name_leaves_room_for_child_names(deployment: InferenceDeployment) -> Iterator[Refusal]:
    if len(deployment.name) > MAX_NAME_LENGTH:
        yield Refusal(
            "metadata.name",
            f"has {len(deployment.name)} characters; use at most {MAX_NAME_LENGTH}: "
            "names of pods and Services are made from it",
        )
    elif deployment.name and not re.fullmatch(r"(?=[a-z])" + DNS_LABEL.strip("^$"), deployment.name):
        yield Refusal(
            "metadata.name",
            f"is {deployment.name!r}: Services are named after it; {NAME_IS_MADE_OF}",
        )


def scaling_has_room(deployment: InferenceDeployment) -> Iterator[Refusal]:
    """Between the fewest replicas and the most; none at all is nobody's to end, as nothing is measured then."""
    scaling = deployment.spec.scaling
    if scaling is None:
        return
    if scaling.min_replicas > scaling.max_replicas:
        yield Refusal(
            "spec.scaling.minReplicas",
            f"is {scaling.min_replicas}, above maxReplicas {scaling.max_replicas}; lower it or raise maxReplicas",
        )
    if scaling.min_replicas == 0:
        yield Refusal("spec.scaling.minReplicas", NO_MEASURE_WITHOUT_REPLICAS)


def objectives_promise_something(deployment: InferenceDeployment) -> Iterator[Refusal]:
    """A promise has a time, and one share of the requests keeps all of them."""
    asked = deployment.spec.objectives
    if asked is None:
        return
    if asked.ttft is None and asked.itl is None:
        yield Refusal("spec.objectives", "promise nothing: give ttft or itl, or remove them")
    for name, promise in (("ttft", asked.ttft), ("itl", asked.itl)):
        if promise is not None and parse_seconds(promise.target) == 0:
            yield Refusal(f"spec.objectives.{name}.target", f"is {promise.target}; write a time above zero")
    if asked.ttft is not None and asked.itl is not None and asked.ttft.percentile != asked.itl.percentile:
        yield Refusal(
            "spec.objectives.itl.percentile",
            f"is {asked.itl.percentile}, that of ttft {asked.ttft.percentile}: a request keeps all promises, or none; "
            "write one percentile for both",
        )


# --- the model --------------------------------------------------------------------------------------------------------


def model_path_is_plain(deployment: InferenceDeployment) -> Iterator[Refusal]:
    scheme, _, rest = deployment.spec.model.uri.partition("://")
    if scheme == "file" and not (rest.startswith("/") and rest.strip("/")):
        yield Refusal("spec.model.uri", f"{deployment.spec.model.uri} has no absolute path; write file:///path")
    if scheme == "pvc" and not re.match(DNS_LABEL, rest.split("/", 1)[0]):
        claim = rest.split("/", 1)[0]
        wrong = f"{claim!r} is no name of a claim" if claim else f"{deployment.spec.model.uri} names no claim"
        yield Refusal("spec.model.uri", f"{wrong}; write pvc://CLAIM/path, such as pvc://models/smollm2")
    if scheme in ("file", "pvc") and (".." in rest.split("/") or re.search(r"[\s\x00?#$]", rest)):
        yield Refusal("spec.model.uri", "the path must hold neither '..' nor white space nor ?, #, $; write it out")
    elif rest.strip("/") and not re.fullmatch(SERVED_NAME, deployment.spec.model.name_for_clients):
        yield Refusal(
            "spec.model.servedName",
            f"is missing, and {deployment.spec.model.name_for_clients!r}, the last part of the uri, is no name "
            "that clients can send; set it to letters, digits and -_./:",
        )


HUB_REPO = r"[A-Za-z0-9][\w.-]*/[\w.-]+"
HUB_REVISION = r"refs/pr/\d+|\w[\w.-]*"  # as the engine reads it
BUCKET_PLACE = r"[A-Za-z0-9][\w.-]{1,62}(/[^/\s\x00$]+)*"
REGISTRY_PLACE = (
    r"(localhost|[\w-]+(\.[\w-]+)+|[\w.-]+(?=:\d)|\[[0-9a-f:]+\])(:\d{1,5})?(/[a-z0-9]+(([._]|__|-+)[a-z0-9]+)*)+"
)
IMAGE_REVISION = r"\w[\w.-]{0,127}|sha256:[0-9a-f]{64}"
OF_ONE_SCHEME = {
    "revision": ("revision", (Scheme.HUB,), "an hf:// model; in an s3:// or oci:// model's uri stands what is meant"),
    "token_secret_ref": (
        "tokenSecretRef",
        (Scheme.HUB,),
        "an hf:// model; others have s3.credentialsSecret, oci.pullSecret",
    ),
    "s3": ("s3", (Scheme.S3,), "an s3:// model"),
    "oci": ("oci", (Scheme.OCI,), "an oci:// model"),
    "cache": ("cache", DOWNLOADED, "models that are downloaded (hf://, s3://, oci://)"),
}
"""By field of the model: its name, whose it is, and how that is said."""


def a_download_is_named_whole(deployment: InferenceDeployment) -> Iterator[Refusal]:
    model = deployment.spec.model
    place, revision = model.parts
    if model.scheme in DOWNLOADED and (place.endswith(".gguf") or (revision or "").endswith(".gguf")):
        yield Refusal(
            "spec.model.uri",
            f"{model.uri} is one GGUF file; of these only folders are downloaded in a cluster: GGUF files that are "
            "downloaded are not supported yet, so put it on a PersistentVolumeClaim and use pvc://CLAIM/path",
        )
    elif model.scheme is Scheme.HUB:
        yield from _of_the_hub(model)
    elif model.scheme is Scheme.S3 and re.fullmatch(BUCKET_PLACE, place) is None:
        yield Refusal("spec.model.uri", f"{model.uri} names no folder of a bucket; write s3://BUCKET/PREFIX")
    elif model.scheme is Scheme.OCI:
        yield from _of_a_registry(model)
    size = None if model.cache is None else model.cache.size
    if model.is_downloaded and size is not None and parse_quantity(size) <= 0:
        yield Refusal("spec.model.cache.size", "is 0: nothing could be downloaded; raise it")


def _of_the_hub(model: ModelSource) -> Iterator[Refusal]:
    repo, revision = model.parts
    if re.fullmatch(HUB_REPO, repo) is None:
        yield Refusal("spec.model.uri", f"{model.uri} names no model; write hf://ORG/NAME or …@REVISION")
    elif model.uri.endswith("@"):
        yield Refusal(
            "spec.model.uri", f"{model.uri} names no revision behind the @; write {model.uri}main, or leave the @ out"
        )
    if revision is not None and (re.fullmatch(HUB_REVISION, revision) is None or ".." in revision):
        yield Refusal(
            "spec.model.revision",
            f"{revision!r} is no branch, tag or commit that is taken; write one, such as main or refs/pr/1, and of a "
            "branch with a / in its name the commit",
        )
    if model.revision is not None and revision != model.revision:
        yield Refusal("spec.model.revision", f"is {model.revision}, and the uri says {revision}; write one of them")


def _of_a_registry(model: ModelSource) -> Iterator[Refusal]:
    place, revision = model.parts
    forms = "oci://REGISTRY/REPOSITORY:TAG or …@sha256:DIGEST"
    if re.fullmatch(REGISTRY_PLACE, place) is None:
        yield Refusal(
            "spec.model.uri",
            f"{model.uri} names no repository of a registry; write {forms}, the registry with its domain or port "
            "(docker.io/… for Docker's) and the repository in lower case",
        )
    elif model.is_in_image_volume and not (revision or "").startswith("sha256:"):
        yield Refusal(
            "spec.model.uri",
            f"{model.uri} may mean another image tomorrow, and with oci.imageVolume each node pulls by itself; write "
            "…@sha256:DIGEST",
        )
    elif model.uri.endswith((":", "@")) or (revision is not None and re.fullmatch(IMAGE_REVISION, revision) is None):
        yield Refusal("spec.model.uri", f"{model.uri} ends in no tag or digest; write {forms}")


def an_image_volume_is_the_nodes(deployment: InferenceDeployment) -> Iterator[Refusal]:
    model = deployment.spec.model
    if model.oci is None or not model.is_in_image_volume:
        if model.oci is not None and model.oci.folder is not None:
            yield Refusal(
                "spec.model.oci.folder", "belongs to imageVolume: what is pulled is looked through; remove it"
            )
        return
    if ".." in (model.oci.folder or "").split("/"):
        yield Refusal("spec.model.oci.folder", "must not hold '..'; write it out")
    if model.oci.pull_secret is not None:
        yield Refusal(
            "spec.model.oci.pullSecret",
            "is for an engine that pulls; with imageVolume the node does: write it into template.spec.imagePullSecrets",
        )
    if model.oci.plain_http:
        yield Refusal("spec.model.oci.plainHttp", "is for an engine that pulls; with imageVolume ask the nodes' owner")
    if model.cache is not None:
        yield Refusal("spec.model.cache", "is for an engine that pulls; with imageVolume the node keeps it; remove it")


def options_belong_to_where_the_model_is(deployment: InferenceDeployment) -> Iterator[Refusal]:
    model = deployment.spec.model
    for field, (name, schemes, whose) in OF_ONE_SCHEME.items():
        if getattr(model, field) is not None and model.scheme not in schemes:
            yield Refusal(f"spec.model.{name}", f"belongs to {whose}; remove it")


# --- the runtime ------------------------------------------------------------------------------------------------------


def runtime_kind_is_built(deployment: InferenceDeployment) -> Iterator[Refusal]:
    if deployment.spec.runtime.kind != "trimtab":
        yield Refusal("spec.runtime.kind", f"{deployment.spec.runtime.kind} is not supported yet; use trimtab")


def an_image_is_known(deployment: InferenceDeployment) -> Iterator[Refusal]:
    if deployment.image is None:
        yield Refusal("spec.runtime.image", "is missing and the operator has no default; set it, or --default-image")
    elif re.search(r"\s", deployment.image):
        yield Refusal("spec.runtime.image", f"{deployment.image!r} holds white space; write name:tag")


# Flags that structured fields, the operator or the layout own. Everything else is passed on to the engine as it is.
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
    "-ep": "spec.parallelism.expert",
    "--shutdown-timeout": "spec.rollout.drainTimeout",
    "-asc": "spec.engine.apiServerCount",
    "-q": "spec.engine.quantization",
    "-tp": "spec.parallelism.tensor",
    "-pp": "spec.parallelism.pipeline",
    "-dp": "spec.parallelism.data",
}
OPERATOR_FLAGS = (
    "--host",
    "--port",
    "--admin-port",
    "--admin-token-sha256",
    # Where the ranks of a replica are, and how they meet: the layout decides, and each pod is told its own.
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
    "-dpa",
    "-dpe",
    "-dph",
    "-dpl",
    "-dpp",
    "-dpr",
)


def args_repeat_no_field(deployment: InferenceDeployment) -> Iterator[Refusal]:
    for index, argument in enumerate(deployment.spec.runtime.args):
        flag = argument.split("=", 1)[0].replace("_", "-")
        where = f"spec.runtime.args[{index}]"
        if argument.startswith("$(") or (index == 0 and not argument.startswith("-")):
            yield Refusal(where, f"{argument!r} is no flag; write --flag=value (a variable as --flag=$(NAME))")
        elif flag.lstrip().startswith("-") and re.search(r"\s", flag):
            yield Refusal(where, f"{argument!r} holds white space; write --flag=value, or flag and value as two items")
        if flag in OWNED_FLAGS:
            yield Refusal(f"spec.runtime.args[{index}]", f"{flag} repeats {OWNED_FLAGS[flag]}; set that field instead")
        elif flag in OPERATOR_FLAGS:
            yield Refusal(f"spec.runtime.args[{index}]", f"{flag} is set by the operator; remove it")
        elif flag == "--config":
            yield Refusal(where, "--config reads flags from a file that cannot be judged here; write its flags out")
    if deployment.spec.engine.scheduling_policy is not None:
        for index, flag in queue_flags(deployment.spec):
            where = f"spec.runtime.args[{index}]"
            yield Refusal(where, f"{flag} is told beside spec.engine.schedulingPolicy; keep one of them")


# --- the layout -------------------------------------------------------------------------------------------------------


# --- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class NotBuilt:
    """A field of spec.engine that this version knows only by name."""

    attribute: str
    field: str
    asks_for_nothing: Callable[[Any], bool]
    message: str


NOT_BUILT_ENGINE_FIELDS = (
    NotBuilt("quantization", "quantization", lambda v: v == "fp8", "only fp8 is built; set fp8 or remove it"),
)


def engine_fields_are_built(deployment: InferenceDeployment) -> Iterator[Refusal]:
    for entry in NOT_BUILT_ENGINE_FIELDS:
        value = getattr(deployment.spec.engine, entry.attribute)
        if value is not None and not entry.asks_for_nothing(value):
            yield Refusal(f"spec.engine.{entry.field}", entry.message)


def a_deadline_has_a_target(deployment: InferenceDeployment) -> Iterator[Refusal]:
    asked = deployment.spec.objectives
    if deployment.spec.engine.scheduling_policy == "deadline" and (asked is None or asked.ttft is None):
        yield Refusal("spec.engine.schedulingPolicy", DEADLINE_WITHOUT_TARGET)


def swapping_has_space(deployment: InferenceDeployment) -> Iterator[Refusal]:
    """Without swap space every swap would fall back to recompute, and nobody would know why."""
    engine = deployment.spec.engine
    swaps = engine.preemption_mode in ("swap", "auto")
    if swaps and (engine.swap_space is None or parse_quantity(engine.swap_space) == 0):
        yield Refusal(
            "spec.engine.swapSpace",
            f"is {engine.swap_space or 'missing'}, but preemptionMode {engine.preemption_mode} moves KV blocks there; "
            "set it, for example to 1Gi (on the CPU it is part of the container's memory), or use preemptionMode "
            "recompute",
        )


def speculation_is_built(deployment: InferenceDeployment) -> Iterator[Refusal]:
    speculative = deployment.spec.engine.speculative
    if speculative is None:
        return
    where, method = "spec.engine.speculative", speculative.method
    if method in ("ngram", "mtp") and speculative.model is not None:
        source = "the request's own text" if method == "ngram" else "the model's own layer"
        yield Refusal(f"{where}.model", f"is set, but {method} guesses from {source}; remove it")
    elif method in ("draft_model", "eagle") and not (speculative.model or "").startswith("file:///"):
        given = "is missing" if speculative.model is None else f"is {speculative.model}"
        what = "a draft model" if method == "draft_model" else "a head"
        yield Refusal(f"{where}.model", f"{given}; {what} is read from the image: write file:///path")
    if method in ("eagle", "mtp"):
        yield from _hidden_states_are_at_hand(deployment, f"{where}.method", method)


def _hidden_states_are_at_hand(deployment: InferenceDeployment, field: str, method: str) -> Iterator[Refusal]:
    """What reads the model's hidden states runs beside one whole model, on the CPU."""
    instead = "use ngram or draft_model"
    parallelism = deployment.spec.parallelism
    if deployment.spec.runtime.device != "cpu":
        yield Refusal(field, f"{method} is not supported yet for spec.runtime.device cuda; {instead}")
    elif parallelism.tensor * parallelism.pipeline > 1:
        ranks = f"spec.parallelism.tensor × pipeline = {parallelism.tensor * parallelism.pipeline}"
        yield Refusal(field, f"{method} is not supported yet for {ranks}; {instead}, or one rank")


"""What a prompt may have besides text."""


def modalities_are_built(deployment: InferenceDeployment) -> Iterator[Refusal]:
    limits = deployment.spec.engine.limit_mm_per_prompt or {}
    for name in sorted(limits.keys() - set(MODALITIES)):
        yield Refusal("spec.engine.limitMmPerPrompt", f"has {name}; its keys are {' and '.join(MODALITIES)}")


def utilization_is_above_zero(deployment: InferenceDeployment) -> Iterator[Refusal]:
    given = deployment.spec.engine.gpu_memory_utilization
    if given is not None and parse_quantity(given) == 0:
        yield Refusal("spec.engine.gpuMemoryUtilization", 'is 0; write a share such as "0.90"')


def a_step_holds_every_running_request(deployment: InferenceDeployment) -> Iterator[Refusal]:
    _, seqs, tokens = knobs(deployment.spec)
    if seqs.start is not None and tokens.start is not None and seqs.start > tokens.start:
        field = "maxNumBatchedTokens" if tokens.is_start_given else "maxNumSeqs"
        yield Refusal(
            f"spec.engine.{field}",
            f"maxNumBatchedTokens ({tokens.start}) must be at least maxNumSeqs ({seqs.start}): every running request "
            "needs one token per step; raise the former or lower the latter",
        )


# --- tuning -----------------------------------------------------------------------------------------------------------


def bounds_hold_the_start(deployment: InferenceDeployment) -> Iterator[Refusal]:
    """min ≤ start ≤ max for every knob; a start that only the engine knows must be written down to be bounded."""
    names = ("gpu_memory_utilization", "max_num_seqs", "max_num_batched_tokens")
    fields = ("gpuMemoryUtilization", "maxNumSeqs", "maxNumBatchedTokens")
    for name, field, knob in zip(names, fields, knobs(deployment.spec), strict=True):
        bounds = getattr(deployment.spec.tuning.bounds, name)
        if bounds is None:
            continue
        low = None if bounds.min is None else parse_quantity(bounds.min)
        high = None if bounds.max is None else parse_quantity(bounds.max)
        where = f"spec.tuning.bounds.{field}"
        if high == 0:
            yield Refusal(f"{where}.max", 'is 0; write a share such as "0.95"')
        elif low is not None and high is not None and low > high:
            yield Refusal(where, f"min {bounds.min} exceeds max {bounds.max}; lower min or raise max")
        elif knob.start is None:
            yield Refusal(
                f"spec.engine.{field}",
                f"is missing: its default depends on the GPU; write it, so that {where} can hold it",
            )
        elif (low is not None and knob.start < low) or (high is not None and knob.start > high):
            yield Refusal(
                f"spec.engine.{field}",
                f"starts at {knob.start}{'' if knob.is_start_given else ' (the default)'}, outside "
                f"{where} [{bounds.min if low is not None else '-'}, {bounds.max if high is not None else '-'}]; "
                "move the start or the bounds",
            )


def restart_class_is_not_built(deployment: InferenceDeployment) -> Iterator[Refusal]:
    if deployment.spec.tuning.restart_class != "Never":
        yield Refusal("spec.tuning.restartClass", "canaried restarts are not supported yet; set Never")


# --- metrics and rollout ----------------------------------------------------------------------------------------------


def metrics_labels_narrow(deployment: InferenceDeployment) -> Iterator[Refusal]:
    metrics = deployment.spec.metrics
    for name, value in metrics.labels.items():
        if LABEL_NAME.fullmatch(name) is None or name.startswith("__"):
            yield Refusal(
                "spec.metrics.labels", f"{name!r} is no name of a label in Prometheus; write letters, digits, _"
            )
        elif name in ENGINES_LABELS:
            yield Refusal("spec.metrics.labels", f"{name} is a label that engines give; name those that scraping gives")
        if len(value) > MAX_LABEL_VALUE:
            yield Refusal("spec.metrics.labels", f"the value of {name} is longer than {MAX_LABEL_VALUE} characters")
    if metrics.labels and metrics.source == "Pods":
        yield Refusal("spec.metrics.labels", "source is Pods, where nothing has them; remove them, or use Auto")


def max_unavailable_moves_a_rollout(deployment: InferenceDeployment) -> Iterator[Refusal]:
    value = deployment.spec.rollout.max_unavailable
    if isinstance(value, int) and not 1 <= value <= 1000:
        yield Refusal("spec.rollout.maxUnavailable", f"is {value}; set 1 or more: replicas are updated in place")
    if isinstance(value, str) and not re.match(r"^(100|[1-9][0-9]?)%$", value):
        yield Refusal("spec.rollout.maxUnavailable", f"is {value!r}; write a number, or a percentage from 1% to 100%")


def max_surge_is_a_count(deployment: InferenceDeployment) -> Iterator[Refusal]:
    value = deployment.spec.rollout.max_surge
    if isinstance(value, int) and not 0 <= value <= 1000:
        yield Refusal("spec.rollout.maxSurge", f"is {value}; set 0 (replicas are updated in place) to 1000")
    if isinstance(value, str) and not re.match(r"^(100|[1-9]?[0-9])%$", value):
        yield Refusal("spec.rollout.maxSurge", f"is {value!r}; write a number, or a percentage from 0% to 100%")


def drain_fits_the_grace_period(deployment: InferenceDeployment) -> Iterator[Refusal]:
    try:
        seconds = parse_seconds(deployment.spec.rollout.drain_timeout)
    except ValueError as error:
        yield Refusal("spec.rollout.drainTimeout", str(error))
        return
    if not 0 < seconds <= MAX_DRAIN_SECONDS:
        yield Refusal(
            "spec.rollout.drainTimeout", f"is {seconds:g} s; set more than 0 s and at most {MAX_DRAIN_SECONDS:g} s"
        )
    grace = deployment.spec.template.spec.termination_grace_period_seconds
    if grace is not None and grace <= stop_seconds(seconds):
        yield Refusal(
            "spec.template.spec.terminationGracePeriodSeconds",
            f"is {grace} s, but a stop may take {stop_seconds(seconds):g} s: {PRE_STOP_SECONDS} s until nobody is sent "
            f"there any more, and {seconds:g} s of draining (spec.rollout.drainTimeout); raise it above that, or "
            "requests are cut off",
        )


def a_start_ends_in_time(deployment: InferenceDeployment) -> Iterator[Refusal]:
    where, written = "spec.rollout.startTimeout", deployment.spec.rollout.start_timeout
    if written is None:
        return
    try:
        seconds = parse_seconds(written)
    except ValueError as error:
        yield Refusal(where, str(error))
        return
    if not 0 < seconds <= MAX_WRITTEN_SECONDS:
        yield Refusal(where, f"is {seconds:g} s; set more than 0 s and at most {MAX_WRITTEN_SECONDS:g} s")


def a_change_is_watched_for_a_while(deployment: InferenceDeployment) -> Iterator[Refusal]:
    where = "spec.rollout.bakeTime"
    try:
        seconds = parse_seconds(deployment.spec.rollout.bake_time)
    except ValueError as error:
        yield Refusal(where, str(error))
        return
    if seconds > MAX_BAKE_SECONDS:
        yield Refusal(where, f"is {seconds:g} s; set at most {MAX_BAKE_SECONDS:g} s")


# --- the pod template overlay -----------------------------------------------------------------------------------------

REFUSED_POD_FIELDS: Mapping[str, str] = {
    "hostPID": "would give the pod the node's processes; remove it",
    "serviceAccount": "is an old name; use serviceAccountName",
    "automountServiceAccountToken": "engine pods get no token of the API server; remove it",
    "initContainers": "further containers are not supported; remove them",
    "restartPolicy": "is always Always for a StatefulSet; remove it",
    "shareProcessNamespace": "is not supported; remove it",
}
ACCOUNT_NAME = r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?"
VOLUME_SOURCES = ("configMap", "secret", "emptyDir", "persistentVolumeClaim", "ephemeral", "downwardAPI")
RESERVED_VOLUMES = ("meeting", "model", "shm", "tmp", CACHE_VOLUME, TOKEN_VOLUME, ACCOUNTS_VOLUME)
RESERVED_MOUNTS = ("/dev/shm", "/etc/trimtab", "/tmp", "/models")  # noqa: S108 - paths in the pod, not here
SECURITY_FIELDS = ("runAsUser", "runAsGroup", "fsGroup", "fsGroupChangePolicy", "supplementalGroups")
RESERVED_LABEL_PREFIXES = ("trimtab.dev/", "app.kubernetes.io/")
CONFINEMENT_ANNOTATIONS = (  # older Kubernetes takes the place of securityContext from these
    "container.apparmor.security.beta.kubernetes.io/",
    "container.seccomp.security.alpha.kubernetes.io/",
    "seccomp.security.alpha.kubernetes.io/",
)
LABEL_VALUE = r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
LABEL_KEY = r"([a-z0-9][-a-z0-9.]{0,252}/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?"


def overlay_pod_fields_are_allowed(deployment: InferenceDeployment) -> Iterator[Refusal]:
    for name, value in (deployment.spec.template.spec.model_extra or {}).items():
        where = f"spec.template.spec.{name}"
        if name in POD_FIELDS:
            yield from _privilege_errors(where, name, value, deployment.allowed_privileges)
            continue
        reason = REFUSED_POD_FIELDS.get(
            name, "is not a part of the pod that can be laid over; see docs/reference/resource.md"
        )
        yield Refusal(where, reason)
    for index, container in enumerate(deployment.spec.template.spec.containers):
        where = f"spec.template.spec.containers[{index}]"
        if container.name != "main":
            yield Refusal(f"{where}.name", f"is {container.name!r}; only the container main can be laid over")
        for name, value in (container.model_extra or {}).items():
            if name != "securityContext" or value != LOCKS_MEMORY:
                yield Refusal(f"{where}.{name}", _refused_container_field(name))
            elif LOCK_MEMORY not in deployment.allowed_privileges:
                reason = "would let the engine lock memory, as RDMA needs"
                yield Refusal(f"{where}.{name}", f"{reason}; {privilege_remedy(LOCK_MEMORY)}")


def _privilege_errors(where: str, name: str, value: Any, allowed_privileges: frozenset[str]) -> Iterator[Refusal]:
    if name not in allowed_privileges:
        yield Refusal(where, f"{POD_FIELDS[name]}; {privilege_remedy(name)}")
    elif name == "serviceAccountName" and not (isinstance(value, str) and re.fullmatch(ACCOUNT_NAME, value)):
        yield Refusal(where, f"is {value!r}, which is no name of a service account")
    elif name != "serviceAccountName" and not isinstance(value, bool):
        yield Refusal(where, f"is {value!r}; write true or false")


def _refused_container_field(name: str) -> str:
    known = {
        "image": "use spec.runtime.image",
        "args": "use spec.runtime.args",
        "command": "use spec.runtime.args",
        "securityContext": "the operator sets it: non-root, no capabilities, not privileged; remove it",
    }
    return known.get(name, "cannot be laid over; remove it")


def overlay_gives_no_power_over_the_node(deployment: InferenceDeployment) -> Iterator[Refusal]:
    overlay = deployment.spec.template.spec
    for index, volume in enumerate(overlay.volumes):
        where = f"spec.template.spec.volumes[{index}]"
        sources = [key for key in volume if key != "name"]
        if volume.get("name") in RESERVED_VOLUMES:
            yield Refusal(f"{where}.name", f"{volume['name']} is the operator's; choose another name")
        if not re.fullmatch(DNS_LABEL, str(volume.get("name", ""))) or len(sources) != 1:
            yield Refusal(where, "needs a name of lower-case letters, digits and dashes, and exactly one source")
        if volume.get("name") in [other.get("name") for other in overlay.volumes[:index]]:
            yield Refusal(f"{where}.name", f"{volume.get('name')!r} is there twice; choose another name")
        for source in sources:
            if source == HOST_PATH and HOST_PATH in deployment.allowed_privileges:
                continue
            if source == HOST_PATH:
                yield Refusal(
                    f"{where}.{source}", f"would give the pod the node's files; {privilege_remedy(HOST_PATH)}"
                )
            elif source not in VOLUME_SOURCES:
                yield Refusal(f"{where}.{source}", f"is not allowed; use one of {', '.join(VOLUME_SOURCES)}")
    for name, value in (overlay.security_context or {}).items():
        where = f"spec.template.spec.securityContext.{name}"
        if name not in SECURITY_FIELDS:
            yield Refusal(where, f"cannot be laid over; allowed are {', '.join(SECURITY_FIELDS)}")
        elif name == "runAsUser" and value in (0, "0"):
            yield Refusal(where, "engine pods never run as root; use another user")
        elif name in ("runAsUser", "runAsGroup", "fsGroup") and (type(value) is not int or not 0 <= value < 2**31):
            yield Refusal(where, f"is {value!r}; write a number from 0 to 2147483647")


def overlay_leaves_the_operators_parts_alone(deployment: InferenceDeployment) -> Iterator[Refusal]:
    template = deployment.spec.template
    for name in template.metadata.annotations:
        if name.startswith(CONFINEMENT_ANNOTATIONS):
            yield Refusal(
                f"spec.template.metadata.annotations[{name}]", "would loosen the pod's confinement; remove it"
            )
    for kind, names in (("labels", template.metadata.labels), ("annotations", template.metadata.annotations)):
        for name in names:
            if name.startswith(RESERVED_LABEL_PREFIXES):
                yield Refusal(f"spec.template.metadata.{kind}[{name}]", "is the operator's; choose another name")
    for container in template.spec.containers:
        for index, mount in enumerate(container.volume_mounts):
            yield from _mount_refusals(f"spec.template.spec.containers[0].volumeMounts[{index}]", mount, template.spec)
        for index, variable in enumerate(container.env):
            where = f"spec.template.spec.containers[0].env[{index}]"
            if not variable.get("name") or not isinstance(variable["name"], str):
                yield Refusal(where, "needs a name")
            elif not isinstance(variable.get("value", ""), str | None):
                yield Refusal(f"{where}.value", f"is {variable['value']!r}, which is no text; put it in quotes")


def _mount_refusals(where: str, mount: Mapping[str, Any], overlay: PodOverlay) -> Iterator[Refusal]:
    path, volumes = mount.get("mountPath"), [volume.get("name") for volume in overlay.volumes]
    if not isinstance(path, str) or not path.startswith("/"):
        yield Refusal(f"{where}.mountPath", f"is {path!r}; write an absolute path")
        return
    path = "/" + posixpath.normpath(path).lstrip("/")  # normpath leaves a double slash in front
    if any(
        f"{path.rstrip('/')}/".startswith(f"{taken}/") or f"{taken}/".startswith(f"{path.rstrip('/')}/")
        for taken in RESERVED_MOUNTS
    ):
        yield Refusal(f"{where}.mountPath", f"{path} is, or holds, a path of the operator's; mount it elsewhere")
    if mount.get("name") not in volumes:
        yield Refusal(
            f"{where}.name", f"is {mount.get('name')!r}, which is no volume of spec.template.spec.volumes; add it there"
        )


def overlay_labels_are_labels(deployment: InferenceDeployment) -> Iterator[Refusal]:
    template = deployment.spec.template
    places = (("metadata.labels", template.metadata.labels), ("spec.nodeSelector", template.spec.node_selector))
    for place, labels in places:
        for name, value in labels.items():
            if not re.fullmatch(LABEL_KEY, name) or not re.fullmatch(LABEL_VALUE, value):
                yield Refusal(
                    f"spec.template.{place}[{name}]",
                    f"{name!r}: {value!r} is no label; use at most 63 letters, digits and -_. on either side, "
                    "with a letter or digit at both ends",
                )


def overlay_resources_are_quantities(deployment: InferenceDeployment) -> Iterator[Refusal]:
    for container in deployment.spec.template.spec.containers:
        for kind, amounts in (container.resources or {}).items():
            where = f"spec.template.spec.containers[0].resources.{kind}"
            if kind not in ("requests", "limits") or not isinstance(amounts, Mapping):
                yield Refusal(where, "is not a set of amounts; write requests and limits")
                continue
            found = [
                r for name, amount in amounts.items() for r in _resource_refusals(deployment.spec, where, name, amount)
            ]
            yield from found
            limits = (container.resources or {}).get("limits")
            if kind == "requests" and not found and isinstance(limits, Mapping):
                yield from _above_limit(where, amounts, limits)


def _above_limit(where: str, requests: Mapping[str, Any], limits: Mapping[str, Any]) -> Iterator[Refusal]:
    for name in sorted(requests.keys() & limits.keys()):
        try:
            is_above = parse_quantity(requests[name]) > parse_quantity(limits[name])
        except ValueError:
            continue  # the limit is refused for itself
        if is_above:
            yield Refusal(
                f"{where}.{name}", f"is {requests[name]}, above the limit {limits[name]}; lower it or raise the limit"
            )


def _resource_refusals(spec: Spec, where: str, name: str, amount: Any) -> Iterator[Refusal]:
    try:
        if parse_quantity(amount) < 0:
            yield Refusal(f"{where}.{name}", f"is {amount}; an amount is never negative")
    except ValueError as error:
        yield Refusal(f"{where}.{name}", str(error))
    if name == "nvidia.com/gpu":
        fix = "use runtime.device cuda and spec.parallelism" if spec.runtime.device == "cpu" else "use spec.parallelism"
        yield Refusal(f"{where}.{name}", f"follows from the layout; remove it: {fix}")


RULES: tuple[Rule, ...] = (
    name_leaves_room_for_child_names,
    scaling_has_room,
    objectives_promise_something,
    model_path_is_plain,
    a_download_is_named_whole,
    options_belong_to_where_the_model_is,
    an_image_volume_is_the_nodes,
    runtime_kind_is_built,
    an_image_is_known,
    args_repeat_no_field,
    engine_fields_are_built,
    a_deadline_has_a_target,
    swapping_has_space,
    modalities_are_built,
    speculation_is_built,
    utilization_is_above_zero,
    a_step_holds_every_running_request,
    bounds_hold_the_start,
    restart_class_is_not_built,
    metrics_labels_narrow,
    max_unavailable_moves_a_rollout,
    max_surge_is_a_count,
    a_change_is_watched_for_a_while,
    drain_fits_the_grace_period,
    a_start_ends_in_time,
    overlay_pod_fields_are_allowed,
    overlay_gives_no_power_over_the_node,
    overlay_leaves_the_operators_parts_alone,
    overlay_labels_are_labels,
    overlay_resources_are_quantities,
)

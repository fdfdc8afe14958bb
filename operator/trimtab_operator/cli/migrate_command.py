"""`trimtab migrate`: an InferenceDeployment from a `vllm serve` command line, a Deployment or a KServe resource."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from trimtab_operator.cli.shared import EXIT_INVALID_INPUT, check_readable, exit_with_error
from trimtab_operator.errors import InvalidSpec
from trimtab_operator.planning.admission import validation_messages, warnings_of
from trimtab_operator.resource.crd import structural
from trimtab_operator.resource.spec import GROUP, KIND, VERSION, InferenceDeployment, Spec
from trimtab_operator.validation.engine_flags import Argument, split_arguments
from trimtab_operator.validation.rules import OPERATOR_FLAGS, OWNED_FLAGS

ABOUT = """Convert a `vllm serve` command line, or a Deployment, InferenceService or LLMInferenceService, to an
InferenceDeployment. The resource is printed on stdout; each dropped part, with the reason, on stderr.
Exit code 2 if the resource would be rejected."""
EXAMPLES = """Examples:

trimtab migrate "vllm serve Qwen/Qwen3-8B --tensor-parallel-size 2 --max-model-len 16384"

trimtab migrate -f inferenceservice.yaml > deployment.yaml"""
VLLM_PROGRAM = ("vllm", "serve")
VLLM_MODULE = "vllm.entrypoints.openai.api_server"
SIZES = ("--swap-space", "--kv-offload-size", "--mm-processor-cache-gb")
"""Flags whose plain number is GiB."""
LENGTH_UNITS = {"k": 10**3, "m": 10**6, "g": 10**9, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
POD_FIELDS = (
    "nodeSelector",
    "tolerations",
    "affinity",
    "volumes",
    "imagePullSecrets",
    "serviceAccountName",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "topologySpreadConstraints",
    "securityContext",
)
CONTAINER_FIELDS = ("resources", "env", "envFrom", "volumeMounts")
HUB_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
KSERVE_GROUP = "serving.kserve.io/"


@dataclass
class Migration:
    """The resource under construction, and notes about dropped parts."""

    name: str
    namespace: str | None = None
    spec: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def set(self, path: str, value: Any) -> None:
        """Set a field such as spec.engine.maxNumSeqs."""
        node = self.spec
        *parents, last = path.removeprefix("spec.").split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = value

    def drop(self, what: str, why: str) -> None:
        self.notes.append(f"dropped {what}: {why}")

    def resource(self) -> dict[str, Any]:
        metadata = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        order = [each.alias for each in Spec.model_fields.values()]
        spec = dict(sorted(self.spec.items(), key=lambda item: order.index(item[0])))
        return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": metadata, "spec": spec}


def migrate(
    command: Annotated[
        str | None, typer.Argument(help='Command line in quotes: "vllm serve MODEL --flag …".', show_default=False)
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option("--filename", "-f", help="Deployment, InferenceService or LLMInferenceService; - is stdin."),
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the resource. Default: from the model or file.")] = None,
) -> None:
    """Print the resource."""
    if (command is None) == (file is None):
        exit_with_error("migrate: pass either a command line in quotes or -f FILE")
    if command is not None:
        migrations = [from_command(shlex.split(command), name)]
    else:
        assert file is not None
        check_readable("-f", file)
        text = typer.get_text_stream("stdin").read() if str(file) == "-" else file.read_text()
        migrations = [from_resource(body, name) for body in _documents(text)]
    typer.echo(yaml.safe_dump_all([made.resource() for made in migrations], sort_keys=False), nl=False)
    rejected = [_report(made) for made in migrations]
    if any(rejected):
        raise typer.Exit(EXIT_INVALID_INPUT)


def _report(made: Migration) -> bool:
    """Print notes, warnings and errors of one resource on stderr. Return True if it would be rejected."""
    resource = made.resource()
    errors = validation_messages(resource, default_image="default")
    try:
        warnings = warnings_of(InferenceDeployment.parse(resource, default_image="default"))
    except InvalidSpec:
        warnings = []
    for line in (*made.notes, *(f"warning: {each}" for each in warnings), *(f"error: {each}" for each in errors)):
        typer.echo(f"{made.name}: {line}", err=True)
    return bool(errors)


def _documents(text: str) -> list[Mapping[str, Any]]:
    try:
        found = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        exit_with_error(f"-f: not YAML: {error}")
    if not found or not all(isinstance(each, Mapping) for each in found):
        exit_with_error("-f: contains no Kubernetes resource")
    return found


def from_command(words: Sequence[str], name: str | None = None) -> Migration:
    """Return the migration of a `vllm serve` command line, or of the arguments of vLLM's image."""
    args = list(words)
    while args and re.fullmatch(r"[A-Z_][A-Z0-9_]*=.*", args[0]):  # variables before the command
        args.pop(0)
    if args[:2] == list(VLLM_PROGRAM):
        args = args[2:]
    elif VLLM_MODULE in args:
        args = args[args.index(VLLM_MODULE) + 1 :]
    made = Migration(name or "")
    _apply_arguments(made, args)
    made.name = name or _as_name(made.spec.get("model", {}).get("uri", "").rpartition("/")[2]) or "model"
    return made


def _apply_arguments(made: Migration, args: Sequence[str]) -> None:
    kept: list[str] = []
    for argument in split_arguments(args):
        flag, values = argument.flag, argument.values
        if not argument.name.startswith("-"):
            if "uri" in made.spec.get("model", {}):
                made.drop(argument.name, "a second model")
            else:
                made.set("spec.model.uri", _model_uri(argument.name))
            continue
        if flag is None:
            made.drop(_written(argument), "neither vLLM nor the engine has this flag")
            continue
        names = set(flag.names)
        owned = next((OWNED_FLAGS[each] for each in flag.names if each in OWNED_FLAGS), None)
        if "--model" in names:
            made.set("spec.model.uri", _model_uri(values[0] if values else ""))
        elif flag.ignored:
            made.drop(_written(argument), flag.ignored)
        elif flag.rejected:
            if not (values and values[0] in flag.harmless):
                made.drop(_written(argument), f"not supported; {flag.rejected}")
        elif names & set(OPERATOR_FLAGS):
            made.drop(_written(argument), "the operator sets it")
        elif owned is not None:
            _set_owned(made, argument, owned)
        else:
            kept += [argument.name, *values] if flag.value == "many" else [_written(argument)]
    if kept:
        made.set("spec.runtime.args", kept)


def _set_owned(made: Migration, argument: Argument, path: str) -> None:
    """Set the field that replaces a flag, converted to the field's type."""
    name, values = argument.name, argument.values
    kind = _type_of(path)
    value = values[0] if values else ""
    try:
        if kind == "boolean":
            made.set(path, not name.startswith("--no-"))
        elif kind == "integer":
            made.set(path, _integer(value))
        elif kind == "object":
            made.set(path, _camel(json.loads(value)))
        elif kind == "array":
            made.set(path, [int(each) for each in re.split(r"[ ,]+", " ".join(values))])
        elif name in SIZES and re.fullmatch(r"\d+(\.\d+)?", value):
            made.set(path, f"{float(value) * 1024:.0f}Mi")
        elif name == "--quantization" and value != "fp8":
            made.drop(_written(argument), "it is in the checkpoint")
        elif name == "--shutdown-timeout":
            made.set(path, f"{_integer(value)}s")
        else:
            made.set(path, value)
            for other in values[1:]:
                made.drop(f"{name} {other}", "one name is supported")
    except ValueError:
        made.drop(_written(argument), f"the value cannot be converted; set {path}")


def _integer(text: str) -> int:
    """Parse an integer, or a length such as 16k.

    Raises:
        ValueError: The text is neither.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if found is None:
        raise ValueError(text)
    return int(float(found[1]) * LENGTH_UNITS.get(found[2], 1))


def _type_of(path: str) -> str:
    """Return the JSON type of a field, from the CRD."""
    node: Mapping[str, Any] = structural(Spec)
    for part in path.removeprefix("spec.").split("."):
        node = node.get("properties", {}).get(part, {})
    return str(node.get("type", "string"))


def _camel(value: Any) -> Any:
    """Convert the keys of an object to camelCase."""
    if not isinstance(value, dict):
        return value
    return {re.sub(r"_(.)", lambda found: found[1].upper(), key): _camel(each) for key, each in value.items()}


def _written(argument: Argument) -> str:
    return argument.name if not argument.values else f"{argument.name}={','.join(argument.values)}"


def _model_uri(model: str) -> str:
    """Return the URI of a model as vLLM names it: ORG/NAME on the hub, or a path."""
    if "://" in model:
        return model
    return f"file://{model}" if model.startswith("/") else f"hf://{model}"


def _as_name(text: str) -> str:
    """Return a Kubernetes name made of a model's name."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")


# --- Kubernetes resources ---------------------------------------------------------------------------------------------


def from_resource(body: Mapping[str, Any], name: str | None = None) -> Migration:
    """Return the migration of one Kubernetes resource. Other kinds end the command."""
    kind, version = str(body.get("kind")), str(body.get("apiVersion"))
    metadata, spec = body.get("metadata") or {}, body.get("spec") or {}
    made = Migration(name or str(metadata.get("name") or "model"), metadata.get("namespace"))
    if kind == "InferenceService" and version.startswith(KSERVE_GROUP):
        _from_inference_service(made, spec)
    elif kind == "LLMInferenceService" and version.startswith(KSERVE_GROUP):
        _from_llm_inference_service(made, spec)
    elif kind in ("Deployment", "StatefulSet") and version == "apps/v1":
        made.set("spec.replicas", spec.get("replicas", 1))
        _from_pod(made, (spec.get("template") or {}).get("spec") or {})
    else:
        exit_with_error(
            f"-f: kind {kind} of {version} cannot be converted; pass a Deployment, StatefulSet, "
            "InferenceService or LLMInferenceService"
        )
    return made


def _from_inference_service(made: Migration, spec: Mapping[str, Any]) -> None:
    predictor = dict(spec.get("predictor") or {})
    for other in sorted(set(spec) - {"predictor"}):
        made.drop(f"spec.{other}", "only the predictor is converted")
    model = predictor.pop("model", None)
    if model is not None:
        _from_pod(made, {**predictor, "containers": [model]})
        storage = model.get("storageUri")
        if storage:
            made.set("spec.model.uri", storage)
        made.drop("spec.predictor.model.modelFormat", "it is in the checkpoint")
    else:
        _from_pod(made, predictor)
    _set_scaling(made, predictor.get("minReplicas", 1), predictor.get("maxReplicas"))
    for metric in ("scaleTarget", "scaleMetric"):
        if metric in predictor:
            made.drop(f"spec.predictor.{metric}", "scaling follows latency; set spec.objectives")


def _from_llm_inference_service(made: Migration, spec: Mapping[str, Any]) -> None:
    model = spec.get("model") or {}
    if model.get("uri"):
        made.set("spec.model.uri", model["uri"])
    if model.get("name"):
        made.set("spec.model.servedName", model["name"])
    for degree, value in (spec.get("parallelism") or {}).items():
        if degree in ("tensor", "pipeline", "data", "expert"):
            made.set(f"spec.parallelism.{degree}", value)
        else:
            made.drop(f"spec.parallelism.{degree}", "the operator derives it")
    _from_pod(made, spec.get("template") or {})
    if "replicas" in spec:
        made.set("spec.replicas", spec["replicas"])
    if spec.get("router"):
        made.set("spec.router", {"enabled": True})
        made.drop("settings of spec.router", "Trimtab's router has its own")
    for other in sorted(set(spec) - {"model", "template", "parallelism", "replicas", "router"}):
        made.drop(f"spec.{other}", "not supported")


def _set_scaling(made: Migration, least: int, most: int | None) -> None:
    if most is None or most <= max(least, 1):
        made.set("spec.replicas", max(least, 1))
        return
    made.set("spec.scaling", {"minReplicas": least, "maxReplicas": most})
    made.set("spec.tuning.mode", "Auto")
    if least == 0:
        made.set("spec.router", {"enabled": True})
        made.notes.append("minReplicas 0 needs the router, which holds requests while there is no replica")


def _from_pod(made: Migration, pod: Mapping[str, Any]) -> None:
    """Convert a pod spec: the arguments of its first container, and what the overlay supports of the rest."""
    containers = pod.get("containers") or [{}]
    main = containers[0]
    for other in containers[1:]:
        made.drop(f"container {other.get('name')}", "only one container is supported")
    _apply_arguments(made, _arguments_of(main))
    for key in POD_FIELDS:
        if pod.get(key):
            made.set(f"spec.template.spec.{key}", pod[key])
    overlay = {key: main[key] for key in CONTAINER_FIELDS if main.get(key)}
    _take_gpus(made, overlay)
    _take_hub_token(made, overlay)
    if overlay:
        made.set("spec.template.spec.containers", [{"name": "main", **overlay}])
    if main.get("image"):
        made.drop(f"image {main['image']}", "the operator's default image is used; set spec.runtime.image for another")
    for key in sorted(set(main) - {"name", "image", "args", "command", *CONTAINER_FIELDS}):
        if key not in ("modelFormat", "storageUri", "runtime"):
            made.drop(f"container field {key}", "the operator sets it, or it is not supported")


def _arguments_of(container: Mapping[str, Any]) -> list[str]:
    words = [str(word) for word in (*(container.get("command") or ()), *(container.get("args") or ()))]
    if words[:1] and words[0].rpartition("/")[2] in ("sh", "bash"):
        words = shlex.split(words[-1])
    for marker in (list(VLLM_PROGRAM), [VLLM_MODULE]):
        for index in range(len(words)):
            if words[index : index + len(marker)] == marker:
                return _named_model(words[index + len(marker) :])
    return _named_model([word for word in words if word not in ("python", "python3", "-m")])


def _named_model(words: Sequence[str]) -> list[str]:
    """Replace the flags of KServe's runtime by vLLM's."""
    renames = {"--model_name": "--served-model-name", "--model_id": "--model", "--model_dir": "--model"}
    found = []
    for word in words:
        flag, equals, value = word.partition("=")
        if flag in ("--backend", "--task") and equals:
            continue
        found.append(f"{renames.get(flag, flag)}{equals}{value}")
    return found


def _take_gpus(made: Migration, overlay: dict[str, Any]) -> None:
    """Remove GPU amounts, which follow from the layout."""
    found = []
    for kind, amounts in list((overlay.get("resources") or {}).items()):
        gpus = {name: amount for name, amount in amounts.items() if name.endswith("/gpu")}
        found += list(gpus.values())
        overlay["resources"] = {
            **overlay["resources"],
            kind: {name: amount for name, amount in amounts.items() if name not in gpus},
        }
    if not found:
        if overlay.get("resources"):
            made.set("spec.runtime.device", "cpu")
        return
    made.set("spec.runtime.device", "cuda")
    if int(found[0]) > 1 and "parallelism" not in made.spec:
        made.set("spec.parallelism.tensor", int(found[0]))
        made.notes.append(f"{found[0]} GPUs: spec.parallelism.tensor is {found[0]}; `trimtab plan` compares layouts")
    overlay["resources"] = {kind: amounts for kind, amounts in overlay["resources"].items() if amounts}
    if not overlay["resources"]:
        del overlay["resources"]


def _take_hub_token(made: Migration, overlay: dict[str, Any]) -> None:
    """Move the hub's token from the environment to spec.model.tokenSecretRef."""
    kept = []
    for variable in overlay.get("env") or ():
        reference = (variable.get("valueFrom") or {}).get("secretKeyRef")
        if variable.get("name") in HUB_TOKENS and reference:
            made.set("spec.model.tokenSecretRef", {"name": reference["name"], "key": reference.get("key", "token")})
        elif str(variable.get("name", "")).startswith("VLLM_"):
            made.drop(f"variable {variable['name']}", "the engine does not read vLLM's variables")
        else:
            kept.append(variable)
    if kept:
        overlay["env"] = kept
    else:
        overlay.pop("env", None)

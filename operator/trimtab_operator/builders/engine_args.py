"""Command line of the engine, from the spec and the caps. Tuned values are not included; they are PATCHed at start."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping

from trimtab_operator.builders.admin_token import TokenHashes
from trimtab_operator.builders.download import SWITCH, download_flags, pinned_uri
from trimtab_operator.builders.labels import ADMIN_PORT, HTTP_PORT, LEADER, RENDEZVOUS_PORT
from trimtab_operator.builders.model_volume import mounted_path
from trimtab_operator.builders.rendezvous_secret import RENDEZVOUS_FILE, RENDEZVOUS_MOUNT
from trimtab_operator.layout import layout_of
from trimtab_operator.resource.live_parameters import live_parameters, plain
from trimtab_operator.resource.quantity import parse_quantity, parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment, Spec, Speculative

MASTER_ADDR_FLAG = "--master-addr"
TOKEN_FLAG = "--admin-token-sha256"  # noqa: S105 - the name of a flag
START_FLAGS = ("--gpu-memory-utilization", "--max-num-seqs", "--max-num-batched-tokens")
STATE_TOKEN_FLAG = "--state-token-sha256"  # noqa: S105 - the name of a flag


def model_path(deployment: InferenceDeployment) -> str:
    """Return the model's path in the container, or the uri from which the engine downloads it."""
    spec = deployment.spec
    if spec.model.is_downloaded:
        return pinned_uri(spec.model, deployment.commit)
    return mounted_path(spec) or spec.model.uri.partition("://")[2]


def served_name(spec: Spec) -> str:
    """Return the name that clients send as `model`."""
    return spec.model.name_for_clients


def engine_args(deployment: InferenceDeployment, *, token_hashes: TokenHashes) -> list[str]:
    """Return the arguments of `trimtab-engine`, one flag per item."""
    spec = deployment.spec
    flags: dict[str, object | None] = {
        "--served-model-name": served_name(spec),
        **download_flags(spec),
        "--device": spec.runtime.device,
        "--port": HTTP_PORT,
        "--admin-port": ADMIN_PORT,
        TOKEN_FLAG: token_hashes.admin,
        STATE_TOKEN_FLAG: token_hashes.state,
        "--max-model-len": spec.engine.max_model_len,
        "--block-size": spec.engine.block_size,
        "--kv-cache-dtype": spec.engine.kv_cache_dtype,
        "--quantization": spec.engine.quantization,
        **_live_parameter_flags(deployment),
        **_engine_flags(spec),
        **_layout_flags(spec),
        "--shutdown-timeout": f"{parse_seconds(spec.rollout.drain_timeout):g}",
    }
    return ["serve", model_path(deployment), *as_arguments(flags), *spec.runtime.args]


def as_arguments(flags: Mapping[str, object | None]) -> list[str]:
    """Return one item per flag that has a value."""
    return [flag if value is SWITCH else f"{flag}={value}" for flag, value in flags.items() if value is not None]


def _engine_flags(spec: Spec) -> dict[str, object | None]:
    """Parameters of the engine that are no knobs of the tuner; None for those that the spec leaves out."""
    engine = spec.engine
    caching = engine.enable_prefix_caching
    return {
        "--preemption-mode": engine.preemption_mode,
        "--swap-space": engine.swap_space,
        "--kv-offload-size": engine.kv_offload_size,
        "--enable-prefix-caching" if caching else "--no-enable-prefix-caching": None if caching is None else SWITCH,
        "--limit-mm-per-prompt": _modality_limits(engine.limit_mm_per_prompt),
        "--mm-processor-cache-gb": _gibibytes(engine.mm_processor_cache),
        "--speculative-config": _speculative_config(engine.speculative),
        "--api-server-count": engine.api_server_count,
        "--enforce-eager": SWITCH if engine.enforce_eager else None,
        "--cudagraph-capture-sizes": ",".join(map(str, engine.cudagraph_capture_sizes or ())) or None,
    }


def _layout_flags(spec: Spec) -> dict[str, object | None]:
    """Return the flags of the layout; empty for one rank. `group_flags` adds the rendezvous address."""
    layout, parallelism = layout_of(spec), spec.parallelism
    if layout.world_size == 1:
        return {}
    return {
        "--tensor-parallel-size": parallelism.tensor,
        "--pipeline-parallel-size": parallelism.pipeline,
        "--data-parallel-size": parallelism.data,
        "--enable-expert-parallel": SWITCH if parallelism.expert else None,
        "--nnodes": layout.pods if layout.pods > 1 else None,
        "--master-port": RENDEZVOUS_PORT if layout.pods > 1 else None,
        "--rendezvous-secret-file": f"{RENDEZVOUS_MOUNT}/{RENDEZVOUS_FILE}" if layout.pods > 1 else None,
    }


def group_flags(*, address: str, revision: str, role: str) -> list[str]:
    """Return the flags of a group with several pods that the template lacks: rendezvous address and id, node rank.

    The id excludes ranks of another revision. A worker derives its node rank from its pod's name.
    """
    return [
        f"{MASTER_ADDR_FLAG}={address}",
        f"--rendezvous-id={revision}",
        f"--node-rank={0 if role == LEADER else 'auto'}",
    ]


def _modality_limits(limits: Mapping[str, int] | None) -> str | None:
    """Return vLLM's JSON, canonical for equal values."""
    return None if limits is None else json.dumps(limits, sort_keys=True)


def _gibibytes(size: str | None) -> str | None:
    """Convert a quantity to GiB, the unit of the flag."""
    return None if size is None else plain(parse_quantity(size) / (1 << 30))


def _speculative_config(speculative: Speculative | None) -> str | None:
    """Return vLLM's JSON, canonical for equal values."""
    if speculative is None:
        return None
    model = None if speculative.model is None else speculative.model.removeprefix("file://")
    fields = {
        "method": speculative.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "model": model,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None}, sort_keys=True)


def _live_parameter_flags(deployment: InferenceDeployment) -> dict[str, object]:
    """Return the flags of start values in the spec and of caps."""
    flags: dict[str, object] = {}
    for parameter in live_parameters(deployment.spec, deployment.caps):
        flag = start_flag(parameter.field)
        if parameter.is_start_given and parameter.start is not None:
            flags[flag] = plain(parameter.start)
        if parameter.cap is not None:
            flags[f"{flag}-cap"] = plain(parameter.cap)
    return flags


def start_flag(field: str) -> str:
    """Return the flag with the start value of a live parameter."""
    return "--" + field.replace("_", "-")


def live_start_flags(spec: Spec) -> frozenset[str]:
    """Return the flags whose values are PATCHed to running engines instead of replacing pods."""
    return frozenset(start_flag(parameter.field) for parameter in live_parameters(spec) if parameter.is_live)


def with_start_values(args: Iterable[str], other: Iterable[str], spec: Spec) -> list[str]:
    """Return arguments with the live start values of other arguments of the same revision, each before its cap."""
    live = live_start_flags(spec)
    values = {flag: arg for arg in other if (flag := arg.partition("=")[0]) in live}
    found = []
    for arg in without_flags(args, live):
        flag, is_cap = arg.partition("=")[0].removesuffix("-cap"), arg.partition("=")[0].endswith("-cap")
        found += [values[flag]] if is_cap and flag in values else []
        found.append(arg)
    return found


def start_value_args(deployment: InferenceDeployment) -> list[str]:
    """Return the arguments with the start values and caps of a resource."""
    return as_arguments(_live_parameter_flags(deployment))


def without_flags(args: Iterable[str], flags: Collection[str]) -> list[str]:
    """Return the arguments without these flags, which have their values after `=`."""
    return [arg for arg in args if arg.partition("=")[0] not in flags]

"""The engine's command line: spec and caps only. Tuned values never enter it; they are PATCHed after each start."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal

from trimtab_operator.builders.download import SWITCH, download_flags, pinned_uri
from trimtab_operator.builders.labels import ADMIN_PORT, HTTP_PORT, LEADER, RENDEZVOUS_PORT
from trimtab_operator.builders.meeting_secret import MEETING_MOUNT, MEETING_SECRET_KEY
from trimtab_operator.builders.mounted import mounted_path
from trimtab_operator.layout import layout_of
from trimtab_operator.resource.live_parameters import knobs
from trimtab_operator.resource.quantity import parse_quantity, parse_seconds
from trimtab_operator.resource.spec import InferenceDeployment, Spec, Speculative

MEETING_FLAG = "--master-addr"
TOKEN_FLAG = "--admin-token-sha256"  # noqa: S105 - the name of a flag


def model_path(deployment: InferenceDeployment) -> str:
    """Where the engine finds the model inside its container, or under which name it fetches it."""
    spec = deployment.spec
    if spec.model.is_downloaded:
        return pinned_uri(spec.model, deployment.commit)
    return mounted_path(spec) or spec.model.uri.partition("://")[2]


def served_name(spec: Spec) -> str:
    """The name clients send as `model`."""
    return spec.model.name_for_clients


def engine_args(deployment: InferenceDeployment, *, admin_token_sha256: str) -> list[str]:
    """Arguments of `trimtab-engine`, one flag per item."""
    spec = deployment.spec
    flags: dict[str, object | None] = {
        "--served-model-name": served_name(spec),
        **download_flags(spec),
        "--device": spec.runtime.device,
        "--port": HTTP_PORT,
        "--admin-port": ADMIN_PORT,
        TOKEN_FLAG: admin_token_sha256,
        "--max-model-len": spec.engine.max_model_len,
        "--block-size": spec.engine.block_size,
        "--kv-cache-dtype": spec.engine.kv_cache_dtype,
        "--quantization": spec.engine.quantization,
        **_knob_flags(spec),
        **_engine_flags(spec),
        **_layout_flags(spec),
        "--shutdown-timeout": f"{parse_seconds(spec.rollout.drain_timeout):g}",
    }
    return ["serve", model_path(deployment), *as_arguments(flags), *spec.runtime.args]


def as_arguments(flags: Mapping[str, object | None]) -> list[str]:
    """One item per flag that has a value."""
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
    """None of them for one rank. Where a group's ranks meet is the group's own matter (`group_flags`)."""
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
        "--rendezvous-secret-file": f"{MEETING_MOUNT}/{MEETING_SECRET_KEY}" if layout.pods > 1 else None,
    }


def group_flags(*, address: str, revision: str, role: str) -> list[str]:
    """What the pods of one group of several are told beyond the template: where to meet, whom, and who they are.

    Ranks of another revision are kept out by the id. A worker's number follows from its pod's.
    """
    return [
        f"{MEETING_FLAG}={address}",
        f"--rendezvous-id={revision}",
        f"--node-rank={0 if role == LEADER else 'auto'}",
    ]


def _modality_limits(limits: Mapping[str, int] | None) -> str | None:
    """vLLM's JSON, in one spelling per value."""
    return None if limits is None else json.dumps(limits, sort_keys=True)


def _gibibytes(size: str | None) -> str | None:
    """A quantity as a number of GiB, which is what the flag takes."""
    return None if size is None else plain(parse_quantity(size) / (1 << 30))


def _speculative_config(speculative: Speculative | None) -> str | None:
    """vLLM's JSON, in one spelling per value."""
    if speculative is None:
        return None
    model = None if speculative.model is None else speculative.model.removeprefix("file://")
    fields = {
        "method": speculative.method,
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "model": model,
    }
    return json.dumps({name: value for name, value in fields.items() if value is not None}, sort_keys=True)


def _knob_flags(spec: Spec) -> dict[str, object]:
    """Start values that the spec gives, and caps."""
    flags: dict[str, object] = {}
    for knob in knobs(spec):
        flag = "--" + knob.field.replace("_", "-")
        if knob.is_start_given and knob.start is not None:
            flags[flag] = plain(knob.start)
        if knob.cap is not None:
            flags[f"{flag}-cap"] = plain(knob.cap)
    return flags


def plain(value: Decimal) -> str:
    """0.90 → 0.9, 1E+3 → 1000: one spelling per value, so that respelling a value rolls nothing."""
    return format(value.normalize(), "f")

"""Start values and caps of the live parameters, for the pod template and for tuning.

The cap of a new revision is `tuning.bounds.X.max` if it is set, else the start value with mode Off, else 0.95 for the
utilisation and twice the start value for counts. On CUDA the engine's default start values depend on the GPU, so a
count that is not in the spec has no cap here: the engine caps it at its start value.

Engines reserve the caps at start. A later start value within them is PATCHed to running engines, so the revision keeps
its caps (ADR-0083).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from decimal import Decimal

from trimtab_operator.resource.spec import Caps, FractionBounds, InferenceDeployment, IntBounds, Spec

DEFAULT_UTILIZATION = Decimal("0.9")  # docs/reference/contract.md, section 1
DEFAULT_UTILIZATION_CAP = Decimal("0.95")  # the rest is for memory that the ledger does not measure
CPU_MAX_NUM_SEQS = 128  # docs/reference/contract.md, section 1
CPU_MAX_NUM_BATCHED_TOKENS = 2048  # docs/reference/contract.md, section 1
CAP_FACTOR = 2  # cap of a count, relative to its start value
MAX_COUNT = Decimal(1048576)  # maximum of the bounds in the CRD and of the engine
FIXED_CACHE_FLAGS = ("--kv-cache-memory-bytes", "--kv-cache-memory", "--num-gpu-blocks-override")


@dataclass(frozen=True, slots=True)
class LiveParameter:
    """A live parameter. `start` is None if the engine chooses it, `cap` is None for the engine's default cap.

    `is_live` is False if running engines do not accept another start value.
    """

    field: str
    start: Decimal | None
    cap: Decimal | None
    is_start_given: bool
    is_live: bool

    @property
    def fits(self) -> bool:
        """True if engines with this cap accept the start value."""
        if self.start is None or self.cap is None:
            return self.start is self.cap
        return self.start <= self.cap


def live_parameters(spec: Spec, caps: Caps | None = None) -> tuple[LiveParameter, LiveParameter, LiveParameter]:
    """Return the live parameters gpu_memory_utilization, max_num_seqs and max_num_batched_tokens.

    `caps` are the caps that engines have reserved, in this order; None for those of a new revision.
    """
    on_cpu = spec.runtime.device == "cpu"
    engine, bounds = spec.engine, spec.tuning.bounds
    utilization, seqs, tokens = (
        _live_parameter(
            spec,
            "gpu_memory_utilization",
            engine.gpu_memory_utilization,
            DEFAULT_UTILIZATION,
            bounds.gpu_memory_utilization,
        ),
        _live_parameter(
            spec, "max_num_seqs", engine.max_num_seqs, CPU_MAX_NUM_SEQS if on_cpu else None, bounds.max_num_seqs
        ),
        _live_parameter(
            spec,
            "max_num_batched_tokens",
            engine.max_num_batched_tokens,
            CPU_MAX_NUM_BATCHED_TOKENS if on_cpu else None,
            bounds.max_num_batched_tokens,
        ),
    )
    if caps is None:
        return utilization, seqs, tokens
    return _with_cap(utilization, caps[0]), _with_cap(seqs, caps[1]), _with_cap(tokens, caps[2])


def caps_of(deployment: InferenceDeployment) -> Caps:
    """Return the caps that the pods of a resource reserve."""
    utilization, seqs, tokens = (
        None if parameter.cap is None else plain(parameter.cap)
        for parameter in live_parameters(deployment.spec, deployment.caps)
    )
    return utilization, seqs, tokens


def plain(value: Decimal) -> str:
    """Format a number canonically (0.90 → 0.9, 1E+3 → 1000), so that another spelling does not roll the pods."""
    return format(value.normalize(), "f")


def _with_cap(parameter: LiveParameter, cap: str | None) -> LiveParameter:
    return replace(parameter, cap=None if cap is None else Decimal(cap))


def _live_parameter(
    spec: Spec,
    field: str,
    given: str | int | None,
    default: Decimal | int | None,
    bounds: FractionBounds | IntBounds | None,
) -> LiveParameter:
    start = Decimal(str(given)) if given is not None else None if default is None else Decimal(default)
    is_fixed = field == "gpu_memory_utilization" and any(map(_fixes_cache, spec.runtime.args))
    is_live = start is not None and not is_fixed
    return LiveParameter(field, start, _cap(spec, field, start, bounds), given is not None, is_live)


def _fixes_cache(argument: str) -> bool:
    return argument.partition("=")[0].replace("_", "-") in FIXED_CACHE_FLAGS


def _cap(spec: Spec, field: str, start: Decimal | None, bounds: FractionBounds | IntBounds | None) -> Decimal | None:
    if bounds is not None and bounds.max is not None:
        return Decimal(str(bounds.max))
    if start is None or spec.tuning.mode == "Off":
        return start
    if field == "gpu_memory_utilization":
        return max(start, DEFAULT_UTILIZATION_CAP)
    return min(start * CAP_FACTOR, MAX_COUNT)

"""Start values and caps of the live parameters, for the pod template and for tuning.

The cap is `tuning.bounds.X.max` if it is set, else the start value with mode Off, else 0.95 for the utilisation and
twice the start value for counts. On CUDA the engine's default start values depend on the GPU, so a count that is not in
the spec has no cap here: the engine caps it at its start value.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal

from trimtab_operator.resource.spec import FractionBounds, IntBounds, Spec

DEFAULT_UTILIZATION = Decimal("0.9")  # docs/reference/contract.md, section 1
DEFAULT_UTILIZATION_CAP = Decimal("0.95")  # the rest is for memory that the ledger does not measure
CPU_MAX_NUM_SEQS = 128  # docs/reference/contract.md, section 1
CPU_MAX_NUM_BATCHED_TOKENS = 2048  # docs/reference/contract.md, section 1
CAP_FACTOR = 2  # cap of a count, relative to its start value
MAX_COUNT = Decimal(1048576)  # maximum of the bounds in the CRD and of the engine


@dataclass(frozen=True, slots=True)
class LiveParameter:
    """A live parameter. `start` is None if the engine chooses it, `cap` is None for the engine's default cap."""

    field: str
    start: Decimal | None
    cap: Decimal | None
    is_start_given: bool


def live_parameters(spec: Spec) -> tuple[LiveParameter, LiveParameter, LiveParameter]:
    """Return the live parameters gpu_memory_utilization, max_num_seqs and max_num_batched_tokens."""
    on_cpu = spec.runtime.device == "cpu"
    engine, bounds = spec.engine, spec.tuning.bounds
    return (
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


def _live_parameter(
    spec: Spec,
    field: str,
    given: str | int | None,
    default: Decimal | int | None,
    bounds: FractionBounds | IntBounds | None,
) -> LiveParameter:
    start = Decimal(str(given)) if given is not None else None if default is None else Decimal(default)
    return LiveParameter(field, start, _cap(spec, field, start, bounds), given is not None)


def _cap(spec: Spec, field: str, start: Decimal | None, bounds: FractionBounds | IntBounds | None) -> Decimal | None:
    if bounds is not None and bounds.max is not None:
        return Decimal(str(bounds.max))
    if start is None or spec.tuning.mode == "Off":
        return start
    if field == "gpu_memory_utilization":
        return max(start, DEFAULT_UTILIZATION_CAP)
    return min(start * CAP_FACTOR, MAX_COUNT)

"""Record of a replica's rendered template, so that an operator upgrade does not restart pods. Pure.

An annotation of the leader's StatefulSet stores the hash of the requested spec, the resolved image, the caps of the
live parameters and the rendered pod template. The template is reused while the hash is the same: a newer operator,
another default image or another admin token do not change pods (ADR-0019). Start values within the caps are not part of
the hash (ADR-0083).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.live_parameters import caps_of, live_parameters
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import Caps, InferenceDeployment, Spec

RECORD_ANNOTATION = "trimtab.dev/as-rendered"  # on a leader's StatefulSet
NOT_RENDERED = (
    "replicas",
    "priority",
    "scaling",
    "metrics",
    "objectives",
    "tuning",
    "rollout",
    "router",
)  # except for the fields that `asked_of` adds
CAPPED_FIELDS = {  # fields of `engine` that are sent to running engines up to the caps of their pods, by parameter
    "gpu_memory_utilization": "gpuMemoryUtilization",
    "max_num_seqs": "maxNumSeqs",
    "max_num_batched_tokens": "maxNumBatchedTokens",
}
LIVE_FIELDS = ("schedulingPolicy", *CAPPED_FIELDS.values())  # fields of `engine` that are sent to running engines
HASH_LENGTH = 16  # hex digits


@dataclass(frozen=True, slots=True)
class Record:
    """Hash of the requested spec (`asked`), resolved image, caps and rendered pod template."""

    asked: str
    image: str | None
    template: Mapping[str, Any]
    caps: Caps

    def to_text(self) -> str:
        """Return the value of the annotation."""
        return compact({"asked": self.asked, "image": self.image, "template": self.template, "caps": self.caps})


def asked_of(deployment: InferenceDeployment) -> str:
    """Return the hash of the caps and of the spec fields that affect pods.

    Fields with default values are excluded, so that neither new fields of a newer operator nor defaults set by the API
    server change the hash.
    """
    spec = deployment.spec
    written = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    asked = {name: value for name, value in without_live_fields(written, spec).items() if name not in NOT_RENDERED}
    asked["reserved"] = caps_of(deployment)
    limits = [getattr(spec.tuning.bounds, parameter.field) for parameter in live_parameters(spec)]
    caps = [None if limit is None or limit.max is None else str(limit.max) for limit in limits]
    asked["caps"] = caps
    asked["tunes"] = None in caps and spec.tuning.mode != "Off"  # without a bound, the mode determines the cap
    asked["drainTimeout"] = spec.rollout.drain_timeout
    asked["restartedAt"] = deployment.restarted_at
    return hashlib.sha256(compact(asked).encode()).hexdigest()[:HASH_LENGTH]


def without_live_fields(written: Mapping[str, Any], spec: Spec) -> dict[str, Any]:
    """Return `spec`, `written` as JSON, without the fields that are sent to running engines."""
    engine = written.get("engine") or {}
    fixed = {CAPPED_FIELDS[parameter.field] for parameter in live_parameters(spec) if not parameter.is_live}
    if engine.keys().isdisjoint(LIVE_FIELDS):
        return dict(written)
    rest = {name: value for name, value in engine.items() if name not in LIVE_FIELDS or name in fixed}
    without = {name: value for name, value in written.items() if name != "engine"}
    return {**without, "engine": rest} if rest else without


def records_of(stateful_sets: Iterable[Manifest]) -> dict[str, Record]:
    """Return the records of StatefulSets by their hash; invalid records are ignored.

    For equal hashes the first StatefulSet by name is used, so that all replicas run the same template.
    """
    found: dict[str, Record] = {}
    for stateful_set in sorted(stateful_sets, key=lambda one: str(one["metadata"]["name"])):
        record = _parsed((stateful_set["metadata"].get("annotations") or {}).get(RECORD_ANNOTATION))
        if record is not None:
            found.setdefault(record.asked, record)
    return found


def find_record(deployment: InferenceDeployment, records: Mapping[str, Record]) -> Record | None:
    """Return the record of a spec; None if its pods have not been rendered, or not with caps for its start values.

    Of several records, the one with the lowest caps is used: an edit that is undone in the middle of a rollout returns
    to the former pods.
    """

    def lowest_caps(record: Record) -> list[Decimal]:
        return [Decimal(cap or 0) for cap in record.caps]

    for record in sorted(records.values(), key=lowest_caps):
        is_within = all(parameter.fits for parameter in live_parameters(deployment.spec, record.caps))
        if is_within and asked_of(replace(deployment, caps=record.caps)) == record.asked:
            return record
    return None


def _parsed(text: object) -> Record | None:
    try:
        record: Any = json.loads(text) if isinstance(text, str) else None
        asked, image, template = record["asked"], record["image"], record["template"]
        utilization, seqs, tokens = map(_parsed_cap, record["caps"])
        labels, (main,) = template["metadata"]["labels"], template["spec"]["containers"]
        is_whole = isinstance(labels, dict) and isinstance(main["args"], list) and isinstance(main["name"], str)
    except (ValueError, ArithmeticError, KeyError, TypeError, RecursionError):
        return None
    is_named = isinstance(asked, str) and isinstance(image, str | None)
    return Record(asked, image, template, (utilization, seqs, tokens)) if is_whole and is_named else None


def _parsed_cap(cap: str | None) -> str | None:
    """Return the cap.

    Raises:
        ValueError, ArithmeticError: It is not a finite number.
    """
    if cap is not None and not Decimal(cap).is_finite():
        raise ValueError(cap)
    return cap

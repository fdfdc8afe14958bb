"""What a replica was rendered from, kept with it: an operator that renders otherwise restarts nothing. Pure.

The leader's StatefulSet carries, in one annotation, what was asked for (hashed), the image that this meant and the pod
template that was rendered then. As long as the same is asked for, that template stands: neither a newer operator, nor
another default image, nor another admin token changes a pod (ADR-0019).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trimtab_operator.resource.canonical_json import compact
from trimtab_operator.resource.live_parameters import knobs
from trimtab_operator.resource.manifest import Manifest
from trimtab_operator.resource.spec import InferenceDeployment

RECORD_ANNOTATION = "trimtab.dev/as-rendered"  # on a leader's StatefulSet
NOT_RENDERED = (
    "replicas",
    "priority",
    "scaling",
    "metrics",
    "objectives",
    "tuning",
    "rollout",
)  # but for what `asked_of` adds
TOLD_LIVE = ("schedulingPolicy",)  # of `engine`: serving engines are told, and no pod shows it
ASKED_LENGTH = 16  # hex digits


@dataclass(frozen=True, slots=True)
class Record:
    """What was `asked` for, the image that it meant, and the pod template that it was rendered to."""

    asked: str
    image: str | None
    template: Mapping[str, Any]

    def to_text(self) -> str:
        """The annotation's value."""
        return compact({"asked": self.asked, "image": self.image, "template": self.template})


def asked_of(deployment: InferenceDeployment) -> str:
    """Hash of what the owner asks of the pods: equal as long as nothing is written that could change them.

    What is written as its default counts as not written, so that an operator with further fields, or an API server that
    fills defaults in, asks for nothing new.
    """
    spec = deployment.spec
    written = spec.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    asked = {name: value for name, value in without_told_live(written).items() if name not in NOT_RENDERED}
    limits = [getattr(spec.tuning.bounds, knob.field) for knob in knobs(spec)]
    caps = [None if limit is None or limit.max is None else str(limit.max) for limit in limits]
    asked["caps"] = caps
    asked["tunes"] = None in caps and spec.tuning.mode != "Off"  # where no cap is given, the mode decides on it
    asked["drainTimeout"] = spec.rollout.drain_timeout
    asked["restartedAt"] = deployment.restarted_at
    return hashlib.sha256(compact(asked).encode()).hexdigest()[:ASKED_LENGTH]


def without_told_live(written: Mapping[str, Any]) -> dict[str, Any]:
    """A spec as it was written, without what serving engines are told alone: as if that had never been written."""
    engine = written.get("engine") or {}
    if engine.keys().isdisjoint(TOLD_LIVE):
        return dict(written)
    rest = {name: value for name, value in engine.items() if name not in TOLD_LIVE}
    without = {name: value for name, value in written.items() if name != "engine"}
    return {**without, "engine": rest} if rest else without


def records_of(stateful_sets: Iterable[Manifest]) -> dict[str, Record]:
    """What these StatefulSets remember, by what was asked for; what cannot be a record is left out.

    Of several for the same the first by name counts, so that all replicas run the same.
    """
    found: dict[str, Record] = {}
    for stateful_set in sorted(stateful_sets, key=lambda one: str(one["metadata"]["name"])):
        record = _parsed((stateful_set["metadata"].get("annotations") or {}).get(RECORD_ANNOTATION))
        if record is not None:
            found.setdefault(record.asked, record)
    return found


def _parsed(text: object) -> Record | None:
    try:
        said: Any = json.loads(text) if isinstance(text, str) else None
        asked, image, template = said["asked"], said["image"], said["template"]
        labels, (main,) = template["metadata"]["labels"], template["spec"]["containers"]
        is_whole = isinstance(labels, dict) and isinstance(main["args"], list) and isinstance(main["name"], str)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    is_named = isinstance(asked, str) and isinstance(image, str | None)
    return Record(asked, image, template) if is_whole and is_named else None

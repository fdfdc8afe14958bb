"""Conversion of spec.objectives to the tuner's objectives. Pure."""

from __future__ import annotations

from trimtab_operator.resource import spec as owner
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft


def objectives_of(objectives: owner.Objectives | None) -> Objectives:
    """Return the objectives of the spec; empty if none are set, which the tuner completes with defaults."""
    if objectives is None:
        return Objectives()
    ttft = itl = None
    if objectives.ttft is not None:
        per_token = 0.0 if objectives.ttft.per_prompt_token is None else parse_seconds(objectives.ttft.per_prompt_token)
        ttft = Ttft(parse_seconds(objectives.ttft.target), per_token, objectives.ttft.percentile / 100)
    if objectives.itl is not None:
        itl = Itl(
            parse_seconds(objectives.itl.target), ItlKind(objectives.itl.kind.lower()), objectives.itl.percentile / 100
        )
    return Objectives(ttft, itl)

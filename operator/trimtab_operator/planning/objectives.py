"""What the owner promises users, as the tuner reads it. Pure."""

from __future__ import annotations

from trimtab_operator.resource import spec as owner
from trimtab_operator.resource.quantity import parse_seconds
from trimtab_operator.tuner.objectives import Itl, ItlKind, Objectives, Ttft


def objectives_of(asked: owner.Objectives | None) -> Objectives:
    """The owner's promises; none where nothing is asked for, which the tuner completes with its defaults."""
    if asked is None:
        return Objectives()
    ttft = itl = None
    if asked.ttft is not None:
        per_token = 0.0 if asked.ttft.per_prompt_token is None else parse_seconds(asked.ttft.per_prompt_token)
        ttft = Ttft(parse_seconds(asked.ttft.target), per_token, asked.ttft.percentile / 100)
    if asked.itl is not None:
        itl = Itl(parse_seconds(asked.itl.target), ItlKind(asked.itl.kind.lower()), asked.itl.percentile / 100)
    return Objectives(ttft, itl)

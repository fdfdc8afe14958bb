"""Kinds of routers, and how one is built."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from trimtab_operator.tuner.engine_model import Sequence as Request

from trimtab_simulator.plant.replica import Replica


class Router(Protocol):
    """Chooses a replica for each request."""

    def choose(self, request: Request, ready: Sequence[Replica], now: float) -> Replica:
        """Return the replica that gets the request. Calls are in order of time."""


class RouterKind(StrEnum):
    SERVICE = "service"
    LEAST_REQUEST = "least-request"
    CHWBL = "chwbl"
    SGLANG = "sglang"
    LMETRIC = "lmetric"
    LLM_D = "llm-d"
    TRIMTAB = "trimtab"
    SHARED_CACHE_ORACLE = "shared-cache-oracle"


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Kind of router. The other values are for `trimtab`; all other rules know the exact state without delay."""

    kind: RouterKind = RouterKind.LEAST_REQUEST
    count: int = 1
    """Routers that share the load at random and do not know of each other's requests."""
    state_interval: float = 0.0
    """Seconds between two reports of a replica's state; 0 for the exact state at each request."""
    itl_target: float | None = None
    """Objective of the inter-token latency, in seconds."""


def router_of(settings: RouterSettings, seed: int) -> Router:
    """Return a router; random choices are seeded."""
    from trimtab_simulator.plant.routing.load_only import Chwbl, LeastRequest, Service
    from trimtab_simulator.plant.routing.published import LlmD, Lmetric, Sglang
    from trimtab_simulator.plant.routing.scored import Scored

    match settings.kind:
        case RouterKind.SERVICE:
            return Service(seed)
        case RouterKind.LEAST_REQUEST:
            return LeastRequest()
        case RouterKind.CHWBL:
            return Chwbl()
        case RouterKind.SGLANG:
            return Sglang()
        case RouterKind.LMETRIC:
            return Lmetric()
        case RouterKind.LLM_D:
            return LlmD()
        case RouterKind.TRIMTAB | RouterKind.SHARED_CACHE_ORACLE:
            return Scored(settings, seed)

"""Policies by the names of --policy, with a baseline's target after an @: `hpa-running@30`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from trimtab_simulator.errors import BadRequest
from trimtab_simulator.policies.aibrix import Apa, Kpa
from trimtab_simulator.policies.dynamo import dynamo_hybrid, dynamo_load, dynamo_throughput
from trimtab_simulator.policies.gpustack import gpustack
from trimtab_simulator.policies.hpa import hpa_running, keda_queue
from trimtab_simulator.policies.kubeai import KubeAi
from trimtab_simulator.policies.llm_d import llm_d_slo
from trimtab_simulator.policies.policy import Policy, PolicySetup
from trimtab_simulator.policies.wva import wva

WITH_TARGET: dict[str, Callable[[float], Policy]] = {
    "hpa-running": hpa_running,
    "keda-queue": keda_queue,
    "kubeai": KubeAi,
    "aibrix-kpa": Kpa,
    "aibrix-apa": Apa,
    "gpustack": gpustack,
}
"""Baselines with one target number of requests per replica."""

WITH_OBJECTIVES: dict[str, Callable[[PolicySetup], Policy]] = {
    "llm-d-slo": llm_d_slo,
    "dynamo-load": dynamo_load,
    "dynamo-throughput": dynamo_throughput,
    "dynamo-hybrid": dynamo_hybrid,
    "wva": wva,
}
"""Baselines that read the objectives, or have published thresholds."""

FIXED = ("static-default", "static-best", "static-n")
OTHERS = ("aimd", "replicas-only", "trimtab", "trimtab-restarted", "oracle")
NAMES = (*FIXED, *WITH_TARGET, *WITH_OBJECTIVES, *OTHERS)


@dataclass(frozen=True, slots=True)
class PolicySpec:
    """One policy: its name, and its target if given."""

    name: str
    target: float | None = None

    @property
    def label(self) -> str:
        """The policy as written on the command line."""
        return self.name if self.target is None else f"{self.name}@{self.target:g}"


def parse_policy_specs(text: str) -> list[PolicySpec]:
    """Return the policies of `NAME[@TARGET][,NAME…]`, each once; `all` is every policy."""
    entries: list[PolicySpec] = []
    for part in (part.strip() for part in text.split(",")):
        if part == "all":
            entries += [PolicySpec(name) for name in NAMES]
            continue
        name, at, number = part.partition("@")
        if name not in NAMES:
            raise BadRequest(f"--policy has {part!r}; known are {', '.join(NAMES)}, and all")
        if not at:
            entries.append(PolicySpec(name))
            continue
        if name not in WITH_TARGET:
            raise BadRequest(f"--policy {part}: {name} has no target; leave out @{number}")
        try:
            target = float(number)
        except ValueError:
            target = math.nan
        if not 0 < target < math.inf:
            raise BadRequest(f"--policy {part}: the target must be a number above 0, such as {name}@30")
        entries.append(PolicySpec(name, target))
    return list(dict.fromkeys(entries))

"""Catalogue of published models, and the smallest layout of each on a kind of GPU.

`catalogue.json` has the values of each model's public config.json that determine memory, and its published number of
parameters. Memory is computed from them by the planner, never stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from trimtab_operator.layout.cost import Hardware
from trimtab_operator.layout.facts import ModelFacts, facts_of_config
from trimtab_operator.layout.gpus import Gpu
from trimtab_operator.layout.memory_fit import Envelope
from trimtab_operator.layout.node_gpus import GPU_RESOURCE
from trimtab_operator.layout.ranking import Cluster, Row, rank_layouts
from trimtab_operator.resource.spec import GROUP, KIND, VERSION, Parallelism

FILE = Path(__file__).with_name("catalogue.json")
MAX_DEFAULT_MODEL_LEN = 32768  # tokens; longer requests need --max-model-len, because they cost KV cache
NODE_COUNTS = (1, 2, 4)


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A published model."""

    name: str
    uri: str
    parameters: float
    """Published number of parameters."""
    config: Mapping[str, Any]
    needs_token: bool = False
    """True if its license must be accepted on the hub."""

    @property
    def facts(self) -> ModelFacts:
        """Facts for planning."""
        return facts_of_config(self.config, self.uri)


@cache
def load_catalogue() -> Mapping[str, CatalogueModel]:
    """Return the models by name."""
    return {name: CatalogueModel(name, **entry) for name, entry in json.loads(FILE.read_text("utf-8")).items()}


def smallest_layout(facts: ModelFacts, gpu: Gpu, *, max_model_len: int, gpus_per_node: int = 8) -> Row | None:
    """Return the layout with the fewest GPUs that holds the model and a request of `max_model_len` tokens.

    The count is a power of two within a node, or whole nodes; of several layouts, the one with the lowest latency. None
    if four nodes are too few.
    """
    envelope = replace(Envelope.default(facts, gpu), max_model_len=max_model_len)
    counts = [2**power for power in range(gpus_per_node.bit_length()) if 2**power <= gpus_per_node]
    sizes = [(count, 1) for count in counts] + [(gpus_per_node, nodes) for nodes in NODE_COUNTS[1:]]
    for per_node, nodes in sizes:
        cluster = Cluster(hardware=Hardware(gpu=gpu), gpus_per_node=per_node, nodes=nodes)
        rows = rank_layouts(facts, cluster, envelope, objective="latency").rows
        fitting = next((row for row in rows if row.gpus == cluster.gpus), None)
        if fitting is not None:
            return fitting
    return None


def default_model_len(facts: ModelFacts) -> int:
    """Return the maximum request length that `trimtab run` sets if the user sets none."""
    return min(facts.max_model_len, MAX_DEFAULT_MODEL_LEN)


def build_manifest(
    name: str,
    uri: str,
    *,
    device: str,
    parallelism: Parallelism | None = None,
    max_model_len: int | None = None,
    token_secret: str | None = None,
) -> dict[str, Any]:
    """Return the InferenceDeployment for a model."""
    model: dict[str, Any] = {"uri": uri}
    model |= {} if token_secret is None else {"tokenSecretRef": {"name": token_secret, "key": "token"}}
    spec: dict[str, Any] = {"model": model, "runtime": {"device": device}}
    if parallelism is not None:
        degrees = parallelism.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        spec |= {"parallelism": degrees} if degrees else {}
    spec |= {} if max_model_len is None else {"engine": {"maxModelLen": max_model_len}}
    if device == "cuda":
        tolerations = [{"key": GPU_RESOURCE, "operator": "Exists", "effect": "NoSchedule"}]
        spec["template"] = {"spec": {"tolerations": tolerations}}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": KIND, "metadata": {"name": name}, "spec": spec}

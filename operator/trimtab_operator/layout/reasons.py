"""Reasons for the rank of a layout, as text with numbers."""

from __future__ import annotations

from trimtab_operator.layout.cost import tensor_stays_in_a_node
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.memory_fit import Envelope
from trimtab_operator.layout.ranking import Cluster, Row
from trimtab_operator.layout.stages import stages_of
from trimtab_operator.layout.stored_weights import as_loaded
from trimtab_operator.resource.spec import Parallelism

FEW_REQUESTS = 4  # concurrent requests of maxModelLen; below, long requests queue


def reason_for(row: Row, facts: ModelFacts, cluster: Cluster, envelope: Envelope) -> str:
    """Return the reasons as phrases joined by semicolons."""
    facts = as_loaded(facts, cluster.hardware.gpu, envelope.quantization)
    parts = [*_size(row, facts, cluster), *_tensor(row, cluster), *_pipeline(row, cluster), *_experts(row, facts)]
    if row.replicas > 1:
        parts.append(f"{row.replicas} independent replicas")
    if row.fit.max_concurrency < FEW_REQUESTS:
        parts.append(
            f"little KV cache: {row.fit.max_concurrency:.1f} concurrent requests of {envelope.max_model_len} tokens"
        )
    if row.used_gpus < cluster.gpus:
        parts.append(f"leaves {cluster.gpus - row.used_gpus} of {cluster.gpus} GPUs idle")
    return "; ".join(parts)


def _size(row: Row, facts: ModelFacts, cluster: Cluster) -> list[str]:
    p = row.parallelism
    if p.tensor * p.pipeline * p.data == 1:
        return ["fits one GPU: no synchronisation"]
    whole = stages_of(facts, Parallelism())[0].weights_bytes
    memory = cluster.hardware.gpu.memory_bytes
    if whole > memory * cluster.gpus_per_node:
        return ["larger than a node"]
    return ["larger than one GPU"] if whole > memory else []


def _tensor(row: Row, cluster: Cluster) -> list[str]:
    p = row.parallelism
    if p.tensor == 1:
        return []
    share = f"exchanges take {row.estimate.step.exchange_share:.0%} of a step"
    if tensor_stays_in_a_node(p):
        return [f"every layer over {p.tensor} GPUs of one node ({cluster.hardware.gpu.link}): {share}"]
    return [f"every layer over {p.tensor} GPUs of several pods: {share}, because all-reduces cross the network"]


def _pipeline(row: Row, cluster: Cluster) -> list[str]:
    p = row.parallelism
    if p.pipeline == 1:
        return []
    if row.pods > 1:
        return [f"{p.pipeline} stages over {row.pods} pods: only hidden states cross the network"]
    slow = "" if cluster.hardware.gpu.link == "NVLink" else ", which matters without NVLink"
    return [f"{p.pipeline} stages: one transfer each instead of two all-reduces per layer{slow}"]


def _experts(row: Row, facts: ModelFacts) -> list[str]:
    p = row.parallelism
    if not facts.is_moe or p.tensor * p.data == 1:
        return []
    ranks = p.tensor * p.data
    held = f"{-(-facts.num_experts // ranks)} whole experts on each of {ranks} ranks"
    parts = [held if p.expert else f"each expert in {ranks} slices"]
    if p.data > 1:
        parts.append(f"attention and its KV cache in {p.data} copies that run in lockstep")
    return parts

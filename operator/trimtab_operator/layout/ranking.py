"""Ranking of the layouts of a model on a number of GPUs.

The criterion is the estimated throughput of all GPUs under a given load or, for latency, the time per output token of
a single request, both from `cost.py`'s roofline. Replicas fill the GPUs: for a dense model they replace data
parallelism and are independent of each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from trimtab_operator.layout.check import layout_problems
from trimtab_operator.layout.cost import (
    Hardware,
    StepCost,
    decode_step,
    prefill_seconds_per_token,
    tensor_stays_in_a_node,
)
from trimtab_operator.layout.facts import ModelFacts
from trimtab_operator.layout.memory_fit import Envelope, MemoryFit, memory_fit
from trimtab_operator.layout.pods import gpus_of_a_pod
from trimtab_operator.layout.rules import Problem
from trimtab_operator.layout.stored_weights import as_loaded
from trimtab_operator.resource.spec import Parallelism

Objective = Literal["throughput", "latency"]
MAX_TENSOR = 64
MAX_PIPELINE = 64
MAX_DATA = 1024  # the maximum of the CRD
ALL_DEGREES_UP_TO = 8  # larger degrees must divide the number of GPUs


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Lengths of an average request."""

    prompt_tokens: int = 1024
    output_tokens: int = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """`nodes` machines with `gpus_per_node` GPUs each."""

    hardware: Hardware
    gpus_per_node: int
    nodes: int = 1

    @property
    def gpus(self) -> int:
        return self.gpus_per_node * self.nodes


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """Estimated performance of a layout under the load. `tokens_per_second` is the total of all replicas."""

    requests_per_engine: int
    """Concurrent requests: the capacity of the KV cache, at most max_num_seqs."""
    step: StepCost
    """Decode step with `requests_per_engine` requests."""
    single_step_seconds: float
    """Seconds of a decode step with one request in the engine."""
    tokens_per_second: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A valid layout. `gpus` is the number of GPUs of one replica."""

    parallelism: Parallelism
    pods: int
    gpus: int
    replicas: int
    fit: MemoryFit
    estimate: Estimate

    @property
    def used_gpus(self) -> int:
        return self.gpus * self.replicas


@dataclass(frozen=True, slots=True)
class RejectedLayout:
    parallelism: Parallelism
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Valid layouts, the best first, and rejected layouts by size."""

    rows: tuple[Row, ...]
    refused: tuple[RejectedLayout, ...]


def rank_layouts(
    facts: ModelFacts,
    cluster: Cluster,
    envelope: Envelope,
    *,
    load: Load = Load(),
    objective: Objective = "throughput",
) -> Ranking:
    """Rank every layout that the cluster's GPUs allow."""
    rows, refused = [], []
    gpu = cluster.hardware.gpu
    for parallelism in candidates(facts, cluster):
        problems = layout_problems(parallelism, facts, gpu, envelope)
        if problems:
            refused.append(RejectedLayout(parallelism, problems))
        else:
            rows.append(_row(facts, parallelism, cluster, envelope, load))
    return Ranking(_deduplicated(sorted(rows, key=lambda row: _order(row, objective))), tuple(refused))


def candidates(facts: ModelFacts, cluster: Cluster) -> Iterator[Parallelism]:
    """Yield all combinations of tensor and pipeline; for MoE models also data and expert parallel. Some are invalid.

    A dense model uses replicas instead of data parallelism. Larger degrees must divide the number of GPUs.
    """
    total = cluster.gpus
    degrees = [n for n in range(1, total + 1) if n <= ALL_DEGREES_UP_TO or total % n == 0]
    for tensor in (n for n in degrees if n <= MAX_TENSOR):
        for pipeline in (n for n in degrees if n <= min(total // tensor, MAX_PIPELINE)):
            most = min(total // (tensor * pipeline), MAX_DATA) if facts.is_moe else 1
            for data in (n for n in degrees if n <= most):
                per_pod = gpus_of_a_pod(tensor, pipeline, data, most=cluster.gpus_per_node, nodes=cluster.nodes)
                if per_pod is None:
                    continue  # an engine is larger than a node, or the pods do not fit on the nodes
                shares = facts.is_moe and tensor * data > 1
                for expert in (False, True) if shares else (False,):
                    yield Parallelism(tensor=tensor, pipeline=pipeline, data=data, expert=expert, gpus_per_node=per_pod)


def _row(facts: ModelFacts, parallelism: Parallelism, cluster: Cluster, envelope: Envelope, load: Load) -> Row:
    gpus = parallelism.tensor * parallelism.pipeline * parallelism.data
    per_pod = parallelism.gpus_per_node or gpus
    pods = gpus // per_pod
    replicas = cluster.nodes * (cluster.gpus_per_node // per_pod) // pods
    fit = memory_fit(facts, parallelism, cluster.hardware.gpu, envelope)
    held = as_loaded(facts, cluster.hardware.gpu, envelope.quantization)
    estimate = estimate_layout(held, parallelism, cluster.hardware, fit, envelope, load)
    total = replace(estimate, tokens_per_second=estimate.tokens_per_second * parallelism.data * replicas)
    return Row(parallelism=parallelism, pods=pods, gpus=gpus, replicas=replicas, fit=fit, estimate=total)


def estimate_layout(
    facts: ModelFacts,
    parallelism: Parallelism,
    hardware: Hardware,
    fit: MemoryFit,
    envelope: Envelope,
    load: Load,
) -> Estimate:
    """Return the estimate of one engine (one data-parallel rank) in the steady state.

    Each finished request is replaced, so each step has prompt_tokens / output_tokens prompt tokens per running request.
    """
    longest = min(load.prompt_tokens + load.output_tokens, envelope.max_model_len)
    batch = max(1, min(envelope.max_num_seqs, fit.kv_tokens // longest))
    output = min(load.output_tokens, longest)
    prompt = longest - output
    context = prompt + output / 2
    kv_bytes = envelope.kv_dtype_bytes
    step = decode_step(facts, parallelism, hardware, batch=batch, context=context, kv_dtype_bytes=kv_bytes)
    single = decode_step(facts, parallelism, hardware, batch=1, context=context, kv_dtype_bytes=kv_bytes)
    chunk = min(envelope.max_num_batched_tokens, max(1, batch * prompt))
    per_prompt_token = prefill_seconds_per_token(facts, parallelism, hardware, chunk=chunk, context=prompt / 2)
    return Estimate(
        requests_per_engine=batch,
        step=step,
        single_step_seconds=single.seconds,
        tokens_per_second=batch / (step.seconds + batch * prompt / output * per_prompt_token),
    )


def _order(row: Row, objective: Objective) -> tuple[float, ...]:
    """Return the sort key of a row.

    Layouts with all-reduces across nodes are last, because the roofline ignores other traffic on the network. Ties go
    to the smaller engine, then to whole experts if several engines share them.
    """
    p = row.parallelism
    best = -row.estimate.tokens_per_second if objective == "throughput" else row.estimate.single_step_seconds
    return not tensor_stays_in_a_node(p), best, row.gpus, p.expert != (p.data > 1), p.pipeline, p.data


def _deduplicated(rows: list[Row]) -> tuple[Row, ...]:
    """Keep the first of rows that differ only in expert parallelism, which the roofline does not model."""
    found: dict[tuple[int, int, int], Row] = {}
    for row in rows:
        found.setdefault((row.parallelism.tensor, row.parallelism.pipeline, row.parallelism.data), row)
    return tuple(found.values())
